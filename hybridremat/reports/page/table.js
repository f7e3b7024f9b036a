// Tables that sort by their headers, and rows that open.

function sortKey(cell) {
  const text = cell.dataset.sort ?? cell.textContent.trim();
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** A table of several bodies keeps each body together; one of a single body sorts its rows. */
function sortBy(table, column, descending) {
  const whole = table.matches(".decisions *") && !table.matches(".values");
  const items = whole ? [...table.tBodies] : [...table.tBodies[0].rows];
  const keyed = items.map((item) => [sortKey((whole ? item.rows[0] : item).cells[column]), item]);
  keyed.sort((a, b) => (descending ? compare(b[0], a[0]) : compare(a[0], b[0])));
  const before = whole ? table.tFoot : null;
  for (const [, item] of keyed) (whole ? table : table.tBodies[0]).insertBefore(item, before);
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortBy(table, column, descending);
    });
  });
}

/** Rows of identical blocks unfold; the row of a block opens its values. */
function makeOpening(graph, table) {
  for (const button of table.querySelectorAll("button.open")) {
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", open);
      if (button.dataset.block === undefined) unfold(button.closest("tbody"), open);
      else showValues(graph, button.closest("tr"), Number(button.dataset.block), open);
    });
  }
}

function unfold(body, open) {
  for (const row of body.querySelectorAll("tr.child")) row.hidden = !open;
  if (open) return;
  for (const detail of body.querySelectorAll("tr.detail")) detail.remove();
  for (const button of body.querySelectorAll("tr.child .open")) button.setAttribute("aria-expanded", false);
}

function showValues(graph, row, block, open) {
  if (!open) {
    row.nextElementSibling.remove();
    return;
  }
  const cell = make("td", { colspan: row.cells.length }, valueTable(graph, block));
  row.after(make("tr", { class: "detail" }, cell));
}
