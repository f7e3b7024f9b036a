"""Tables and plots from the rows of ``peers.py``: a part of docs/benchmarks.md, and a picture a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from generated import write_part
from matplotlib.axes import Axes

from hybridremat.files import write_atomic
from hybridremat.reports.figures import new_figure, picture
from hybridremat.sequence.strategies import STRATEGIES

DOCS = Path(__file__).resolve().parent.parent / "docs"
SCRIPT = "peers.py"
HALF, POINT = 0.5, 1.0
"""Ours: at most this share of a peer's extra flops, or this many percent."""

ROUNDED = 2.0
"""Gradients count as correct that are at most this many times as far from float64 as eager's."""

Row = dict[str, Any]

LEGEND = """Peaks are shares of plain eager's; extra flops are beyond eager's. *Gradients*: equal to
eager's bit for bit, or how many times as far from float64's they are as eager's. *Time*: CPU time of a step,
the median of pairs with eager ones. *Prepared*: CPU seconds until the first step is over. *Ours there*: extra
flops of `hybrid` under that peak, op by op, and time where it ran with that limit (its measured peak was the
predicted one, its gradients equal); **bold** where extra flops are more than half of a correct peer's and
more than a point. *Compiled*: the same for plans that Inductor compiles, under *inductor*'s peaks."""


def number(row: Row, name: str) -> float | None:
    """A figure of a row."""
    return float(row[name]) if row.get(name) not in (None, "") else None


def is_correct(row: Row) -> bool:
    """Whether gradients are equal, or about as near to float64 as eager's."""
    if row["gradients"] == "equal":
        return True
    error, eager = number(row, "error"), number(row, "eager_error")
    near = error is not None and eager is not None and error <= ROUNDED * eager
    return row["gradients"] == "differ" and near


def ours_at(rows: Sequence[Row], peak: float, method: str = "hybrid") -> Row | None:
    """The row of least extra flops of a method at most at a peak, measured ones before planned ones."""
    fitting = [
        row
        for row in rows
        if row["method"] == method and (number(row, "predicted_bytes") or peak + 1) <= peak
    ]
    return min(
        fitting,
        key=lambda row: (number(row, "extra_flops_percent") or 0.0, not row["peak_bytes"]),
        default=None,
    )


def reaches(ours: Row, peer: Row) -> bool:
    """Whether ours has at most half of a peer's extra flops, or a point."""
    found, extra = (number(row, "extra_flops_percent") or 0.0 for row in (ours, peer))
    return found <= max(HALF * extra, POINT)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A table of one model."""
    eager = next(number(row, "peak_bytes") for row in rows if row["method"] == "eager")
    assert eager is not None
    yield "| method | setting | peak | extra flops | gradients | time | prepared | ours there | compiled |"
    yield "|---|---|---|---|---|---|---|---|---|"
    theirs = [row for row in rows if row["method"] not in STRATEGIES and row["method"] != "hybrid, compiled"]
    for row in sorted(theirs, key=lambda each: -(number(each, "peak_bytes") or 0)):
        peak = number(row, "peak_bytes")
        if peak is None:
            yield f"| {row['method']} | {row['setting']} | | | {row['gradients']} | | | | |"
            continue
        yield "| " + " | ".join(cells(row, peak, eager, rows)) + " |"


def cells(row: Row, peak: float, eager: float, rows: Sequence[Row]) -> Iterator[str]:
    """The cells of one peer."""
    extra = number(row, "extra_flops_percent") or 0.0
    yield row["method"]
    yield row["setting"]
    yield f"{100 * peak / eager:.1f} %"
    yield f"{extra:.1f} %"
    error, plain = number(row, "error"), number(row, "eager_error")
    yield row["gradients"] if error is None or not plain else f"{error / plain:.1f} ×"
    yield f"{number(row, 'time_ratio') or 0:.2f}"
    yield f"{number(row, 'prepared_seconds') or 0:.0f} s"
    yield beside(ours_at(rows, peak), row)
    yield beside(ours_at(rows, peak, "hybrid, compiled"), row)


def beside(ours: Row | None, peer: Row) -> str:
    """Extra flops and time of ours."""
    if ours is None:
        return "–"
    found, time = number(ours, "extra_flops_percent") or 0.0, number(ours, "time_ratio")
    reached = reaches(ours, peer) or not is_correct(peer)
    text = f"{found:.1f} %" if reached else f"**{found:.1f} %**"
    return text + (f", {time:.2f}" if time is not None else "")


def strategies(rows: Sequence[Row]) -> str:
    """A line about the strategies: least peaks, and that what was trained was equal."""
    eager = next(number(row, "peak_bytes") for row in rows if row["method"] == "eager")
    assert eager is not None
    parts = []
    for name in STRATEGIES:
        of_name = [row for row in rows if row["method"] == name and row["predicted_bytes"]]
        if not of_name:
            continue
        least = min(of_name, key=lambda row: number(row, "predicted_bytes") or 0.0)
        share = 100 * (number(least, "predicted_bytes") or 0) / eager
        parts.append(f"`{name}` {share:.1f} % with {number(least, 'extra_flops_percent') or 0:.1f} %")
    return f"Least peaks by strategy, with their extra flops: {', '.join(parts)}." if parts else ""


def draw(axes: Axes, rows: Sequence[Row], model: str) -> None:
    """Memory across, extra flops up, a line a method."""
    eager = next(number(row, "peak_bytes") for row in rows if row["method"] == "eager")
    assert eager is not None
    names = dict.fromkeys(row["method"] for row in rows)
    for place, name in enumerate(names):
        points = [
            (100 * peak / eager, number(row, "extra_flops_percent") or 0.0)
            for row in rows
            if row["method"] == name
            and (peak := number(row, "peak_bytes") or number(row, "predicted_bytes")) is not None
        ]
        if not points:
            continue
        ours = name in STRATEGIES
        color = "black" if name == "hybrid" else f"C{place % 10}"
        style = {"color": color, "label": name, "marker": "." if ours else "^sDvPX*"[place % 7]}
        kind = "-" if name == "hybrid" else ":" if ours else "none"
        x, y = zip(*sorted(set(points)), strict=True)
        above = 10 if name == "hybrid" else 5
        axes.plot(x, y, linestyle=kind, drawstyle="steps-post", zorder=above, **style)  # type: ignore[arg-type]
    axes.set(xlabel="peak, % of plain eager's", ylabel="extra flops, %", title=model, ylim=(-2, 60))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)


def write_pages(rows: Sequence[Row]) -> None:
    """Write the part of docs/benchmarks.md between its marks, and a picture for each model and device."""
    parts: list[str] = []
    for model, device in dict.fromkeys((row["model"], row["device"]) for row in rows):
        own = [row for row in rows if (row["model"], row["device"]) == (model, device)]
        if not any(row["method"] == "eager" for row in own):
            continue
        figure = new_figure()
        draw(figure.add_subplot(), own, model)
        name = f"peers-{model.replace(':', '-')}-{device}.png"
        write_atomic(DOCS / "images" / name, picture(figure, ".png"))
        dates = sorted({row["date"] for row in own})
        parts += ["<details>", f"<summary>{model} on {device}</summary>", ""]
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        parts += [f"{when}, torch {own[0]['torch']}.", ""]
        plot = f"![{model}: memory and extra flops](images/{name})"
        parts += [*table(own), "", strategies(own), "", plot, "", "</details>", ""]
    write_part(DOCS / "benchmarks.md", SCRIPT, f"{LEGEND}\n\n" + "\n".join(parts).rstrip())
