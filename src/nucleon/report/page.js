"use strict";
(() => {
  document.documentElement.classList.add("js");
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });

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
