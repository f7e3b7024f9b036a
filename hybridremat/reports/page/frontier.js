// The frontier: memory across, extra time up; what was chosen among what.

const FRAME = { left: 60, right: 18, top: 30, bottom: 44 };
const MARKS = { chosen: "chosen plan", plain: "plain step", least: "least memory", checkpointed: "each layer checkpointed" };

class FrontierChart {
  constructor(graph, section) {
    Object.assign(this, { graph, holder: section.querySelector(".chart") });
    const { points, chosen, plain, checkpointed } = graph.frontier;
    this.special = { checkpointed, plain, least: points[0] ?? null, chosen };
    const key = section.querySelector(".key");
    for (const [name, point] of Object.entries(this.special).reverse()) {
      if (point) key.append(make("span", {}, keyMark(name), `${MARKS[name]}: ${formatBytes(point[0])}, ${percent(point[1])}`));
    }
    this.holder.addEventListener("pointermove", (event) => this.hover(event));
    this.holder.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.holder);
  }

  draw() {
    const width = this.holder.clientWidth;
    if (!width) return;
    const height = width < 560 ? 250 : 320;
    const { points } = this.graph.frontier;
    const all = [...points, ...Object.values(this.special).filter((point) => point)];
    const limit = this.graph.figures.memory_limit;
    const wide = Math.max(...all.map((point) => point[0])) * 1.04;
    const high = Math.max(0.01, ...all.map((point) => point[1])) * 1.08;
    const low = Math.min(0, ...all.map((point) => point[1])) * 1.08;
    this.x = (size) => FRAME.left + ((width - FRAME.left - FRAME.right) * size) / wide;
    this.y = (share) => height - FRAME.bottom - ((height - FRAME.top - FRAME.bottom) * (share - low)) / (high - low);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": this.label() });
    svg.append(...this.axes(width, height, wide, high));
    if (limit !== null && limit <= wide) {
      const x = this.x(limit);
      svg.append(draw("line", { class: "limit", x1: x, x2: x, y1: FRAME.top, y2: height - FRAME.bottom }));
      const text = `limit ${formatBytes(limit)}`;
      const place = x + 6 + 7.4 * text.length < width ? { class: "limittext", x: x + 6 } : { class: "limittext end", x: x - 6 };
      svg.append(draw("text", { ...place, y: FRAME.top - 4 }, text));
    }
    svg.append(draw("path", { class: "front", d: this.line() }));
    const small = points.length > 150 ? 1.6 : 2.4;
    svg.append(...points.map((point) => draw("circle", { class: "dot", cx: this.x(point[0]), cy: this.y(point[1]), r: small })));
    for (const [name, point] of Object.entries(this.special)) {
      if (point) svg.append(specialMark(name, this.x(point[0]), this.y(point[1])));
    }
    this.ring = draw("circle", { class: "ring", r: 7, visibility: "hidden" });
    svg.append(this.ring);
    this.holder.replaceChildren(svg);
  }

  label() {
    const { points, chosen } = this.graph.frontier;
    return `Frontier of ${points.length} plans; chosen: ${formatBytes(chosen[0])} at ${percent(chosen[1])} time`;
  }

  /** Any limit between two points gets the point before it: a staircase. */
  line() {
    return this.graph.frontier.points
      .map(([peak, overhead], i) => (i ? `H${this.x(peak).toFixed(1)}V${this.y(overhead).toFixed(1)}` : `M${this.x(peak).toFixed(1)} ${this.y(overhead).toFixed(1)}`))
      .join("");
  }

  axes(width, height, wide, high) {
    const bottom = height - FRAME.bottom;
    const marks = [];
    for (const share of ticks(100 * high, 5)) {
      const y = this.y(share / 100);
      marks.push(draw("line", { class: "grid", x1: FRAME.left, x2: width - FRAME.right, y1: y, y2: y }));
      marks.push(draw("text", { class: "tick end", x: FRAME.left - 8, y: y + 4 }, `${share ? "+" : ""}${Number(share.toPrecision(6))} %`));
    }
    for (const size of ticks(wide, width < 560 ? 3 : 8, true)) {
      marks.push(draw("line", { class: "axis", x1: this.x(size), x2: this.x(size), y1: bottom, y2: bottom + 5 }));
      const name = this.x(size) > width - 44 ? "tick end" : "tick middle";
      marks.push(draw("text", { class: name, x: this.x(size), y: bottom + 18 }, size ? roundBytes(size) : "0"));
    }
    marks.push(draw("text", { class: "tick end title", x: width - FRAME.right, y: height - 6 }, "step memory"));
    marks.push(draw("text", { class: "tick title", x: 0, y: 14 }, "extra time"));
    return marks;
  }

  hover(event) {
    const box = this.holder.getBoundingClientRect();
    const named = Object.entries(this.special).filter(([, point]) => point).map(([name, point]) => [point, MARKS[name]]).reverse();
    const all = [...named, ...this.graph.frontier.points.map((point) => [point, "a plan of the frontier"])];
    const far = ([peak, overhead]) => Math.hypot(this.x(peak) - event.clientX + box.left, this.y(overhead) - event.clientY + box.top);
    const [point, name] = all.reduce((best, each) => (far(each[0]) < far(best[0]) - 1e-9 ? each : best));
    this.ring.setAttribute("cx", this.x(point[0]));
    this.ring.setAttribute("cy", this.y(point[1]));
    this.ring.setAttribute("visibility", "visible");
    const share = fixed((100 * point[0]) / this.graph.figures.plain_peak, 1);
    showTip(
      event.clientX,
      event.clientY,
      make("div", { class: "total" }, formatBytes(point[0])),
      make("div", {}, `${share} % of plain`),
      make("div", {}, `${percent(point[1])} time, ${percent(point[2])} flops`),
      make("div", { class: "quiet" }, name),
    );
  }

  leave() {
    this.ring.setAttribute("visibility", "hidden");
    hideTip();
  }
}

function specialMark(name, x, y) {
  const at = `translate(${x.toFixed(1)} ${y.toFixed(1)})`;
  const shapes = { chosen: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0Z", plain: "M0 -7L7 0L0 7L-7 0Z", least: "M0 -7L7 5H-7Z", checkpointed: "M-5 -5H5V5H-5Z" };
  return draw("path", { class: `special ${name}`, transform: at, d: shapes[name] });
}

const keyMark = (name) => draw("svg", { class: "swatch", viewBox: "-8 -8 16 16", "aria-hidden": true }, specialMark(name, 0, 0));
