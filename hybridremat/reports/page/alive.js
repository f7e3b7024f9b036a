// The list of what is alive at one operation.

const FIRST_ROWS = 12;

class Alive {
  constructor(graph, holder, toPeak) {
    Object.assign(this, { graph, holder, all: false });
    this.title = holder.querySelector("h3");
    this.button = holder.querySelector("[data-peak]");
    this.button.addEventListener("click", toPeak);
  }

  show(step, point, name) {
    const { graph } = this;
    const { op, module, where, number } = pointText(graph, step, point);
    const peak = point === step.peakPoint;
    const place = peak ? `At the peak of the ${name} step` : `In the ${name} step`;
    const made = module ? `${op} in ${module}` : op;
    this.title.textContent = `${place}, operation ${counted(number)} of ${counted(step.executions)}: ${formatBytes(step.total[point])}`;
    this.button.hidden = peak;
    const line = make("p", { class: "note" }, `${made}; ${where}`);
    if (!step.complete && !peak) {
      const sorry = "This step is too long for its file to say what is alive elsewhere than at the peak.";
      this.fill(line, make("p", { class: "note" }, sorry));
      return;
    }
    this.list(line, aliveAt(graph, step, point));
  }

  list(line, found) {
    const shown = this.all ? found : found.slice(0, FIRST_ROWS);
    const rest = found.slice(shown.length);
    const rows = shown.map((live) => this.row(live));
    const more = make("button", { type: "button", class: "plainbutton" });
    if (rest.length) {
      const sum = rest.reduce((total, live) => total + live.size, 0);
      more.textContent = `${counted(rest.length)} more, ${formatBytes(sum)}`;
    } else {
      more.textContent = "Show the largest only";
    }
    more.addEventListener("click", () => {
      this.all = !this.all;
      this.list(line, found);
    });
    const names = ["Size", "Belongs to", "Made by", "Module", "Shape", "Dtype", "Value", "Since"];
    const head = names.map((name, i) => make("th", { scope: "col", class: i === 0 || i === 7 ? "number" : null }, name));
    const table = make("table", { "aria-label": "Values that are alive there" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
    this.fill(line, table, found.length > FIRST_ROWS ? more : null);
  }

  row(live) {
    const colour = swatch(bandColour(this.graph, bandOf(this.graph, live.band)));
    const cells = [live.op, live.module, live.shape, live.dtype, live.name];
    return make(
      "tr",
      {},
      make("td", { class: "number" }, formatBytes(live.size)),
      make("td", {}, colour, bandName(this.graph, live.band)),
      ...cells.map((cell) => make("td", {}, cell)),
      make("td", { class: "number" }, counted(live.since + 1)),
    );
  }

  fill(...nodes) {
    this.holder.querySelector(".scroll").replaceChildren(...nodes.filter((node) => node !== null));
  }
}
