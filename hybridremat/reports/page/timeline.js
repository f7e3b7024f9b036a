// The memory of a step over time: bands of one step, the outline of the other, phases and the limit.

const EDGE = { left: 68, right: 10, top: 26, bottom: 40 };

class Timeline {
  constructor(graph, section) {
    Object.assign(this, { graph, section, shown: "planned", axis: "time" });
    this.holder = section.querySelector(".timeline");
    if (!graph.steps.planned.time) this.choose("axis", "executions");
    this.alive = new Alive(graph, section.querySelector(".alive"), () => this.pin(this.step.peakPoint));
    this.pinned = this.step.peakPoint;
    for (const kind of ["step", "axis"]) {
      for (const button of section.querySelectorAll(`[data-${kind}]`)) {
        button.addEventListener("click", () => this.choose(kind, button.dataset[kind]));
      }
    }
    this.holder.addEventListener("pointermove", (event) => this.hover(this.pointAt(event.clientX), event));
    this.holder.addEventListener("pointerleave", () => this.leave());
    this.holder.addEventListener("blur", () => this.leave());
    this.holder.addEventListener("click", (event) => this.pin(this.pointAt(event.clientX)));
    this.holder.addEventListener("keydown", (event) => this.key(event));
    section.querySelector(".key").replaceChildren(...timelineKey(graph));
    new ResizeObserver(() => this.draw()).observe(this.holder);
  }

  get step() {
    return this.graph.steps[this.shown];
  }

  get other() {
    return this.graph.steps[this.shown === "planned" ? "plain" : "planned"];
  }

  choose(kind, name) {
    this[kind === "step" ? "shown" : "axis"] = name;
    for (const button of this.section.querySelectorAll(`[data-${kind}]`)) {
      button.setAttribute("aria-pressed", button.dataset[kind] === name);
    }
    for (const word of this.section.querySelectorAll(".other")) {
      word.textContent = this.shown === "planned" ? "plain" : "planned";
    }
    if (!this.alive) return;
    if (kind === "step") this.pinned = this.step.peakPoint;
    this.draw();
  }

  starts(step) {
    return this.axis === "time" ? step.start : step.first;
  }

