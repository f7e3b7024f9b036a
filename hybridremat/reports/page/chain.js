// The chain of blocks as a picture: forward above, backward below, recomputation between them.

const BOX = { width: 86, height: 46, pitch: 128, left: 74, top: 30, lane: 15, gap: 34 };

class ChainPicture {
  constructor(graph, section) {
    Object.assign(this, { graph, chain: graph.chain });
    this.lanes = lanesOf(this.chain.reruns);
    const used = Math.max(0, ...this.lanes.map((lane) => lane + 1));
    this.lower = BOX.top + BOX.height + BOX.gap + used * BOX.lane + 12;
    const count = this.chain.blocks.length;
    const width = BOX.left + count * BOX.pitch + 10;
    const height = this.lower + BOX.height + 14 + 26;
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": this.label() });
    svg.append(arrowHeads());
    svg.append(draw("text", { class: "phase", x: 0, y: BOX.top + 28 }, "forward"));
    svg.append(draw("text", { class: "phase", x: 0, y: this.lower + 34 }, "backward"));
    svg.append(...this.links(), ...this.inner(), ...this.reruns());
    this.chain.blocks.forEach((block, i) => svg.append(this.forward(block, i), this.backward(block, i)));
    section.querySelector(".chart").append(svg);
  }

  label() {
    const again = this.chain.blocks.filter((block) => block.recomputed).length;
    return `${this.chain.blocks.length} blocks; ${again} recompute values, ${this.chain.reruns.length} forwards over blocks run again`;
  }

  left(block) {
    return BOX.left + block * BOX.pitch;
  }

  middle(block) {
    return this.left(block) + BOX.width / 2;
  }

  forward(block, i) {
    const most = Math.max(1, ...this.chain.blocks.map((each) => each.saved));
    const fill = (BOX.height * block.saved) / most;
    const group = draw("g", { class: "box", transform: `translate(${this.left(i)} ${BOX.top})` });
    group.append(draw("rect", { class: "frame", width: BOX.width, height: BOX.height, rx: 3 }));
    group.append(draw("rect", { class: "level", y: BOX.height - fill, width: BOX.width, height: fill, rx: Math.min(3, fill / 2) }));
    group.append(draw("text", { class: "boxname middle", x: BOX.width / 2, y: 19 }, `${i}`));
    group.append(draw("text", { class: "boxtext middle", x: BOX.width / 2, y: 36 }, formatBytes(block.saved)));
    return this.hovering(group, block, i);
  }

  backward(block, i) {
    const group = draw("g", { class: "box", transform: `translate(${this.left(i)} ${this.lower})` });
    const again = block.recomputed ? `${block.recomputed} again` : "none again";
    const lines = [block.option, again, block.extra ? `+${formatTime(block.extra)}` : ""].filter((line) => line);
    group.append(draw("rect", { class: block.recomputed ? "frame again" : "frame", width: BOX.width, height: BOX.height + 14, rx: 3 }));
    lines.forEach((line, row) => group.append(draw("text", { class: "boxtext middle", x: BOX.width / 2, y: 18 + 16 * row }, line)));
    return this.hovering(group, block, i);
  }

  hovering(group, block, i) {
    group.addEventListener("pointermove", (event) =>
      showTip(
        event.clientX,
        event.clientY,
        make("div", { class: "total" }, `Block ${i}`),
        make("div", {}, block.name || "(no module)"),
        make("div", {}, `saves ${formatBytes(block.saved)}; option ${block.option}`),
        make("div", {}, `makes ${block.recomputed} values again (${formatBytes(block.recomputedBytes)}), ${formatTime(block.extra)} extra`),
      ),
    );
    group.addEventListener("pointerleave", hideTip);
    return group;
  }

  links() {
    const found = [];
    const [over, under] = [BOX.top + BOX.height / 2, this.lower + (BOX.height + 14) / 2];
    for (let i = 1; i < this.chain.blocks.length; i += 1) {
      const [from, to] = [this.left(i - 1) + BOX.width, this.left(i)];
      const middle = (from + to) / 2;
      found.push(draw("path", { class: "link", d: `M${from + 2} ${over}H${to - 7}`, "marker-end": "url(#forward)" }));
      found.push(draw("text", { class: "boundary middle", x: middle, y: BOX.top - 8 }, formatBytes(this.chain.boundary[i])));
      found.push(draw("path", { class: "link", d: `M${to - 2} ${under}H${from + 7}`, "marker-end": "url(#forward)" }));
      found.push(draw("text", { class: "boundary middle", x: middle, y: this.lower + BOX.height + 32 }, formatBytes(this.chain.gradient[i])));
    }
    return found;
  }

  /** Recomputation inside a block: from its backward up to its forward. */
  inner() {
    const top = BOX.top + BOX.height;
    return this.chain.blocks.flatMap((block, i) => {
      if (!block.recomputed) return [];
      const x = this.middle(i) + 24;
      return [draw("path", { class: "again", d: `M${x} ${this.lower - 1}V${top + 8}`, "marker-end": "url(#again)" })];
    });
  }

  reruns() {
    const top = BOX.top + BOX.height;
    return this.chain.reruns.map(({ before, first, last }, i) => {
      const y = top + BOX.gap / 2 + 10 + this.lanes[i] * BOX.lane;
      const [from, to] = [this.middle(before) - 24, this.middle(first) - 24];
      const bar = `M${this.left(first)} ${y}H${this.left(last) + BOX.width}`;
      const d = `M${from} ${this.lower - 1}V${y}H${to}V${top + 8}`;
      return draw("g", {}, draw("path", { class: "bar", d: bar }), draw("path", { class: "rerun", d, "marker-end": "url(#rerun)" }));
    });
  }
}

/** A lane for each re-run, so that none lies on another. */
function lanesOf(reruns) {
  const ends = [];
  return reruns.map(({ before, first, last }) => {
    const taken = { from: first - 0.4, to: Math.max(before, last) + 0.4 };
    let lane = ends.findIndex((others) => others.every((other) => other.to < taken.from || taken.to < other.from));
    if (lane < 0) lane = ends.push([]) - 1;
    ends[lane].push(taken);
    return lane;
  });
}

function arrowHeads() {
  const head = (name) =>
    draw("marker", { id: name, viewBox: "0 0 8 8", refX: 4, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, draw("path", { class: `head ${name}`, d: "M0 0L8 4L0 8Z" }));
  return draw("defs", {}, head("forward"), head("again"), head("rerun"));
}
