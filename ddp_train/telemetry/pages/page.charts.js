// Draws the charts of a report with ECharts. All texts are set as text, never as markup.
"use strict";

/** Draws the chart of each frame, and again when the width or the colours of the page change. */
const keepDrawn = (() => {
  const COLOURS = [
    "#3b8ede", "#e08214", "#2fa36b", "#cf4f9b", "#8f7be0",
    "#b0713a", "#20a5b5", "#a3a026", "#d9534f", "#8a8f98",
  ];
  const FONT = "system-ui, sans-serif";
  // Ratio of the largest to the smallest value from which an axis that may be logarithmic is so:
  // a loss, which is shown in whole decades, and a parameter, whose values are named.
  const CURVE_RATIO = 20;
  const PARAMETER_RATIO = 10;
  // Values of a parameter up to which its axis names these and no others.
  const MOST_TICKS = 8;
  // Points of a curve up to which they are marked.
  const MOST_SYMBOLS = 12;
  // Pixels beside a plot, which its labels take.
  const LABELS_WIDTH = 60;
  // Pixels of a word that stands upright.
  const LINE_HEIGHT = 16;

  const colour = (name) => {
    const style = getComputedStyle(document.documentElement);
    return style.getPropertyValue(`--${name}`).trim();
  };
  const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const isNarrow = () => window.innerWidth < 600;
  const isNumber = (value) => typeof value === "number";

  // --- numbers ------------------------------------------------------------------------------------

  /** The lowest and the highest number. Math.max(...values) fails for some 100,000 of them. */
  function range(values) {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values.filter(isNumber)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    return [low, high];
  }

  const power = (size) => Math.floor(Math.log10(size));

  /** Significant digits that tell the ticks of an axis apart: a tenth of its span at least. */
  function digitsOf(values) {
    const [low, high] = range(values);
    if (!(high > low)) return 4;
    const largest = Math.max(Math.abs(low), Math.abs(high));
    const digits = power(largest) - power((high - low) / 10) + 1;
    return Math.min(15, Math.max(4, digits));
  }

  /** An axis, with the digits that its values need. */
  function measured(axis, values) {
    return { ...axis, digits: digitsOf(axis.whole ? [0, ...values] : values) };
  }

  function spans(values, ratio) {
    const [low, high] = range(values);
    return low > 0 && high >= ratio * low;
  }

  /** A number of some significant digits at least. */
  function numberText(value, least) {
    if (value === null || value === undefined) return "-";
    if (!isNumber(value)) return String(value);
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) {
      return value.toExponential(Math.max(3, least - 1)).replace(/\.?0+e/, "e");
    }
    const usual = size >= 1e4 ? 7 : 5;
    return value.toLocaleString("en", { maximumSignificantDigits: Math.max(least, usual) });
  }

  /** A value of an axis, for a label or a tooltip: more exact than its ticks. */
  function valueText(axis, value) {
    const least = axis.digits + 1;
    if (!axis.percent || !isNumber(value)) return numberText(value, least);
    const percent = Number((100 * value).toPrecision(Math.max(6, least)));
    return `${numberText(percent, least)} %`;
  }

  /** The function that writes the ticks of an axis. */
  const tickText = (axis) => (value) => {
    if (axis.percent) return `${Number((100 * value).toPrecision(axis.digits))} %`;
    if (value && Math.abs(value) < 1e-3) return value.toExponential().replace("e+", "e");
    const most = Number.isInteger(value) ? 21 : axis.digits;
    return value.toLocaleString("en", { maximumSignificantDigits: most });
  };

  // --- parts of charts ----------------------------------------------------------------------------

  function axisOption(axis, isLog, ticks) {
    const line = { lineStyle: { color: colour("line") } };
    const option = {
      type: isLog ? "log" : "value",
      scale: !axis.whole,
      name: axis.label,
      nameTextStyle: { color: colour("quiet") },
      axisLabel: {
        color: colour("quiet"),
        fontFamily: FONT,
        formatter: tickText(axis),
        hideOverlap: true,
      },
      axisLine: line,
      splitLine: line,
    };
    if (axis.percent) option.max = (shown) => (shown.max > 0.9 ? 1 : null); // no tick beyond 100 %
    if (ticks.length) {
      option.axisLabel.customValues = ticks;
      option.axisTick = { customValues: ticks };
    }
    return option;
  }

  function horizontal(axis, isLog = axis.log, ticks = axis.ticks) {
    const place = { nameLocation: "middle", nameGap: 26, splitLine: { show: false } };
    return { ...axisOption(axis, isLog, ticks), ...place };
  }

  function vertical(axis, isLog = false) {
    const nameTextStyle = { color: colour("quiet"), align: "left" };
    return { ...axisOption(axis, isLog, axis.ticks), nameLocation: "end", nameTextStyle };
  }

  function gridOption(changes) {
    const inside = { outerBoundsMode: "same", containLabel: true };
    return { left: 6, right: 14, top: 34, bottom: 30, ...inside, ...changes };
  }

  /** What all charts have. text: of a tooltip, as markup, for what ECharts has found. */
  function chartOption(text, trigger = "item") {
    return {
      animation: false,
      textStyle: { color: colour("text"), fontFamily: FONT },
      color: COLOURS,
      tooltip: {
        confine: true,
        trigger,
        backgroundColor: colour("page"),
        borderColor: colour("line"),
        textStyle: { color: colour("text"), fontSize: 12 },
        formatter: text,
      },
    };
  }

  const tooltip = (name, value) => `${escaped(name)}<br><b>${escaped(value)}</b>`;

  // --- curves -------------------------------------------------------------------------------------

  /** Two invisible lines, one on the other; the second fills the band between them. */
  function bandSeries(curve, itsColour) {
    const line = {
      type: "line",
      stack: `band ${curve.name}`,
      stackStrategy: "all",
      symbol: "none",
      lineStyle: { opacity: 0 },
      silent: true,
      tooltip: { show: false },
      z: 1,
    };
    const low = curve.points.map((point) => [point[0], point[2]]);
    const height = curve.points.map((point) => [point[0], point[3] - point[2]]);
    const areaStyle = { color: itsColour, opacity: 0.2 };
    return [
      { ...line, id: `band low ${curve.name}`, data: low },
      { ...line, id: `band high ${curve.name}`, data: height, areaStyle },
    ];
  }

  /** The points of a line, interrupted at the gaps. */
  function lineData(curve, gaps) {
    const points = curve.points.map((point) => point.slice(0, 2));
    if (!gaps.length) return points;
    const breaks = gaps.map((gap) => [gap, null]);
    return [...points, ...breaks].sort((one, other) => one[0] - other[0]);
  }

  function lineSeries(curve, itsColour, gaps, isOneOfMany) {
    const isBehind = curve.level === -1;
    return {
      type: "line",
      name: curve.name,
      data: lineData(curve, gaps),
      showSymbol: curve.points.length <= MOST_SYMBOLS,
      symbolSize: 5,
      itemStyle: { color: itsColour },
      lineStyle: {
        color: itsColour,
        width: curve.level === 1 ? 3 : 1.6,
        type: curve.dashed ? "dashed" : "solid",
        opacity: isBehind ? 0.45 : 1,
      },
      z: 3 + curve.level,
      emphasis: { focus: isOneOfMany ? "series" : "none" },
      triggerLineEvent: isOneOfMany,
    };
  }

  /** Marks whose words would lie on each other share a place. pixelsPerUnit: of the x axis. */
  function markPlaces(marks, pixelsPerUnit) {
    const places = [];
    for (const mark of [...marks].sort((one, other) => one.x - other.x)) {
      const last = places.at(-1);
      if (last && (mark.x - last.x) * pixelsPerUnit <= LINE_HEIGHT) last.texts.push(mark.text);
      else places.push({ x: mark.x, texts: [mark.text] });
    }
    return places;
  }

  /** Vertical lines with words on their left; on their right where the y axis is too close. The
   * table of events has all of them. begin: of the x axis. */
  function markLine(marks, pixelsPerUnit, begin) {
    const data = markPlaces(marks, pixelsPerUnit).map(({ x, texts }) => {
      const isLong = texts.length > 2;
      const name = isLong ? `${texts[0]}, ${texts.length - 1} more` : texts.join(", ");
      const isAtAxis = (x - begin) * pixelsPerUnit < LINE_HEIGHT;
      return { xAxis: x, name, label: { position: isAtAxis ? "insideEndBottom" : "insideEndTop" } };
    });
    return {
      symbol: "none",
      silent: false,
      lineStyle: { color: colour("bad"), type: "dotted" },
      label: {
        color: colour("quiet"),
        textBorderColor: colour("page"),
        textBorderWidth: 3,
        fontSize: 10,
        width: 150,
        overflow: "truncate",
        formatter: (mark) => mark.name,
      },
      data,
    };
  }

  function legendOption(names) {
    const textStyle = { color: colour("quiet") };
    return { type: "scroll", bottom: 0, data: names, textStyle, pageTextStyle: textStyle };
  }

  /** The tooltip of one point, or of the points of all curves at one x. */
  const curvesTooltip = (x, y) => (hovered) => {
    const all = Array.isArray(hovered) ? hovered : [hovered];
    const isPoint = (p) => Array.isArray(p.value) && !String(p.seriesId).startsWith("band ");
    const points = all.filter(isPoint);
    if (!points.length) return escaped(hovered.name || "");
    const head = `${escaped(x.label)} ${escaped(valueText(x, points[0].value[0]))}`;
    const lines = points.map((point) => {
      const value = escaped(valueText(y, point.value[1]));
      return `${escaped(point.seriesName)}: <b>${value}</b>`;
    });
    return [head, ...lines].join("<br>");
  };

  function curves(chart, width) {
    const drawn = [...chart.curves].sort((one, other) => one.level - other.level);
    const points = drawn.flatMap((curve) => curve.points);
    const ys = points.map((point) => point[1]);
    const x = measured(chart.x, points.map((point) => point[0]));
    const y = measured(chart.y, ys);
    const isOneOfMany = drawn.some((curve) => curve.level === -1);
    const named = drawn.filter((curve) => curve.level !== -1);
    const series = [];
    let next = 0;
    for (const curve of drawn) {
      let itsColour = colour("quiet");
      if (curve.level !== -1) itsColour = COLOURS[(curve.colour ?? next++) % COLOURS.length];
      if (curve.points[0].length > 2) series.push(...bandSeries(curve, itsColour));
      series.push(lineSeries(curve, itsColour, chart.gaps, isOneOfMany));
    }
    const xs = points.map((point) => point[0]);
    const [begin, end] = range([...xs, ...chart.marks.map((mark) => mark.x)]);
    if (chart.marks.length) {
      const pixelsPerUnit = (width - LABELS_WIDTH) / (end - begin);
      series.at(-1).markLine = markLine(chart.marks, pixelsPerUnit, x.whole ? 0 : begin);
    }
    const hasLegend = named.length > 1;
    const option = {
      ...chartOption(curvesTooltip(x, y), isOneOfMany ? "item" : "axis"),
      grid: gridOption({ bottom: hasLegend ? 56 : 30 }),
      xAxis: horizontal(x),
      yAxis: vertical(y, y.log && spans(ys, CURVE_RATIO)),
      series,
    };
    option.xAxis.min = x.whole ? 0 : begin;
    option.xAxis.max = end;
    option.xAxis.axisLabel.alignMaxLabel = "right";
    option.xAxis.axisLabel.showMaxLabel = Number.isInteger(end);
    if (hasLegend) {
      // The one that stands out comes first: a narrow legend shows the others on further pages.
      const ordered = [...named].sort((one, other) => other.level - one.level);
      option.legend = legendOption(ordered.map((curve) => curve.name));
    }
    return option;
  }

  // --- bars ---------------------------------------------------------------------------------------

  /** Pixels for the names beside the bars. */
  function namesWidth(names) {
    const ruler = document.createElement("canvas").getContext("2d");
    ruler.font = `12px ${FONT}`;
    const longest = Math.max(...names.map((name) => ruler.measureText(name).width));
    return Math.min(isNarrow() ? 120 : 280, 2 + Math.ceil(longest));
  }

  /** A line from low to high with a stroke at each end. */
  function whisker(api) {
    const [left, y] = api.coord([api.value(0), api.value(2)]);
    const [right] = api.coord([api.value(1), api.value(2)]);
    const stroke = (x1, y1, x2, y2) => ({
      type: "line",
      shape: { x1, y1, x2, y2 },
      style: { stroke: colour("text"), lineWidth: 1 },
    });
    const ends = [left, right].map((x) => stroke(x, y - 3, x, y + 3));
    return { type: "group", children: [stroke(left, y, right, y), ...ends] };
  }

  const hasSpread = (bar) => bar.low !== null && bar.high !== null;

  /** Bars from 0, or dots where the axis need not begin there; their labels; their whiskers. */
  function barSeries(chart, label) {
    const isWhole = chart.x.whole;
    const [lowest] = range(chart.bars.flatMap((bar) => [bar.value, bar.low]));
    const begin = isWhole ? 0 : lowest;
    const values = {
      type: isWhole ? "bar" : "scatter",
      symbolSize: 9,
      barMaxWidth: 18,
      itemStyle: { color: COLOURS[0] },
      data: chart.bars.map((bar, place) => (isWhole ? bar.value : [bar.value, place])),
    };
    // Points that nobody sees: a label stands behind its whisker, and where there is no bar.
    const labels = {
      type: "scatter",
      silent: true,
      symbolSize: 0.1,
      data: chart.bars.map((bar, place) => [Math.max(bar.high ?? 0, bar.value ?? begin), place]),
      label: {
        show: true,
        position: "right",
        distance: 6,
        color: colour("quiet"),
        formatter: (point) => label(chart.bars[point.dataIndex]),
      },
    };
    const spreads = chart.bars.map((bar, place) => [bar.low, bar.high, place]);
    const whiskers = {
      type: "custom",
      silent: true,
      z: 5,
      encode: { x: [0, 1], y: 2 },
      data: spreads.filter(([low, high]) => low !== null && high !== null && low < high),
      renderItem: (_, api) => whisker(api),
    };
    if (chart.baseline !== null) {
      values.markLine = {
        symbol: "none",
        silent: true,
        label: { show: false },
        lineStyle: { color: colour("text"), type: "dotted" },
        data: [{ xAxis: chart.baseline }],
      };
    }
    return [values, labels, whiskers];
  }

  function bars(chart) {
    const names = chart.bars.map((bar) => bar.name);
    const x = measured(chart.x, chart.bars.flatMap((bar) => [bar.value, bar.low, bar.high]));
    const label = (bar) => bar.text || (bar.value === null ? "" : valueText(x, bar.value));
    const barTooltip = (hovered) => {
      const bar = chart.bars[hovered.dataIndex];
      const text = tooltip(bar.name, label(bar));
      if (!hasSpread(bar)) return text;
      return `${text}<br>${escaped(valueText(x, bar.low))} to ${escaped(valueText(x, bar.high))}`;
    };
    const width = namesWidth(names);
    const place = { top: 8, left: width + 12, right: isNarrow() ? 70 : 90, bottom: 42 };
    return {
      ...chartOption(barTooltip),
      grid: gridOption({ ...place, containLabel: false, outerBoundsMode: "none" }),
      xAxis: horizontal(x),
      yAxis: {
        type: "category",
        inverse: true,
        data: names,
        axisTick: { show: false },
        axisLine: { lineStyle: { color: colour("line") } },
        axisLabel: { color: colour("text"), width, overflow: "truncate", interval: 0 },
        splitLine: { show: !x.whole, lineStyle: { color: colour("line") } },
      },
      series: barSeries(chart, label),
      height: 50 + 28 * names.length,
    };
  }

  // --- the objective of a sweep against its parameters ----------------------------------------------

  const distinct = (values) => [...new Set(values)];

  /** The axis of one parameter: of numbers, or of texts as categories. */
  function parameterAxis(axis, values) {
    if (!values.every(isNumber)) {
      const categories = distinct(values.map(String));
      const axisLabel = { color: colour("quiet"), interval: 0, hideOverlap: false };
      return { ...horizontal(measured(axis, [])), type: "category", data: categories, axisLabel };
    }
    const tried = distinct(values);
    const ticks = tried.length <= MOST_TICKS ? tried.sort((one, other) => one - other) : [];
    return horizontal(measured(axis, values), spans(values, PARAMETER_RATIO), ticks);
  }

  function scatter(chart) {
    const goal = measured(chart.y, chart.points.map((point) => point.values[1]));
    const xAxis = parameterAxis(chart.x, chart.points.map((point) => point.values[0]));
    const data = chart.points.map((point) => {
      const [value, score] = point.values;
      const x = xAxis.type === "category" ? String(value) : value;
      const itemStyle = { color: COLOURS[point.strong ? 1 : 0], opacity: 0.85 };
      return { name: point.name, value: [x, score], symbolSize: point.strong ? 14 : 9, itemStyle };
    });
    return {
      ...chartOption((hovered) => tooltip(hovered.name, valueText(goal, hovered.value[1]))),
      grid: gridOption({ right: 20 }),
      xAxis,
      yAxis: vertical(goal),
      series: [{ type: "scatter", data }],
    };
  }

  /** One of the parallel axes. Few different values are categories, each with its label. */
  function parallelAxis(axis, dim, values, isGoal) {
    const known = values.filter((value) => value !== null);
    const option = {
      dim,
      name: axis.label,
      nameTextStyle: { color: colour("quiet"), fontSize: 11 },
      axisLine: { lineStyle: { color: colour("quiet") } },
      axisLabel: {
        color: colour("text"),
        backgroundColor: colour("page"),
        padding: [1, 3],
        borderRadius: 3,
      },
      z: 5,
    };
    const tried = distinct(known);
    const isOfNumbers = known.every(isNumber);
    if (!isOfNumbers || (!isGoal && tried.length <= MOST_TICKS)) {
      if (isOfNumbers) tried.sort((one, other) => one - other);
      return { ...option, type: "category", data: tried.map(String) };
    }
    const [min, max] = range(known);
    const showEnds = { showMinLabel: true, showMaxLabel: true, hideOverlap: true };
    const formatter = tickText(measured(axis, known));
    Object.assign(option.axisLabel, { formatter, ...showEnds });
    const isLog = !isGoal && spans(known, PARAMETER_RATIO);
    return { ...option, type: isLog ? "log" : "value", scale: true, min, max };
  }

  /** The colour of a line: from orange for the lowest value to blue for the highest. */
  function shade(value, [low, high]) {
    const share = high > low ? (value - low) / (high - low) : 1;
    const mixed = (from, to) => Math.round(from + (to - from) * share);
    return `rgb(${mixed(224, 32)},${mixed(130, 120)},${mixed(20, 220)})`;
  }

  /** On a phone the objective comes first, where it is in sight. */
  function goalInSight(list) {
    if (!isNarrow()) return list;
    return [list.at(-1), ...list.slice(0, -1)];
  }

  function parallel(chart) {
    const axes = goalInSight(chart.axes);
    const goal = isNarrow() ? 0 : axes.length - 1;
    const points = chart.points.map((point) => ({ ...point, values: goalInSight(point.values) }));
    const columnOf = (dim) => points.map((point) => point.values[dim]);
    const options = axes.map((axis, dim) => parallelAxis(axis, dim, columnOf(dim), dim === goal));
    const goals = range(columnOf(goal));
    const data = points.map((point) => ({
      name: point.name,
      value: point.values.map((value, dim) => {
        const isCategory = options[dim].type === "category" && value !== null;
        return isCategory ? String(value) : value;
      }),
      lineStyle: {
        color: shade(point.values[goal], goals),
        width: point.strong ? 4 : 1.5,
        opacity: point.strong ? 1 : 0.6,
      },
    }));
    const strongLast = (one, other) => one.lineStyle.width - other.lineStyle.width;
    const goalAxis = measured(axes[goal], columnOf(goal));
    const place = { left: 50, right: 60, top: 40, bottom: 20 };
    const emphasis = { lineStyle: { width: 4, opacity: 1 } };
    return {
      ...chartOption((hovered) => tooltip(hovered.name, valueText(goalAxis, hovered.value[goal]))),
      parallel: { ...place, parallelAxisDefault: { nameGap: 14 } },
      parallelAxis: options,
      series: [{ type: "parallel", data: data.sort(strongLast), z: 1, emphasis }],
      width: 120 * axes.length,
    };
  }

  // --- the page -----------------------------------------------------------------------------------

  const KINDS = { curves, bars, scatter, parallel };
  const instances = [];

  function draw(frames) {
    while (instances.length) instances.pop().dispose();
    for (const frame of frames) {
      const { height, width, ...option } = KINDS[frame.chart.kind](frame.chart, frame.clientWidth);
      frame.style.height = `${height || (isNarrow() ? 260 : 300)}px`;
      frame.style.minWidth = width ? `${width}px` : "";
      const instance = echarts.init(frame, null, { renderer: "svg" });
      instance.setOption(option);
      instances.push(instance);
    }
  }

  return (frames) => {
    const drawAgain = () => draw(frames);
    let width = window.innerWidth;
    drawAgain();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
    addEventListener("beforeprint", drawAgain);
    addEventListener("resize", () => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      drawAgain();
    });
  };
})();
