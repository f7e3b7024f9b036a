// The steps of one graph: bands unpacked, what a band is, and who is alive at an operation.

const OUTSIDE = ["shared", "gradients", "parameter gradients", "temporary"];
const PHASES = ["forward", "backward", "backward"]; // of the model; an optional op serves the backward

function unpacked(changes, length) {
  const row = new Float64Array(length);
  for (let i = 0; i < changes.length; i += 2) row.fill(changes[i + 1], changes[i], changes[i + 2] ?? length);
  return row;
}

function prepare(graph) {
  if (!graph.steps) return;
  for (const step of Object.values(graph.steps)) {
    step.rows = step.bands.map((changes) => unpacked(changes, step.total.length));
    step.hosted = unpacked(step.host, step.total.length);
    step.hostPeak = Math.max(0, ...step.hosted);
    step.peakPoint = step.shown.indexOf(step.peakAt);
  }
  graph.blockBands = graph.bands.length - OUTSIDE.length;
}

/** Attributes that give a band its colour; the style sheet does the rest, for light and dark. */
function bandColour(graph, band) {
  if (band >= graph.blockBands) return { class: `band ${OUTSIDE[band - graph.blockBands].replace(" ", "-")}` };
  const share = graph.blockBands > 1 ? band / (graph.blockBands - 1) : 0.4;
  return { class: "band block", style: `--t:${share.toFixed(3)};--odd:${band % 2}` };
}

/** The band of a span: its block, or what it is outside of all blocks (below 0). */
function bandOf(graph, band) {
  if (band < 0) return graph.blockBands - 1 - band;
  return Math.floor(band / graph.blocksPerBand);
}

/** What a band is called: of several graphs, by their names. */
function bandName(graph, band) {
  if (band < 0) return OUTSIDE[-1 - band];
  return graph.names ? graph.names[band] : `block ${band}`;
}

/** What is alive at a point of a step, largest first. */
function aliveAt(graph, step, point) {
  const at = step.shown[point];
  const found = [];
  for (let i = 0; i < step.value.length; i += 1) {
    if (step.birth[i] > at || step.death[i] < at) continue;
    const since = step.birth[i];
    found.push({ ...described(graph, step, step.value[i]), band: step.band[i], since });
  }
  if (step.temporary[point]) {
    const [op, module] = graph.ops[step.op[point]];
    const own = { op: graph.texts[op], module: graph.texts[module], band: -4, since: at };
    found.push({ name: "temporary of this operation", size: step.temporary[point], shape: "", dtype: "", ...own });
  }
  return found.sort((a, b) => b.size - a.size);
}

function described(graph, step, place) {
  if (place < 0) return { name: "generator state", size: step.states, shape: "", dtype: "", op: "", module: "" };
  const [name, size, ...rest] = graph.values[place];
  const [shape, dtype, op, module, source] = rest.slice(0, 5).map((text) => graph.texts[text]);
  return { name, size, shape, dtype, op, module, source, time: rest[5] };
}

function pointText(graph, step, point) {
  const [op, module, , phase] = graph.ops[step.op[point]];
  const at = step.shown[point];
  const run = at < step.forward ? "forward" : "backward";
  const again = at >= step.forward && PHASES[phase] === "forward" ? ", run again" : "";
  const block = step.block[point] === null ? "" : `, ${bandName(graph, step.block[point])}`;
  return { op: graph.texts[op], module: graph.texts[module], where: `${run}${block}${again}`, number: at + 1 };
}
