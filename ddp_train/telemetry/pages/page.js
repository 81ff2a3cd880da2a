// Draws a report from the JSON document in the page: texts, numbers, tables, and by page.charts.js
// its charts. What comes from a run (names, messages) is set as text, never as markup.
"use strict";
(() => {
  // Letters of a text that may need more than a line on a phone.
  const LONG = 14;
  // Letters of a column's name that may take several lines.
  const LONG_NAME = 20;
  // Letters up to which a cell of text is kept on one line.
  const ONE_LINE = 24;

  /** An element with its attributes and children. A child that is a string becomes text. */
  function element(tag, attributes = {}, ...children) {
    const created = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null) created.setAttribute(name, value);
    }
    created.append(...children);
    return created;
  }

  /** The parts of a text, with a place for a line break between each two. */
  function breakable(text, between) {
    const parts = text.split(between);
    return parts.flatMap((part, place) => (place ? [element("wbr"), part] : [part]));
  }

  /** A long text may be broken behind `=` and `/`, before words and numbers are. */
  function breakableText(text) {
    if (text.length <= LONG) return [text];
    return breakable(text, /(?<=[=/])(?=\S)/);
  }

  /** The name of a column, not broken before its unit or at a hyphen, but behind `.` and `_`. */
  function breakableName(name) {
    const text = name.replace(/ (?=\S{1,2}$)/, "\u00a0").replaceAll("-", "\u2011");
    if (name.length <= LONG_NAME) return [text];
    return breakable(text, /(?<=[._])(?![._])/);
  }

  function note(text) {
    if (!text) return [];
    return [element("p", { class: "note" }, text)];
  }

  // --- the beginning of a page --------------------------------------------------------------------

  /** The state of a run. Its first word, as in `failed: 1 of 3 trials`, is a class of page.css. */
  function drawState(report) {
    const [name] = report.state.split(/\W/);
    const line = element("p", { class: `state ${name}` }, report.state);
    if (report.refresh_seconds) tellIfOld(line, report);
    return line;
  }

  /** A page is written by what runs: if that is gone, no page says so but the last one. */
  function tellIfOld(line, report) {
    const minutes = Math.floor((Date.now() / 1000 - report.written) / 60);
    const threePages = report.refresh_seconds / 20;
    if (minutes < Math.max(2, threePages)) return;
    line.classList.add("old");
    line.append(
      `. No news for ${minutes.toLocaleString("en")} minutes:`,
      " if it was killed, the same command resumes it",
    );
  }

  function drawNumbers(numbers) {
    const tiles = Object.entries(numbers).map(([name, value]) => {
      const length = value.length > LONG ? "long" : null;
      const number = element("b", { class: length }, ...breakableText(value));
      return element("div", {}, number, element("span", {}, name));
    });
    return element("div", { class: "numbers" }, ...tiles);
  }

  function drawHead(report) {
    const parts = [element("h1", {}, report.title)];
    if (report.state) parts.push(drawState(report));
    for (const paragraph of report.intro.split(/\n\s*\n/)) {
      if (paragraph.trim()) parts.push(element("p", {}, paragraph));
    }
    if (Object.keys(report.numbers).length) parts.push(drawNumbers(report.numbers));
    if (report.findings.length) {
      const items = report.findings.map((finding) => element("li", {}, finding));
      parts.push(element("ul", {}, ...items));
    }
    return parts;
  }

  // --- tables -------------------------------------------------------------------------------------

  /** Classes of page.css: n for numbers, w for words on one line, more for a column on demand. */
  function classesOf(column) {
    const classes = [];
    if (column.is_numeric) classes.push("n");
    else if (column.texts.every((text) => text.length <= ONE_LINE)) classes.push("w");
    if (column.is_extra) classes.push("more");
    return classes.join(" ");
  }

  /** The head of a column, wide enough for a long name in about three lines. */
  function drawColumnHead(column, classes) {
    const width = Math.floor(column.name.length / 3) + 4;
    const style = column.name.length > LONG ? `min-width:${width}ch` : null;
    const button = element("button", {}, ...breakableName(column.name));
    return element("th", { class: classes, style }, button);
  }

  function drawTable(table) {
    const classes = table.columns.map(classesOf);
    const heads = table.columns.map((column, place) => drawColumnHead(column, classes[place]));
    const rows = table.columns[0].texts.map((_, number) => {
      const cells = table.columns.map((column, place) =>
        element("td", { class: classes[place] }, ...breakableText(column.texts[number])),
      );
      return element("tr", { class: number === table.best ? "best" : null }, ...cells);
    });
    const body = element("tbody", {}, ...rows);
    const extra = table.columns.filter((column) => column.is_extra).length;
    const grid = element(
      "table",
      { class: extra ? "few" : null },
      element("thead", {}, element("tr", {}, ...heads)),
      body,
    );
    sortByClick(heads, table.columns, rows, body);
    // This frame scrolls, not the page; by keyboard too.
    const frame = element(
      "div",
      { class: "wide", tabindex: 0, role: "region", "aria-label": table.title },
      grid,
    );
    const button = extra ? [showMoreButton(grid, extra)] : [];
    const title = element("h2", {}, table.title);
    const hint = hintOfWidth(frame, grid);
    return element("section", {}, title, frame, hint, ...button, ...note(table.note));
  }

  /** Words under a table that is cut off, as long as it is. */
  function hintOfWidth(frame, grid) {
    const hint = element("p", { class: "note" }, "More columns to the right: scroll sideways.");
    const update = () => {
      hint.hidden = frame.scrollWidth <= frame.clientWidth + 1;
    };
    const observer = new ResizeObserver(update);
    observer.observe(frame);
    observer.observe(grid);
    return hint;
  }

  /** A click on the head of a column sorts by it, the next one the other way round. */
  function sortByClick(heads, columns, rows, body) {
    heads.forEach((head, place) => {
      head.firstChild.addEventListener("click", () => {
        const isAscending = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
        const order = sortedPlaces(columns[place], isAscending);
        body.append(...order.map((number) => rows[number]));
      });
    });
  }

  /** The numbers of the rows in the order of a column. Rows without a value are always the last. */
  function sortedPlaces(column, isAscending) {
    const isEmpty = (number) => column.texts[number] === "-";
    const compare = (one, other) => {
      if (isEmpty(one) || isEmpty(other)) return isEmpty(one) - isEmpty(other);
      const difference = compareCells(column, one, other);
      return isAscending ? difference : -difference;
    };
    return [...column.texts.keys()].sort(compare);
  }

  function compareCells(column, one, other) {
    const [number, otherNumber] = [column.numbers[one], column.numbers[other]];
    if (number !== null && otherNumber !== null) return number - otherNumber;
    return column.texts[one].localeCompare(column.texts[other], "en", { numeric: true });
  }

  function showMoreButton(grid, extra) {
    const more = extra > 1 ? `show ${extra} more columns` : "show one more column";
    const button = element("button", { class: "show" }, more);
    button.addEventListener("click", () => {
      const isShort = grid.classList.toggle("few");
      button.textContent = isShort ? more : "show fewer columns";
    });
    return button;
  }

  // --- other sections -----------------------------------------------------------------------------

  /** Lines of text: commands, a config. */
  function drawLines(section) {
    const lines = element("pre", { tabindex: 0 }, section.lines.join("\n"));
    const body = [lines, ...note(section.note)];
    if (section.folded) {
      const summary = element("summary", {}, section.title);
      return [element("details", {}, summary, ...body)];
    }
    return [element("h2", {}, section.title), ...body];
  }

  /** The place of a chart, which is drawn once the page has its width. */
  function drawPlot(plot) {
    const frame = element("div", { class: "frame" });
    frame.chart = plot.chart;
    const figure = element(
      "figure",
      { class: plot.full ? "full" : null },
      element("h2", {}, plot.title),
      element("div", { class: "chart across" }, frame),
    );
    if (plot.caption) figure.append(element("figcaption", {}, plot.caption));
    return figure;
  }

  /** All sections in their order; plots that follow each other stand side by side. */
  function drawSections(sections) {
    const parts = [];
    let plots = null;
    for (const section of sections) {
      if (section.kind === "plot") {
        if (plots === null) {
          plots = element("div", { class: "plots" });
          parts.push(plots);
        }
        plots.append(drawPlot(section));
        continue;
      }
      plots = null;
      if (section.kind === "table") parts.push(drawTable(section));
      else parts.push(...drawLines(section));
    }
    return parts;
  }

  function drawFacts(facts) {
    const list = element("dl");
    for (const [name, value] of Object.entries(facts)) {
      list.append(element("dt", {}, name), element("dd", {}, value));
    }
    return [element("h2", {}, "Hardware and versions"), list];
  }

  // --- the page -----------------------------------------------------------------------------------

  const report = JSON.parse(document.getElementById("report").textContent);
  const main = document.querySelector("main");
  main.replaceChildren(...drawHead(report), ...drawSections(report.sections));
  if (Object.keys(report.facts).length) main.append(...drawFacts(report.facts));
  if (report.commands.length) {
    main.append(...drawLines({ title: "Commands", lines: report.commands }));
  }
  const frames = [...document.querySelectorAll(".frame")];
  if (frames.length) keepDrawn(frames);
})();
