"use strict";
(() => {
  const MARGIN = { top: 26, right: 14, bottom: 42, left: 52 };
  document.documentElement.classList.add("js");

  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "g", "path", "line", "text", "circle"].includes(tag);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function text(value, digits = 4) {
    if (value === null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
      return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
    }
    return String(Number(value.toPrecision(digits)));
  }

  // ---------------------------------------------------------------- axes

  function linearTicks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
    const first = Math.ceil(low / step - 1e-9), ticks = [];
    // Counted, since k + 1 is k where the range is below the rounding of its ends.
    for (let i = 0; i <= 2 * count && (first + i) * step <= high + step * 1e-9; i++) ticks.push((first + i) * step);
    return ticks;
  }

  function logTicks(low, high, count) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const decades = Math.log10(high / low);
    const factors = decades < 1 ? [1, 2, 3, 4, 6, 8] : decades < 2.5 ? [1, 2, 5] : [1];
    const stride = Math.max(1, Math.ceil(decades / count)), ticks = [];
    for (let e = first; e <= last; e += stride) ticks.push(...factors.map((f) => f * 10 ** e));
    const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    return inside.length > 1 ? inside : linearTicks(low, high, count);
  }

  /** A scale from values to pixels, null where a value has no place, with its ticks. */
  function scale(values, kind, from, to, count) {
    const log = kind === "log", f = log ? Math.log10 : (v) => v;
    const placed = (v) => v !== null && (!log || v > 0);
    const kept = values.filter(placed);
    let low = Infinity, high = -Infinity; // Math.min(...) of a long series is too many arguments
    for (const v of kept) [low, high] = [Math.min(low, v), Math.max(high, v)];
    if (!kept.length) [low, high] = log ? [0.1, 1] : [0, 1];
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const slack = 0.03 * (f(high) - f(low)), a = f(low) - slack, b = f(high) + slack;
    const back = (v) => (log ? 10 ** v : v);
    const ticks = (log ? logTicks : linearTicks)(back(a), back(b), count);
    return { at: (v) => (placed(v) ? from + ((f(v) - a) / (b - a)) * (to - from) : null), ticks };
  }

  // ---------------------------------------------------------------- panels

  function swatch(style) {
    return make("svg", { class: `swatch s${style}`, viewBox: "0 0 22 8", "aria-hidden": "true" },
      make("path", { class: "line", d: "M0 4H22" }));
  }

  function path(points) {
    let d = "", pen = false; // lifted where a point has no place
    for (const [x, y] of points) {
      const placed = x !== null && y !== null;
      if (placed) d += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = placed;
    }
    return d;
  }

  function drawSeries(s, x, y, marked) {
    const group = make("g", { class: `series s${s.style}` });
    const points = (ys) => ys.map((v, i) => [x.at(s.x[i]), y.at(v)]);
    if (s.low && s.high) {
      const low = points(s.low), high = points(s.high);
      const kept = low.map((_, i) => i).filter((i) => ![...low[i], ...high[i]].includes(null));
      const up = path(kept.map((i) => high[i])), down = path(kept.reverse().map((i) => low[i]));
      if (kept.length) group.append(make("path", { class: "band", d: `${up}${down.replace("M", "L")}Z` }));
    }
    const line = points(s.y), there = (i) => line[i] !== undefined && !line[i].includes(null);
    group.append(make("path", { class: "line", d: path(line) }));
    line.forEach(([cx, cy], i) => { // a point without neighbours is no line, and would not be seen
      if (there(i) && (marked || (!there(i - 1) && !there(i + 1)))) group.append(make("circle", { class: "dot", cx: cx.toFixed(1), cy: cy.toFixed(1), r: 3.5 }));
    });
    return group;
  }

  function drawAxes(data, x, y, right, bottom, height) {
    const group = make("g", { class: "axes" });
    for (const tick of x.ticks) {
      const at = x.at(tick).toFixed(1);
      group.append(make("line", { class: "grid", x1: at, x2: at, y1: MARGIN.top, y2: bottom }),
        make("text", { x: at, y: bottom + 17, "text-anchor": "middle", class: "x-tick" }, text(tick)));
    }
    for (const tick of y.ticks) {
      const at = y.at(tick);
      group.append(make("line", { class: "grid", x1: MARGIN.left, x2: right, y1: at.toFixed(1), y2: at.toFixed(1) }),
        make("text", { x: MARGIN.left - 7, y: (at + 4).toFixed(1), "text-anchor": "end", class: "y-tick" }, text(tick)));
    }
    group.append(
      make("path", { class: "axis", fill: "none", d: `M${MARGIN.left} ${MARGIN.top}V${bottom}H${right}` }),
      make("text", { x: (MARGIN.left + right) / 2, y: height - 8, "text-anchor": "middle" }, data.x_label),
      make("text", { x: 0, y: 13 }, data.y_label)); // horizontal, so that it is legible
    return group;
  }

  class Panel {
    constructor(data, hidden) {
      this.data = data;
      this.hidden = hidden;
      this.svg = make("svg", { role: "img", "aria-label": data.title });
      this.tip = make("div", { class: "tip", hidden: "" });
      this.element = make("div", { class: "panel" }, make("div", { class: "panel-head" }, data.title), this.svg, this.tip);
      for (const kind of ["pointermove", "pointerdown"]) this.svg.addEventListener(kind, (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => this.leave());
    }

    get visible() { return this.data.series.filter((s) => !this.hidden.has(s.name)); }

    values(columns) { return this.visible.flatMap((s) => columns.flatMap((c) => s[c] ?? [])); }

    draw(panels) {
      const width = Math.max(this.element.clientWidth - 24, 200);
      this.height = Math.round(Math.min(360, Math.max(240, 0.42 * width)));
      const right = width - MARGIN.right, bottom = this.height - MARGIN.bottom;
      const all = (...columns) => panels.flatMap((p) => p.values(columns));
      this.x = scale(all("x"), this.data.x_scale, MARGIN.left, right, Math.max(3, width / 90));
      this.y = scale(all("y", "low", "high"), this.data.y_scale, bottom, MARGIN.top, 6);
      this.cursor = make("g");
      this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
      this.svg.replaceChildren(drawAxes(this.data, this.x, this.y, right, bottom, this.height),
        ...this.visible.map((s) => drawSeries(s, this.x, this.y, this.data.marked)), this.cursor);
      this.leave();
    }

    /** Show the values of every series nearest to the pointer. */
    point(event) {
      const box = this.svg.getBoundingClientRect(), width = this.svg.viewBox.baseVal.width;
      const here = ((event.clientX - box.left) / box.width) * width;
      const away = (s, i) => (this.x.at(s.x[i]) === null || this.y.at(s.y[i]) === null ? Infinity : Math.abs(this.x.at(s.x[i]) - here));
      const near = this.visible.map((s) => {
        const i = s.x.reduce((best, _, k) => (away(s, k) < away(s, best) ? k : best), 0);
        return { s, i, x: s.x[i], y: s.y[i], away: away(s, i) };
      }).filter((n) => n.away < Infinity);
      if (!near.length) return this.leave();
      const { x } = near.reduce((a, b) => (b.away < a.away ? b : a)), at = this.x.at(x);
      this.cursor.replaceChildren(
        make("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: this.height - MARGIN.bottom }),
        ...near.map((n) => make("circle", { class: `dot s${n.s.style}`, cx: this.x.at(n.x), cy: this.y.at(n.y), r: 4 })));
      this.tip.replaceChildren(make("div", {}, `${this.data.x_label} ${text(x, 5)}`),
        ...near.sort((a, b) => b.y - a.y).map(({ s, i, ...n }) => {
          const band = s.low && s.high ? ` (${text(s.low[i], 3)} – ${text(s.high[i], 3)})` : "";
          const other = n.x === x ? "" : ` at ${text(n.x)}`;
          return make("div", {}, swatch(s.style), make("span", {}, s.name), make("b", {}, text(n.y) + band + other));
        }));
      this.tip.hidden = false;
      const left = (at / width) * box.width, room = this.element.clientWidth, wide = this.tip.offsetWidth;
      const side = left + 24 + wide < room ? left + 24 : left - wide - 4;
      this.tip.style.left = `${Math.max(4, Math.min(side, room - wide - 4))}px`;
    }

    leave() {
      this.tip.hidden = true;
      this.cursor.replaceChildren();
    }
  }

  for (const figure of document.querySelectorAll("figure")) {
    const data = JSON.parse(figure.querySelector("script").textContent), hidden = new Set();
    const panels = data.panels.map((panel) => new Panel(panel, hidden));
    const draw = () => panels.forEach((p) => p.draw(data.shared ? panels : [p]));
    const looks = new Map(data.panels.flatMap((p) => p.series).map((s) => [`${s.style} ${s.name}`, s]));
    const keys = [...looks.values()].map(({ name, style }) => {
      const key = make("button", { type: "button", "aria-pressed": "true" }, swatch(style), name);
      key.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        key.setAttribute("aria-pressed", String(!hidden.has(name)));
        draw();
      });
      return key;
    });
    const chart = figure.querySelector(".chart");
    chart.append(make("div", { class: "legend", role: "group", "aria-label": "Series" }, ...keys),
      make("div", { class: "panels" }, ...panels.map((p) => p.element)));
    new ResizeObserver(draw).observe(chart);
  }

  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });

  // ---------------------------------------------------------------- tables to copy

  const words = (cell) => cell.textContent.trim().replace(/\s+/g, " ");
  const rows = (table, cell) => [...table.rows].map((row) => [...row.cells].map(cell));
  const quoted = (cell) => (/[",\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell);
  const signs = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}" };
  const escaped = (cell) => cell.replace(/[\\~^&%$#_{}]/g, (sign) => signs[sign] ?? `\\${sign}`);

  const formats = {
    csv: (table) => rows(table, (cell) => quoted(cell.dataset.value ?? words(cell))).map((row) => `${row.join(",")}\n`).join(""),
    latex(table) {
      const [head, ...body] = rows(table, (cell) => escaped(words(cell))).map((row) => `  ${row.join(" & ")} \\\\`);
      const columns = `l${"r".repeat(table.rows[0].cells.length - 1)}`;
      return [`\\begin{tabular}{${columns}}`, "  \\toprule", head, "  \\midrule", ...body, "  \\bottomrule", "\\end{tabular}", ""].join("\n");
    },
  };

  for (const button of document.querySelectorAll("[data-copy]")) {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(formats[button.dataset.copy](button.closest("table")));
      button.textContent = "copied";
      setTimeout(() => { button.textContent = label; }, 1200);
    });
  }
})();
