// Without this script the page shows all it has; with it, tables sort, cases can be picked, the data can be saved.
"use strict";

function number(cell) {
  const found = cell.textContent.match(/\d+(\.\d+)?(e[+-]?\d+)?/);
  return found ? Number(found[0]) : null;
}

function sortBy(table, column, down) {
  const numeric = table.tHead.rows[0].cells[column].classList.contains("n");
  const rows = [...table.tBodies[0].rows].map((row) => {
    const cell = row.cells[column];
    return { row, key: numeric ? number(cell) : cell.textContent };
  });
  rows.sort((a, b) => {
    // What has no number comes last either way.
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
    const order = numeric ? a.key - b.key : a.key.localeCompare(b.key, "en", { numeric: true });
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows.map((x) => x.row));
}

for (const table of document.querySelectorAll("table.all")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const first = head.classList.contains("n") ? "descending" : "ascending";
      const order = before ? (before === "ascending" ? "descending" : "ascending") : first;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      sortBy(table, column, order === "descending");
    });
  });
}

const kind = document.getElementById("kind");
const named = document.getElementById("named");

function pick() {
  const words = named.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  for (const item of document.querySelectorAll("[data-name]")) {
    const name = item.dataset.name.toLowerCase();
    const fits = !words.length || words.some((word) => name.includes(word));
    item.hidden = !fits || (kind.value !== "" && !item.dataset.state.split(" ").includes(kind.value));
  }
  for (const group of document.querySelectorAll("details")) {
    group.hidden = !group.querySelector("article:not([hidden])");
  }
  const all = document.querySelectorAll("article");
  const shown = document.querySelectorAll("article:not([hidden])");
  document.getElementById("count").textContent = `${shown.length} of ${all.length}`;
}

kind.addEventListener("change", pick);
named.addEventListener("input", pick);
const tools = document.getElementById("tools");
tools.addEventListener("submit", (event) => event.preventDefault());
tools.hidden = !document.querySelector("article");
pick();

const save = document.getElementById("save");
const text = document.getElementById("report").textContent;
save.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
save.download = "report.json";
save.hidden = false;
