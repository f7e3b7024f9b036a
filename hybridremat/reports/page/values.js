// The values of one block: what becomes of each.

const VALUE_COLUMNS = ["Decision", "Size", "Dtype", "Shape", "Op", "Module", "Source", "Time", "Value"];
const NUMBERS = new Set(["Size", "Time"]);

function decisionText(saved, times) {
  const again = times ? `RECOMPUTE ${times}×` : "";
  const kept = saved === 2 ? "MOVE" : "SAVE";
  if (saved) return again ? `${kept}, ${again}` : kept;
  return again || "FREE";
}

/** Rows of a block; one with identical decisions may stand for it in a very large plan. */
function blockValues(graph, block) {
  const rows = graph.blocks[block];
  return Array.isArray(rows) ? [rows, block] : [graph.blocks[rows], rows];
}

function valueTable(graph, block) {
  const [rows, source] = blockValues(graph, block);
  const body = rows
    .map(([place, saved, times]) => ({ ...described(graph, null, place), decision: decisionText(saved, times) }))
    .sort((a, b) => b.size - a.size)
    .map(valueRow);
  const head = VALUE_COLUMNS.map((name) =>
    make("th", { scope: "col", "aria-sort": name === "Size" ? "descending" : "none", class: NUMBERS.has(name) ? "number" : null }, make("button", { type: "button" }, name)));
  const table = make("table", { class: "values sortable", "aria-label": `Values of block ${block}` }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  makeSortable(table);
  const instead = source === block ? null : make("p", { class: "note" }, `Shown for block ${source}, which is identical.`);
  return make("div", { class: "valuebox" }, ...[instead, table].filter((node) => node !== null));
}

function valueRow(value) {
  const kind = value.decision.toLowerCase().match(/[a-z]+/)[0];
  const number = (text, sort) => make("td", { class: "number", "data-sort": sort }, text);
  const short = value.source.split("/").slice(-2).join("/");
  return make(
    "tr",
    {},
    make("td", { class: `decision ${kind}` }, value.decision),
    number(formatBytes(value.size), value.size),
    make("td", {}, value.dtype),
    make("td", {}, value.shape),
    make("td", {}, value.op),
    make("td", {}, value.module),
    make("td", { title: value.source }, short),
    number(formatTime(value.time), value.time),
    make("td", {}, value.name),
  );
}