  draw() {
    const width = this.holder.clientWidth;
    if (!width) return;
    const height = width < 560 ? 260 : 360;
    const { graph, step, other } = this;
    const limit = graph.figures.memory_limit;
    const peak = Math.max(step.peak, other.peak, step.hostPeak, 1);
    const most = Math.max(peak, limitIsDrawn(graph) ? limit : 0) * 1.05;
    const length = (each) => (this.axis === "time" ? each.time : each.executions);
    const long = Math.max(length(step), length(other), 1);
    this.x = (at) => EDGE.left + ((width - EDGE.left - EDGE.right) * at) / long;
    this.y = (size) => height - EDGE.bottom - ((height - EDGE.top - EDGE.bottom) * size) / most;
    this.end = length(step);
    const many = graph.blockBands > 16 ? "many" : null;
    const svg = draw("svg", { class: many, viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": true });
    svg.append(...this.grid(width, height, most, long));
    svg.append(...stackedBands(graph, step, (point) => this.left(point), this.y));
    svg.append(draw("path", { class: "outline", d: outline(other.total, this.starts(other), length(other), this.x, this.y) }));
    if (step.hostPeak) svg.append(draw("path", { class: "host", d: outline(step.hosted, this.starts(step), this.end, this.x, this.y) }));
    svg.append(...this.phases(width, height), ...this.limit(limit, most, width));
    this.cursor = draw("line", { class: "cursor", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
    this.mark = draw("circle", { class: "mark", r: 4.5 });
    svg.append(this.cursor, this.mark);
    this.holder.replaceChildren(svg);
    this.pin(this.pinned);
  }

  left(point) {
    const starts = this.starts(this.step);
    return this.x(point < starts.length ? starts[point] : this.end);
  }

  grid(width, height, most, long) {
    const marks = [];
    for (const size of ticks(most, 6, true)) {
      marks.push(draw("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: this.y(size), y2: this.y(size) }));
      marks.push(draw("text", { class: "tick end", x: EDGE.left - 8, y: this.y(size) + 4 }, size ? roundBytes(size) : "0"));
    }
    const bottom = height - EDGE.bottom;
    for (const at of ticks(long, width < 560 ? 3 : 8)) {
      const text = this.axis === "time" ? formatTime(at).replace(/^0 ns$/, "0") : counted(at);
      marks.push(draw("line", { class: "axis", x1: this.x(at), x2: this.x(at), y1: bottom, y2: bottom + 5 }));
      marks.push(draw("text", { class: this.x(at) > width - 40 ? "tick end" : "tick middle", x: this.x(at), y: bottom + 18 }, text));
    }
    const name = this.axis === "time" ? "time by cost model" : "operations";
    marks.push(draw("text", { class: "tick end title", x: width - EDGE.right, y: height - 6 }, name));
    return marks;
  }

  phases(width, height) {
    const { step } = this;
    const point = step.shown.findIndex((at) => at >= step.forward);
    const split = point < 0 ? this.x(this.end) : this.left(point);
    const marks = [draw("text", { class: "phase", x: EDGE.left, y: EDGE.top - 10 }, "forward")];
    if (point < 0) return marks;
    marks.push(draw("line", { class: "split", x1: split, x2: split, y1: EDGE.top - 20, y2: height - EDGE.bottom }));
    const room = split + 70 < width;
    const place = room ? { class: "phase", x: Math.max(split + 6, EDGE.left + 58) } : { class: "phase end", x: split - 6 };
    marks.push(draw("text", { ...place, y: EDGE.top - 10 }, room ? "backward" : "backward →"));
    return marks;
  }

  limit(limit, most, width) {
    if (limit === null || limit > most) return [];
    const y = this.y(limit);
    const text = `limit ${formatBytes(limit)}`;
    return [
      draw("line", { class: "limit", x1: EDGE.left, x2: width - EDGE.right, y1: y, y2: y }),
      draw("text", { class: "limittext", x: this.clear(y, 7.4 * text.length, width), y: y - 6 }, text),
    ];
  }

  /** Where a text on a line at `y` crosses neither step; at the left if nowhere. */
  clear(y, long, width) {
    const free = (from) =>
      [this.step, this.other].every((step) => {
        const starts = this.starts(step);
        const near = (size, i) => this.x(starts[i]) <= from + long && this.x(starts[i + 1] ?? Infinity) >= from;
        const tops = [...step.total].filter(near).map(this.y);
        return tops.every((top) => top > y + 2) || tops.every((top) => top < y - 20);
      });
    for (let from = EDGE.left + 4; from + long < width - EDGE.right; from += 12) if (free(from)) return from;
    return EDGE.left + 4;
  }

  pointAt(clientX) {
    const box = this.holder.getBoundingClientRect();
    const starts = this.starts(this.step);
    let low = 0;
    let high = starts.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.x(starts[middle]) <= clientX - box.left) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  hover(point, event) {
    this.point(point);
    showTip(event.clientX, event.clientY, ...tipLines(this.graph, this.step, point));
  }

  /** Put the cursor on a point. */
  point(point) {
    const x = (this.left(point) + this.left(point + 1)) / 2;
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, x);
    this.cursor.setAttribute("visibility", "visible");
  }

  leave() {
    this.cursor.setAttribute("visibility", "hidden");
    hideTip();
  }

  /** Show below the chart what is alive at a point. */
  pin(point) {
    this.pinned = point;
    const { step, graph } = this;
    this.mark.setAttribute("cx", (this.left(point) + this.left(point + 1)) / 2);
    this.mark.setAttribute("cy", this.y(step.total[point]));
    const { op, where, number } = pointText(graph, step, point);
    this.holder.setAttribute("aria-valuemin", 1);
    this.holder.setAttribute("aria-valuemax", step.executions);
    this.holder.setAttribute("aria-valuenow", number);
    this.holder.setAttribute("aria-valuetext", `operation ${number}, ${op}, ${where}, ${formatBytes(step.total[point])}`);
    this.alive.show(step, point, this.shown);
  }

  key(event) {
    const stride = event.shiftKey ? 10 : 1;
    const last = this.step.total.length - 1;
    const to = { ArrowLeft: this.pinned - stride, ArrowRight: this.pinned + stride, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.pin(Math.min(last, Math.max(0, to)));
    this.point(this.pinned);
  }
}
