"""The frontier as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, cast

from hybridremat.analysis.frontier_data import FrontierData
from hybridremat.files import write_atomic
from hybridremat.plans.records import FrontierPoint
from hybridremat.reports.figures import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILION,
    new_figure,
    picture,
    require_suffix,
)
from hybridremat.units import format_bytes, memory_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE_WIDTH = 80  # characters
_POINT: dict[str, Any] = {
    "linestyle": "none",
    "markersize": 9,
    "markeredgecolor": "black",
    "markeredgewidth": 0.8,
}


def plot_frontier(
    frontier: FrontierData,
    path: str | Path | None,
    *,
    chosen: FrontierPoint | None = None,
    limit: int | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw the frontier on ``ax`` or a new figure, and write the file if there is a path.

    Parameters
    ----------
    chosen
        A point to be marked.
    limit
        Bytes; drawn as a line.

    Raises
    ------
    PlotError, MissingPackageError
        Before anything is drawn.
    """
    suffix = None if path is None else require_suffix(path)
    axes = ax if ax is not None else new_figure().add_subplot()
    draw_frontier(axes, frontier, chosen, limit)
    figure = cast("Figure", axes.get_figure(root=True))
    if path is not None and suffix is not None:
        write_atomic(Path(path), picture(figure, suffix))
    return figure


def draw_frontier(
    axes: Axes, frontier: FrontierData, chosen: FrontierPoint | None, limit: int | None
) -> None:
    """The frontier, its marked points, both scales of memory, and a legend that holds the figures."""
    unit, size = memory_unit(frontier.plain_peak)
    peaks = [point.peak / size for point in frontier.points]
    overheads = [100 * point.overhead for point in frontier.points]
    # A limit between two points gets the smaller one's plan: a step, not a slope.
    axes.plot(peaks, overheads, drawstyle="steps-post", color=BLUE, linewidth=1.8, label="fastest plan")
    _draw_bounds(axes, frontier, size)
    _draw_points(axes, frontier, size)
    _draw_measurements(axes, frontier, size)
    if limit is not None:
        label = f"limit {format_bytes(limit)}"
        axes.axvline(limit / size, color="0.35", linestyle="--", linewidth=1.2, label=label)
    if chosen is not None:
        _mark(axes, chosen, "chosen", size, marker="*", color=ORANGE, markersize=17, zorder=6)
    _label(axes, frontier, unit, size)


def _draw_bounds(axes: Axes, frontier: FrontierData, size: int) -> None:
    """What no schedule goes below; a limit between two bounds has that of the larger one."""
    if frontier.bounds:
        peaks = [each.peak / size for each in frontier.bounds]
        overheads = [100 * each.overhead for each in frontier.bounds]
        style: dict[str, Any] = {"drawstyle": "steps-pre", "color": "0.45", "linestyle": ":"}
        axes.plot(peaks, overheads, label="no schedule is faster", **style)


def _draw_points(axes: Axes, frontier: FrontierData, size: int) -> None:
    _mark(axes, frontier.least, "least feasible", size, marker="v", color=VERMILION, zorder=5)
    if (point := frontier.checkpointed) is not None:
        _mark(axes, point, "each layer checkpointed", size, marker="s", color=PURPLE, zorder=4)
    _mark(axes, frontier.plain, "plain step", size, marker="D", color=GREEN, zorder=5)


def _draw_measurements(axes: Axes, frontier: FrontierData, size: int) -> None:
    """Measured points hollow, each joined to its prediction; a cross where the peak differs from it."""
    label = "measured: time against the plain step, in turn"
    for each in frontier.measurements:
        x, y = each.peak / size, 100 * each.overhead
        if each.predicted is not None:
            line = ([each.predicted.peak / size, x], [100 * each.predicted.overhead, y])
            axes.plot(*line, color="0.6", linewidth=0.9, zorder=2)
        hollow = {**_POINT, "markersize": 7, "markerfacecolor": "white", "zorder": 7}
        if each.predicted is None:
            axes.plot([x], [y], marker="D", label=f"measured plain step: {format_bytes(each.peak)}", **hollow)
            continue
        axes.plot([x], [y], marker="o", label=label, **hollow)
        label = "_nolegend_"
    differing = [each for each in frontier.measurements if not each.agrees]
    if differing:
        axes.plot(
            [each.peak / size for each in differing],
            [100 * each.overhead for each in differing],
            linestyle="none", marker="x", markersize=11, color=VERMILION, zorder=8,
            label="peak not as predicted",
        )  # fmt: skip


def _mark(
    axes: Axes,
    point: FrontierPoint,
    name: str,
    size: int,
    *,
    marker: str,
    color: str,
    zorder: int,
    markersize: float = 9,
) -> None:
    axes.plot(
        [point.peak / size],
        [100 * point.overhead],
        label=f"{name}: {format_bytes(point.peak)}, {100 * point.overhead:+.1f} % time",
        **{**_POINT, "marker": marker, "color": color, "zorder": zorder, "markersize": markersize},
    )


def scaled_axes(axes: Axes, frontier: FrontierData) -> int:
    """Give axes both scales of memory, and titles; the bytes of their unit."""
    unit, size = memory_unit(frontier.plain_peak)
    _scale(axes, frontier, unit, size)
    return size


def _label(axes: Axes, frontier: FrontierData, unit: str, size: int) -> None:
    _scale(axes, frontier, unit, size)
    axes.legend(loc="best", fontsize=9, framealpha=0.95)


def _scale(axes: Axes, frontier: FrontierData, unit: str, size: int) -> None:
    share = size / max(1, frontier.plain_peak) * 100
    top = axes.secondary_xaxis("top", functions=(_scaled_by(share), _scaled_by(1 / share)))
    top.set_xlabel("% of the plain step's memory")
    axes.set_xlabel(f"step memory ({unit})")
    axes.set_ylabel(f"extra time (%, cost model {frontier.cost_model})")
    axes.set_title(_title(frontier), fontsize=11, pad=10)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def _scaled_by(factor: float) -> Callable[[Any], Any]:
    return lambda positions: factor * positions


def _title(frontier: FrontierData) -> str:
    """The model, and below it its inputs, shortened to the width of the title."""
    title = f"{frontier.origin.model or 'one step'}: time against memory"
    inputs = shorten(", ".join(map(str, frontier.origin.inputs)), width=TITLE_WIDTH, placeholder=" …")
    return f"{title}\n{inputs}" if inputs else title
