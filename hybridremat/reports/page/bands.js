// The shapes of a timeline: stacked bands, an outline, the key, and the lines of its tooltip.

/** Sizes on an axis: round in their unit, so no more digits than they have. */
function roundBytes(size) {
  const [amount, unit] = formatBytes(size).split(" ");
  return `${Number(amount)} ${unit}`;
}

/** Each band as one shape, the first at the bottom; `left(point)` is where a point begins. */
function stackedBands(graph, step, left, y) {
  const count = step.total.length;
  const base = new Float64Array(count);
  return step.rows.flatMap((row, band) => {
    const shapes = [];
    for (let from = 0; from < count; from += 1) {
      if (!row[from]) continue;
      let to = from;
      while (to < count && row[to]) to += 1;
      shapes.push(bandShape(row, base, from, to, left, y));
      from = to;
    }
    row.forEach((size, point) => (base[point] += size));
    return shapes.length ? [draw("path", { ...bandColour(graph, band), d: shapes.join(""), "data-band": graph.bands[band] })] : [];
  });
}

function bandShape(row, base, from, to, left, y) {
  const above = [];
  const below = [];
  for (let point = from; point < to; point += 1) {
    const [start, end] = [left(point).toFixed(1), left(point + 1).toFixed(1)];
    const [low, high] = [y(base[point]).toFixed(1), y(base[point] + row[point]).toFixed(1)];
    above.push(`${start} ${high}H${end}`);
    below.push(`${end} ${low}H${start}`);
  }
  return `M${above.join("L")}L${below.reverse().join("L")}Z`;
}

function outline(sizes, starts, end, x, y) {
  const parts = [...sizes].map((size, point) => {
    const to = point + 1 < starts.length ? starts[point + 1] : end;
    return `${x(starts[point]).toFixed(1)} ${y(size).toFixed(1)}H${x(to).toFixed(1)}`;
  });
  return parts.length ? `M${parts.join("L")}` : "";
}

function swatch(attributes) {
  return draw("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": true }, draw("rect", { ...attributes, width: 12, height: 12 }));
}

// Far above both steps the line would press them to the bottom of the chart.
function limitIsDrawn(graph) {
  const limit = graph.figures.memory_limit;
  const peak = Math.max(1, ...Object.values(graph.steps).map((step) => step.peak));
  return limit !== null && limit < 1.3 * peak;
}

function timelineKey(graph) {
  const last = graph.blockBands - 1;
  const used = (band) => Object.values(graph.steps).some((step) => step.bands[band].length);
  const some = [...new Set([0, 1, 2, 3, 4].map((part) => Math.round((last * part) / 4)))];
  const ramp = some.map((band) => swatch(bandColour(graph, band)));
  const blocks = graph.names ? 0 : graph.blocks.length;
  const label = graph.names ? "graphs, and what is between them" : blocks > 1 ? `blocks 0–${blocks - 1}` : "block 0";
  const outside = OUTSIDE.map((name, place) => [name, last + 1 + place])
    .filter(([, band]) => used(band))
    .map(([name, band]) => make("span", {}, swatch(bandColour(graph, band)), name));
  const line = (name) => draw("svg", { class: "swatch wide", viewBox: "0 0 24 12", "aria-hidden": true }, draw("line", { class: name, x1: 0, x2: 24, y1: 6, y2: 6 }));
  const other = make("span", {}, line("outline"), make("span", { class: "other" }, "plain"));
  const moves = Object.values(graph.steps).some((step) => step.hostPeak);
  const host = moves ? make("span", {}, line("host"), "in host memory") : null;
  const limit = limitIsDrawn(graph) ? make("span", {}, line("limit"), "limit") : null;
  const shown = [make("span", {}, ...ramp, label), ...outside, other, host, limit];
  return shown.filter((item) => item !== null);
}

const MOST_TIP_BANDS = 6;

function tipLines(graph, step, point) {
  const { op, module, where, number } = pointText(graph, step, point);
  const after = point + 1 < step.first.length ? step.first[point + 1] : step.executions;
  const among = after - step.first[point];
  const bands = step.rows.map((row, band) => [row[point], band]).filter(([size]) => size).sort((a, b) => b[0] - a[0]);
  const rest = bands.slice(MOST_TIP_BANDS);
  const rows = bands.slice(0, MOST_TIP_BANDS).map(([size, band]) =>
    make("tr", {}, make("td", {}, swatch(bandColour(graph, band)), graph.bands[band]), make("td", { class: "number" }, formatBytes(size))));
  if (rest.length) {
    const sum = rest.reduce((total, [size]) => total + size, 0);
    rows.push(make("tr", {}, make("td", {}, `${rest.length} more`), make("td", { class: "number" }, formatBytes(sum))));
  }
  if (step.hosted[point]) {
    rows.push(make("tr", {}, make("td", {}, "in host memory"), make("td", { class: "number" }, formatBytes(step.hosted[point]))));
  }
  const count = `operation ${counted(number)}${among > 1 ? `, the largest of ${among}` : ""}`;
  return [
    make("div", { class: "total" }, formatBytes(step.total[point])),
    make("div", {}, make("strong", {}, op), module ? ` in ${module}` : ""),
    make("div", { class: "quiet" }, `${where}; ${count}`),
    make("table", {}, make("tbody", {}, ...rows)),
  ];
}
