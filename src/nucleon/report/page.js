"use strict";
(() => {
  const root = document.documentElement;
  const MARGIN = { top: 26, right: 14, bottom: 42, left: 52 };

  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "g", "path", "line", "text", "circle"].includes(tag);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  // ---------------------------------------------------------------- theme

  function stored(value) {
    try { // a page from disk may have no storage
      if (value !== undefined) localStorage.setItem("nucleon-theme", value);
      return localStorage.getItem("nucleon-theme");
    } catch { return null; }
  }

  function setTheme(theme) {
    root.classList.toggle("dark", theme === "dark");
    root.classList.toggle("light", theme === "light");
  }

  root.classList.add("js");
  setTheme(stored());
  document.getElementById("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches && !root.classList.contains("light");
    const dark = system || root.classList.contains("dark");
    setTheme(dark ? "light" : "dark");
    stored(dark ? "light" : "dark");
  });

  // ---------------------------------------------------------------- numbers and axes

  const finite = (v) => v !== null && v !== undefined && Number.isFinite(v);

  function text(value, digits = 4) {
    if (!finite(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
      return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
    }
    return String(Number(value.toPrecision(digits)));
  }

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
    const stride = Math.max(1, Math.ceil(decades / count));
    const ticks = [];
    for (let e = first; e <= last; e += stride) {
      for (const f of factors) {
        const tick = f * 10 ** e;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    return ticks.length > 1 ? ticks : linearTicks(low, high, count);
  }

  /** A scale from values to pixels, with its ticks. */
  function scale(values, kind, from, to, count) {
    const log = kind === "log";
    const kept = values.filter((v) => finite(v) && (!log || v > 0));
    let low = Infinity, high = -Infinity; // Math.min(...) of a long series is too many arguments
    for (const v of kept) [low, high] = [Math.min(low, v), Math.max(high, v)];
    if (!kept.length) [low, high] = log ? [0.1, 1] : [0, 1];
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const f = log ? Math.log10 : (v) => v;
    const slack = 0.03 * (f(high) - f(low)), a = f(low) - slack, b = f(high) + slack;
    const at = (v) => from + ((f(v) - a) / (b - a)) * (to - from);
    const back = log ? (v) => 10 ** v : (v) => v;
    const ticks = (log ? logTicks : linearTicks)(back(a), back(b), count);
    return { at: (v) => (finite(v) && (!log || v > 0) ? at(v) : null), ticks };
  }

  // ---------------------------------------------------------------- charts

  function swatch(style) {
    return make("svg", { class: `swatch s${style}`, viewBox: "0 0 22 8", "aria-hidden": "true" },
      make("path", { class: "line", d: "M0 4H22" }));
  }

  function path(xs, ys) {
    let d = "", pen = false;
    xs.forEach((x, i) => {
      if (x === null || ys[i] === null) { pen = false; return; }
      d += `${pen ? "L" : "M"}${x.toFixed(1)} ${ys[i].toFixed(1)}`;
      pen = true;
    });
    return d;
  }

  class Panel {
    constructor(chart, data) {
      this.chart = chart;
      this.data = data;
      this.kind = { x: data.x_scale, y: data.y_scale };
      this.buttons = {};
      const head = make("div", { class: "panel-head" }, make("span", {}, data.title));
      for (const axis of ["x", "y"]) {
        const button = make("button", { type: "button", "data-axis": axis });
        button.addEventListener("click", () => chart.flip(this, axis));
        button.disabled = !this.values(axis).some((v) => v > 0);
        head.append(this.buttons[axis] = button);
      }
      this.svg = make("svg", { role: "img", "aria-label": data.title });
      this.tip = make("div", { class: "tip", hidden: "" });
      this.element = make("div", { class: "panel" }, head, this.svg, this.tip);
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerdown", (event) => this.point(event));
      this.svg.addEventListener("pointerleave", () => this.leave());
    }

    get visible() { return this.data.series.filter((s) => !this.chart.hidden.has(s.name)); }

    values(axis) {
      const columns = axis === "x" ? ["x"] : ["y", "low", "high"];
      return this.visible.flatMap((s) => columns.flatMap((c) => s[c] ?? []));
    }

    draw() {
      const width = Math.max(this.element.clientWidth - 24, 200);
      this.height = Math.round(Math.min(360, Math.max(240, 0.42 * width)));
      const right = width - MARGIN.right, bottom = this.height - MARGIN.bottom;
      const shared = this.chart.data.shared ? this.chart.panels : [this];
      const all = (axis) => shared.flatMap((p) => p.values(axis));
      this.x = scale(all("x"), this.kind.x, MARGIN.left, right, Math.max(3, width / 90));
      this.y = scale(all("y"), this.kind.y, bottom, MARGIN.top, 6);
      for (const axis of ["x", "y"]) {
        const log = this.kind[axis] === "log";
        this.buttons[axis].textContent = `${axis}: ${log ? "log" : "linear"}`;
        this.buttons[axis].setAttribute("aria-label", `${axis} axis, ${log ? "logarithmic" : "linear"}: change`);
      }
      this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
      this.svg.replaceChildren(this.axes(right, bottom), ...this.visible.map((s) => this.series(s)));
      this.cursor = make("g", {});
      this.svg.append(this.cursor);
      this.leave();
    }

    axes(right, bottom) {
      const group = make("g", { class: "axes" });
      for (const tick of this.x.ticks) {
        const x = this.x.at(tick).toFixed(1);
        group.append(make("line", { class: "grid", x1: x, x2: x, y1: MARGIN.top, y2: bottom }),
          make("text", { x, y: bottom + 17, "text-anchor": "middle", class: "x-tick" }, text(tick)));
      }
      for (const tick of this.y.ticks) {
        const y = this.y.at(tick);
        group.append(make("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y.toFixed(1), y2: y.toFixed(1) }),
          make("text", { x: MARGIN.left - 7, y: (y + 4).toFixed(1), "text-anchor": "end", class: "y-tick" }, text(tick)));
      }
      group.append(
        make("path", { class: "axis", fill: "none", d: `M${MARGIN.left} ${MARGIN.top}V${bottom}H${right}` }),
        make("text", { x: (MARGIN.left + right) / 2, y: this.height - 8, "text-anchor": "middle" }, this.data.x_label),
        make("text", { x: 0, y: 13 }, this.data.y_label)); // lying down: as long as it wants, and legible
      return group;
    }

    series(s) {
      const xs = s.x.map(this.x.at), ys = s.y.map(this.y.at);
      const group = make("g", { class: `series s${s.style}` });
      if (s.low && s.high) {
        const kept = xs.map((_, i) => i).filter((i) => [xs[i], this.y.at(s.low[i]), this.y.at(s.high[i])].every((v) => v !== null));
        const up = kept.map((i) => `${xs[i].toFixed(1)} ${this.y.at(s.high[i]).toFixed(1)}`);
        const down = kept.reverse().map((i) => `${xs[i].toFixed(1)} ${this.y.at(s.low[i]).toFixed(1)}`);
        if (up.length) group.append(make("path", { class: "band", d: `M${up.join("L")}L${down.join("L")}Z` }));
      }
      group.append(make("path", { class: "line", d: path(xs, ys) }));
      const there = (i) => xs[i] !== null && ys[i] !== null && i in xs;
      xs.forEach((x, i) => { // a point without neighbours is no line, and would not be seen
        if (there(i) && (this.data.marked || (!there(i - 1) && !there(i + 1)))) {
          group.append(make("circle", { class: "dot", cx: x.toFixed(1), cy: ys[i].toFixed(1), r: 3.5 }));
        }
      });
      return group;
    }

    /** Show the values of every series nearest to the pointer. */
    point(event) {
      const box = this.svg.getBoundingClientRect();
      const here = ((event.clientX - box.left) / box.width) * this.svg.viewBox.baseVal.width;
      const near = this.visible.map((s) => {
        let best = -1, distance = Infinity;
        s.x.forEach((x, i) => {
          const at = this.x.at(x), d = at === null || this.y.at(s.y[i]) === null ? Infinity : Math.abs(at - here);
          if (d < distance) [best, distance] = [i, d];
        });
        return { s, i: best, distance };
      }).filter((n) => n.i >= 0);
      if (!near.length) return this.leave();
      const x = near.reduce((a, b) => (b.distance < a.distance ? b : a));
      const at = this.x.at(x.s.x[x.i]), value = x.s.x[x.i];
      this.cursor.replaceChildren(
        make("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: this.height - MARGIN.bottom }),
        ...near.map(({ s, i }) => make("circle", { class: `dot s${s.style}`, cx: this.x.at(s.x[i]), cy: this.y.at(s.y[i]), r: 4 })));
      this.tip.replaceChildren(make("div", {}, `${this.data.x_label} ${text(value, 5)}`),
        ...near.sort((a, b) => b.s.y[b.i] - a.s.y[a.i]).map(({ s, i }) => {
          const band = s.low && s.high ? ` (${text(s.low[i], 3)} – ${text(s.high[i], 3)})` : "";
          const other = s.x[i] === value ? "" : ` at ${text(s.x[i])}`;
          return make("div", {}, swatch(s.style), make("span", {}, s.name), make("b", {}, text(s.y[i]) + band + other));
        }));
      this.tip.hidden = false;
      const left = (at / this.svg.viewBox.baseVal.width) * box.width;
      const room = this.element.clientWidth, wide = this.tip.offsetWidth;
      const right = left + 24 + wide < room ? left + 24 : left - wide - 4;
      this.tip.style.left = `${Math.max(4, Math.min(right, room - wide - 4))}px`;
      this.tip.style.top = `${box.top - this.element.getBoundingClientRect().top + MARGIN.top}px`;
    }

    leave() {
      this.tip.hidden = true;
      this.cursor?.replaceChildren();
    }
  }

  class Chart {
    constructor(element, data) {
      this.data = data;
      this.hidden = new Set();
      this.panels = data.panels.map((panel) => new Panel(this, panel));
      const legend = make("div", { class: "legend", role: "group", "aria-label": "Series" });
      const looks = new Map(data.panels.flatMap((p) => p.series).map((s) => [`${s.style} ${s.name}`, s]));
      for (const { name, style } of looks.values()) legend.append(this.key(name, style));
      element.append(legend, make("div", { class: "panels" }, ...this.panels.map((p) => p.element)));
      new ResizeObserver(() => this.draw()).observe(element);
    }

    key(name, style) {
      const button = make("button", { type: "button", "aria-pressed": "true" }, swatch(style), name);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
        this.draw();
      });
      return button;
    }

    flip(panel, axis) {
      const kind = panel.kind[axis] === "log" ? "linear" : "log";
      for (const p of this.data.shared ? this.panels : [panel]) p.kind[axis] = kind;
      this.draw();
    }

    draw() { this.panels.forEach((p) => p.draw()); }
  }

  for (const figure of document.querySelectorAll("figure")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    new Chart(figure.querySelector(".chart"), data);
  }

  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });

  // ---------------------------------------------------------------- tables to copy

  function rows(table, exact) {
    return [...table.rows].map((row) => [...row.cells].map(
      (cell) => (exact && cell.dataset.value) || cell.textContent.trim().replace(/\s+/g, " ")));
  }

  const formats = {
    csv: (table) => rows(table, true).map((row) => row.map(
      (cell) => (/[",\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell)).join(",")).join("\n") + "\n",
    latex(table) {
      const signs = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}" };
      const safe = (cell) => cell.replace(/[\\~^&%$#_{}]/g, (sign) => signs[sign] ?? `\\${sign}`);
      const [head, ...body] = rows(table, false).map((row) => `  ${row.map(safe).join(" & ")} \\\\`);
      const columns = `l${"r".repeat(table.rows[0].cells.length - 1)}`;
      return [`\\begin{tabular}{${columns}}`, "  \\toprule", head, "  \\midrule", ...body, "  \\bottomrule", "\\end{tabular}", ""].join("\n");
    },
  };

  async function copy(button) {
    const table = button.closest("table"), words = formats[button.dataset.copy](table);
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(words);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = label; }, 1200);
    } catch { // no clipboard here: show the text, selected
      const area = make("textarea", { readonly: "", "aria-label": label });
      area.value = words;
      table.parentElement.querySelector("textarea")?.remove();
      table.after(area);
      area.select();
    }
  }

  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
})();
