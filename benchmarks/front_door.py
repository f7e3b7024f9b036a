"""The README's picture: memory and time of ours beside what people use, from the rows of ``peers.py``.

    python benchmarks/front_door.py

Writes docs/images/beside.svg. Nothing is measured: every point is a row of ``data/peers.csv`` with a measured
peak and a measured time, by eager's of the same model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from generated import Row, read_rows
from matplotlib import rc_context
from matplotlib.axes import Axes

from hybridremat.files import write_atomic
from hybridremat.reports.figures import BLUE, GREEN, ORANGE, PURPLE, VERMILION, new_figure, picture

ROWS: Final = Path(__file__).with_name("data") / "peers.csv"
PICTURE: Final = Path(__file__).parents[1] / "docs" / "images" / "beside.svg"
MODELS: Final = {"gpt2": "GPT-2", "resnet50": "ResNet-50", "unet": "U-Net"}
OURS, COMPILED, SKY = "hybrid", "hybrid, compiled", "#56B4E9"
METHODS: Final = {
    "checkpoint": ("checkpoint of layers", "s", VERMILION),
    "checkpoint_sequential": ("checkpoint_sequential", "D", ORANGE),
    "selective": ("selective checkpoint", "^", GREEN),
    "inductor": ("torch.compile, memory budget", "X", PURPLE),
    COMPILED: ("hybridremat, compiled", "v", SKY),
    OURS: ("hybridremat", "o", BLUE),
}
"""Of each method its name, marker and colour."""
WIDTH: Final = 700 / 72  # inches of an SVG that is 700 px wide


def points(rows: Sequence[Row], model: str, method: str) -> Iterator[tuple[float, float]]:
    """Percent of eager's peak, and percent of extra time, of each row that was run; the least peak first."""
    own = [row for row in rows if row["model"] == model and row["device"] == "cpu" and row["peak_bytes"]]
    (eager,) = (float(row["peak_bytes"]) for row in own if row["method"] == "eager")
    for row in sorted(own, key=lambda each: float(each["peak_bytes"])):
        if row["method"] == method and row["time_ratio"]:
            yield 100 * float(row["peak_bytes"]) / eager, 100 * (float(row["time_ratio"]) - 1)


def draw(axes: Axes, rows: Sequence[Row], model: str) -> None:
    """Memory across and time up, markers a method, ours joined by a line."""
    for method, (label, marker, color) in METHODS.items():
        found = list(points(rows, model, method))
        if found:
            style = {"marker": marker, "color": color, "label": label, "markersize": 7}
            line = "-" if method == OURS else "none"
            axes.plot(*zip(*found, strict=True), linestyle=line, zorder=3 + (method == OURS), **style)  # type: ignore[arg-type]
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(title=MODELS[model], xlim=(10, 115), ylim=(-15, 40), xlabel="memory, % of plain")
    axes.grid(alpha=0.3)


def main() -> None:
    """Draw the picture."""
    rows = read_rows(ROWS)
    with rc_context({"font.size": 13, "svg.hashsalt": "beside", "svg.fonttype": "path"}):
        figure = new_figure()
        figure.set_size_inches(WIDTH, 4.6)
        panels = figure.subplots(1, len(MODELS), sharey=True)
        for axes, model in zip(panels, MODELS, strict=True):
            draw(axes, rows, model)
        panels[0].set_ylabel("extra time of a step, %")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, frameon=False)
        write_atomic(PICTURE, picture(figure, ".svg"))


if __name__ == "__main__":
    main()
