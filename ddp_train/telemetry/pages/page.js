// Draws the plots of a page with ECharts, and sorts its tables. All texts are set as text, never as markup.
"use strict";
(() => {
  const COLOURS = ["#3b8ede", "#e08214", "#2fa36b", "#cf4f9b", "#8f7be0", "#b0713a", "#20a5b5", "#a3a026", "#d9534f", "#8a8f98"];
  const FONT = "system-ui, sans-serif";
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plain = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

  // Significant digits that tell apart the ticks of an axis over these values: a tenth of their span at least.
  const digits = (values) => {
    const [low, high] = range(values), power = (size) => Math.floor(Math.log10(size));
    return high > low ? Math.min(15, Math.max(4, power(Math.max(Math.abs(low), Math.abs(high))) - power((high - low) / 10) + 1)) : 4;
  };
  // Math.max(...values) fails for some 100,000 of them.
  function range(values) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) if (typeof value === "number") [low, high] = [Math.min(low, value), Math.max(high, value)];
    return [low, high];
  }
  const finer = (of, values) => ({ ...of, digits: digits(of.whole ? [0, ...values] : values) });
  const number = (value, least = 0) => {
    if (value === null || value === undefined) return "-";
    if (typeof value !== "number") return String(value);
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(3, least - 1)).replace(/\.?0+e/, "e");
    return value.toLocaleString("en", { maximumSignificantDigits: Math.max(least, size >= 1e4 ? 7 : 5) });
  };
  const shown = (axis, value) => {
    const least = (axis.digits || 0) + 1;
    if (axis.percent && typeof value === "number") return `${number(+(100 * value).toPrecision(Math.max(6, least)), least)} %`;
    return number(value, least);
  };
  const tick = (axis) => (value) => {
    const most = axis.digits || 4;
    if (axis.percent) return `${+(100 * value).toPrecision(most)} %`;
    if (value && Math.abs(value) < 1e-3) return value.toExponential().replace("e+", "e");
    return value.toLocaleString("en", { maximumSignificantDigits: Number.isInteger(value) ? 21 : most });
  };
  const isNarrow = () => window.innerWidth < 600;

  function axis(of, extra = {}) {
    const quiet = css("--quiet"), line = css("--line");
    const found = {
      type: of.log ? "log" : "value", scale: !of.whole, name: of.label, nameTextStyle: { color: quiet },
      axisLabel: { color: quiet, fontFamily: FONT, formatter: tick(of), hideOverlap: true },
      axisLine: { lineStyle: { color: line } }, splitLine: { lineStyle: { color: line } }, ...extra,
    };
    if (of.percent) found.max = (range) => (range.max > 0.9 ? 1 : null); // no tick beyond 100 %
    if (of.ticks.length) {
      found.axisLabel.customValues = of.ticks;
      found.axisTick = { customValues: of.ticks };
    }
    return found;
  }
  const along = (of) => axis(of, { nameLocation: "middle", nameGap: 26, splitLine: { show: false } });
  const up = (of) => axis(of, { nameLocation: "end", nameTextStyle: { color: css("--quiet"), align: "left" } });
  const grid = (more) => ({ left: 6, right: 14, top: 34, bottom: 30, outerBoundsMode: "same", containLabel: true, ...more });
  const base = () => ({
    animation: false, textStyle: { color: css("--text"), fontFamily: FONT }, color: COLOURS,
    tooltip: { confine: true, backgroundColor: css("--page"), borderColor: css("--line"), textStyle: { color: css("--text"), fontSize: 12 } },
  });

  // Marks whose words would lie on each other, which are as wide as a line is high, share a place; the table names all.
  function apart(marks, span, width) {
    const places = [];
    for (const mark of [...marks].sort((a, b) => a.x - b.x)) {
      const last = places[places.length - 1];
      if (last && (mark.x - last.x) * width <= 16 * span) last.texts.push(mark.text);
      else places.push({ x: mark.x, texts: [mark.text] });
    }
    return places;
  }
  const few = (texts) => (texts.length > 2 ? `${texts[0]}, ${texts.length - 1} more` : texts.join(", "));

  const kinds = {
    curves(chart, width) {
      const [x, y] = [chart.x, chart.y].map((of, at) => finer(of, chart.curves.flatMap((curve) => curve.points.map((point) => point[at]))));
      const series = [], named = [];
      let colour = 0;
      const order = [...chart.curves].sort((a, b) => a.level - b.level);
      const many = chart.curves.some((curve) => curve.level === -1); // then the tooltip is of the one under the pointer
      for (const curve of order) {
        const own = curve.level === -1 ? css("--quiet") : COLOURS[(curve.colour ?? colour++) % COLOURS.length];
        if (curve.level !== -1) named.push(curve.name);
        if (curve.low.length && curve.high.length) {
          const band = { type: "line", stack: `band ${curve.name}`, symbol: "none", lineStyle: { opacity: 0 }, silent: true, tooltip: { show: false }, z: 1, stackStrategy: "all" };
          series.push({ ...band, id: `band low ${curve.name}`, data: curve.points.map((point, at) => [point[0], curve.low[at]]) });
          series.push({ ...band, id: `band high ${curve.name}`, data: curve.points.map((point, at) => [point[0], curve.high[at] - curve.low[at]]), areaStyle: { color: own, opacity: 0.2 } });
        }
        series.push({
          type: "line", name: curve.name, data: curve.points, showSymbol: curve.points.length <= 12, symbolSize: 5,
          itemStyle: { color: own }, z: 3 + curve.level, emphasis: { focus: many ? "series" : "none" },
          lineStyle: { color: own, width: curve.level === 1 ? 3 : 1.6, type: curve.dashed ? "dashed" : "solid", opacity: curve.level === -1 ? 0.45 : 1 },
          triggerLineEvent: many,
        });
      }
      const [begin, end] = range([...order.flatMap((curve) => curve.points.map((point) => point[0])), ...chart.marks.map((mark) => mark.x)]);
      if (chart.marks.length) {
        const marks = apart(chart.marks, end - begin, width - 60); // 60: of the labels beside the plot
        series[series.length - 1].markLine = {
          symbol: "none", silent: false, lineStyle: { color: css("--bad"), type: "dotted" },
          label: { color: css("--quiet"), textBorderColor: css("--page"), textBorderWidth: 3, fontSize: 10, width: 150, overflow: "truncate", formatter: (given) => given.name, position: "insideEndTop" },
          data: marks.map((mark) => ({ xAxis: mark.x, name: few(mark.texts) })),
        };
      }
      const ys = order.flatMap((curve) => curve.points.map((point) => point[1])).filter((value) => value !== null);
      const isLog = chart.y.log && Math.max(...ys) > 8 * Math.min(...ys); // a logarithmic axis shows whole decades
      const option = { ...base(), grid: grid({ bottom: named.length > 1 ? 56 : 30 }), xAxis: along(x), yAxis: up({ ...y, log: isLog }), series };
      option.xAxis.min = chart.x.whole ? 0 : begin;
      option.xAxis.max = end;
      Object.assign(option.xAxis.axisLabel, { alignMaxLabel: "right", showMaxLabel: Number.isInteger(option.xAxis.max) });
      if (named.length > 1) option.legend = { type: "scroll", bottom: 0, data: named, textStyle: { color: css("--quiet") }, pageTextStyle: { color: css("--quiet") } };
      option.tooltip.trigger = many ? "item" : "axis";
      option.tooltip.formatter = (given) => {
        const points = (Array.isArray(given) ? given : [given]).filter((p) => !String(p.seriesId).startsWith("band ") && Array.isArray(p.value));
        if (!points.length) return plain(given.name || "");
        const head = `${plain(x.label)} ${plain(shown(x, points[0].value[0]))}`;
        return [head, ...points.map((p) => `${plain(p.seriesName)}: <b>${plain(shown(y, p.value[1]))}</b>`)].join("<br>");
      };
      return option;
    },

    bars(chart) {
      const names = chart.bars.map((bar) => bar.name), own = COLOURS[0];
      const of = finer(chart.x, chart.bars.flatMap((bar) => [bar.value, bar.low, bar.high]));
      const label = (bar) => bar.text || (bar.value === null ? "" : shown(of, bar.value));
      const ruler = document.createElement("canvas").getContext("2d");
      ruler.font = `12px ${FONT}`;
      const width = Math.min(isNarrow() ? 120 : 280, 2 + Math.ceil(Math.max(...names.map((name) => ruler.measureText(name).width))));
      const line = css("--text");
      const low = Math.min(...chart.bars.flatMap((bar) => [bar.value, bar.low]).filter((value) => value !== null));
      const series = [{
        type: chart.x.whole ? "bar" : "scatter", symbolSize: 9, barMaxWidth: 18, itemStyle: { color: own },
        data: chart.bars.map((bar, at) => (chart.x.whole ? bar.value : [bar.value, at])),
      }, { // behind the whisker, and for what has no value
        type: "scatter", silent: true, symbolSize: 0.1, data: chart.bars.map((bar, at) => [Math.max(bar.high ?? 0, bar.value ?? (chart.x.whole ? 0 : low)), at]),
        label: { show: true, position: "right", distance: 6, color: css("--quiet"), formatter: (given) => label(chart.bars[given.dataIndex]) },
      }, {
        type: "custom", silent: true, z: 5, encode: { x: [0, 1], y: 2 },
        data: chart.bars.map((bar, at) => [bar.low, bar.high, at]).filter((row) => row[0] !== null && row[1] !== null && row[0] < row[1]),
        renderItem: (_, api) => {
          const [a, y] = api.coord([api.value(0), api.value(2)]), [b] = api.coord([api.value(1), api.value(2)]);
          const stroke = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke: line, lineWidth: 1 } });
          return { type: "group", children: [stroke(a, y, b, y), stroke(a, y - 3, a, y + 3), stroke(b, y - 3, b, y + 3)] };
        },
      }];
      if (chart.baseline !== null) series[0].markLine = { symbol: "none", silent: true, label: { show: false }, lineStyle: { color: css("--text"), type: "dotted" }, data: [{ xAxis: chart.baseline }] };
      const option = { ...base(), grid: grid({ top: 8, left: width + 12, right: isNarrow() ? 70 : 90, bottom: 42, containLabel: false, outerBoundsMode: "none" }), xAxis: along(of), series };
      option.yAxis = {
        type: "category", inverse: true, data: names, axisTick: { show: false }, axisLine: { lineStyle: { color: css("--line") } },
        axisLabel: { color: css("--text"), width, overflow: "truncate", interval: 0 }, splitLine: { show: !chart.x.whole, lineStyle: { color: css("--line") } },
      };
      option.tooltip.formatter = (given) => {
        const bar = chart.bars[given.dataIndex];
        const spread = bar.low !== null && bar.high !== null ? `<br>${plain(shown(of, bar.low))} to ${plain(shown(of, bar.high))}` : "";
        return `${plain(bar.name)}<br><b>${plain(label(bar))}</b>${spread}`;
      };
      option.height = 50 + 28 * names.length;
      return option;
    },

    scatter(chart) {
      const isNumber = chart.points.every((point) => typeof point.values[0] === "number");
      const [of, goal] = [chart.x, chart.y].map((one, at) => finer(one, chart.points.map((point) => point.values[at])));
      const x = isNumber ? along(of) : {
        ...along(chart.x), type: "category", data: [...new Set(chart.points.map((point) => String(point.values[0])))],
      };
      if (!isNumber) x.axisLabel = { color: css("--quiet"), interval: 0, hideOverlap: false };
      const data = chart.points.map((point) => ({
        value: [isNumber ? point.values[0] : String(point.values[0]), point.values[1]], name: point.name,
        symbolSize: point.strong ? 14 : 9, itemStyle: { color: point.strong ? COLOURS[1] : COLOURS[0], opacity: 0.85 },
      }));
      const option = { ...base(), grid: grid({ right: 20 }), xAxis: x, yAxis: up(goal), series: [{ type: "scatter", data }] };
      option.tooltip.formatter = (given) => `${plain(given.name)}<br><b>${plain(shown(goal, given.value[1]))}</b>`;
      return option;
    },

    parallel(chart) {
      const goalFirst = (list) => (isNarrow() ? [list[list.length - 1], ...list.slice(0, -1)] : list); // where it is in sight
      const axes = goalFirst(chart.axes), goal = isNarrow() ? 0 : axes.length - 1;
      const points = chart.points.map((point) => ({ ...point, values: goalFirst(point.values) }));
      const values = points.map((point) => point.values[goal]);
      const parallelAxis = axes.map((of, dim) => {
        const column = points.map((point) => point.values[dim]).filter((value) => value !== null);
        const style = { nameTextStyle: { color: css("--quiet"), fontSize: 11 }, axisLine: { lineStyle: { color: css("--quiet") } }, z: 5 };
        const label = { color: css("--text"), backgroundColor: css("--page"), padding: [1, 3], borderRadius: 3 };
        const distinct = [...new Set(column)], isNumber = column.every((value) => typeof value === "number");
        if (isNumber && dim !== goal && distinct.length <= 8) {
          return { dim, name: of.label, type: "category", data: distinct.sort((a, b) => a - b).map(String), ...style, axisLabel: label };
        }
        if (isNumber) {
          return { dim, name: of.label, type: of.log ? "log" : "value", scale: true, min: Math.min(...column), max: Math.max(...column), ...style, axisLabel: { ...label, formatter: tick(finer(of, column)), showMinLabel: true, showMaxLabel: true, hideOverlap: true } };
        }
        return { dim, name: of.label, type: "category", data: distinct.map(String), ...style, axisLabel: label };
      });
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const shade = (value) => {
        const at = high > low ? (value - low) / (high - low) : 1, mix = (a, b) => Math.round(a + (b - a) * at);
        return `rgb(${mix(224, 32)},${mix(130, 120)},${mix(20, 220)})`;
      };
      const ordered = [...points].sort((a, b) => a.strong - b.strong);
      const data = ordered.map((point) => ({
        value: point.values.map((value, dim) => (parallelAxis[dim].type === "category" && value !== null ? String(value) : value)), name: point.name,
        lineStyle: { color: shade(point.values[goal]), width: point.strong ? 4 : 1.5, opacity: point.strong ? 1 : 0.6 },
      }));
      const option = { ...base(), parallel: { left: 50, right: 60, top: 40, bottom: 20, parallelAxisDefault: { nameGap: 14 } }, parallelAxis, series: [{ type: "parallel", data, z: 1, emphasis: { lineStyle: { width: 4, opacity: 1 } } }] };
      option.tooltip.trigger = "item";
      option.tooltip.formatter = (given) => `${plain(given.name)}<br><b>${plain(shown(axes[goal], given.value[goal]))}</b>`;
      option.width = 120 * axes.length;
      return option;
    },
  };

  const drawn = [];
  function draw() {
    while (drawn.length) drawn.pop().dispose();
    for (const holder of document.querySelectorAll(".chart")) {
      const chart = JSON.parse(holder.querySelector("script").textContent);
      const frame = holder.querySelector(".frame"), option = kinds[chart.kind](chart, frame.clientWidth);
      frame.style.height = `${option.height || (isNarrow() ? 260 : 300)}px`;
      frame.style.minWidth = option.width ? `${option.width}px` : "";
      delete option.height;
      delete option.width;
      const instance = echarts.init(frame, null, { renderer: "svg" });
      instance.setOption(option);
      drawn.push(instance);
    }
  }

  function sortTables() {
    for (const button of document.querySelectorAll("th button")) {
      button.addEventListener("click", () => {
        const head = button.closest("th"), body = head.closest("table").tBodies[0];
        const place = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const key = (row) => row.cells[place].dataset.v ?? row.cells[place].textContent;
        const rows = [...body.rows].sort((one, other) => {
          const [a, b] = [key(one), key(other)];
          if (a === "-" || b === "-") return (a === "-") - (b === "-"); // what has no value comes last, in either order
          const found = isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", { numeric: true }) : a - b;
          return up ? found : -found;
        });
        body.append(...rows);
      });
    }
    for (const button of document.querySelectorAll(".show")) {
      button.addEventListener("click", () => {
        const few = button.closest("section").querySelector("table").classList.toggle("few");
        button.textContent = few ? button.dataset.more : button.dataset.fewer;
      });
    }
  }

  // A page is written by what runs: if that is gone, nobody writes that.
  function tellIfOld() {
    const state = document.querySelector(".state[data-written]");
    if (!state) return;
    const minutes = Math.floor((Date.now() / 1000 - state.dataset.written) / 60);
    if (minutes < Math.max(2, state.dataset.every / 20)) return; // three pages were not written
    state.classList.add("old");
    state.textContent += `. No news for ${minutes.toLocaleString("en")} minutes: if it was killed, the same command resumes it`;
  }

  sortTables();
  tellIfOld();
  if (document.querySelector(".chart")) {
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    let width = window.innerWidth;
    addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; draw(); } });
    addEventListener("beforeprint", draw);
  }
})();
