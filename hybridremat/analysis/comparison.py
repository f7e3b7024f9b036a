"""The frontiers of all strategies for one step, side by side."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, get_args

from hybridremat.analysis.frontier import Frontier
from hybridremat.analysis.frontier_plot import scaled_axes
from hybridremat.analysis.frontier_rows import point_row
from hybridremat.errors import GraphSizeError, InfeasibleLimitError
from hybridremat.files import write_atomic
from hybridremat.plans.request import MOVING, StrategyName
from hybridremat.reports.figures import new_figure, picture, require_suffix
from hybridremat.units import format_bytes, format_share_up, resolve_limit

SHARES = (90, 80, 70, 60, 50, 40, 30, 20)
"""Limits in percent of the plain step's memory, where none is asked for."""

TWENTIETHS = tuple(range(95, 0, -5))
"""The same for whole frontiers."""

MOST_COLUMNS = 8
"""Limits side by side in a table; more of them stand one below the other."""

COLORS = (
    *("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#999999"),
    *("#D55E00", "#56B4E9", "#000000", "#8C6D31", "#882255", "#44AA99", "#332288"),
)


@dataclass(frozen=True)
class Comparison:
    """The frontier of each strategy, by name; the default first.

    Attributes
    ----------
    frontiers
        By name.
    left_out
        Strategies that this graph is too large for, and what they say.
    known_points
        Whether rows hold what the frontiers found; else the fastest plan of each limit, made for it.
    """

    frontiers: dict[str, Frontier]
    left_out: dict[str, str] = field(default_factory=dict)
    known_points: bool = False

    @property
    def plain_peak(self) -> int:
        """Bytes of the plain step."""
        return next(iter(self.frontiers.values())).plain_peak

    def rows(self, limits: Sequence[int | str]) -> list[dict[str, Any]]:
        """For each strategy its least point, and the fastest under each limit (None below the least)."""
        return [
            {
                "strategy": name,
                "least": point_row(frontier.least, frontier),
                "at": [self._at(frontier, limit) for limit in limits],
            }
            for name, frontier in self.frontiers.items()
        ]

    def text(self, limits: Sequence[int | str]) -> str:
        """A table: least feasible memory, and extra time under each limit."""
        below = len(limits) > MOST_COLUMNS
        cells = [["strategy", "least" if below else "least feasible", *map(_named, limits)]]
        for row in self.rows(limits):
            peak = row["least"]["peak_bytes"]
            least = format_share_up(peak, self.plain_peak)
            times = ["–" if at is None else f"{at['overhead']:+.1%}" for at in row["at"]]
            cells.append([row["strategy"], least if below else f"{format_bytes(peak)} ({least})", *times])
        if below:
            columns = zip(*cells, strict=True)
            cells = [list(line) for line in columns if not self.known_points or set(line[1:]) != {"–"}]
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = [map(str.rjust, line, widths) for line in cells]
        cost_model = next(iter(self.frontiers.values())).cost_model
        plain = format_bytes(self.plain_peak)
        head = f"extra time by cost model {cost_model} under a limit; the plain step takes {plain}"
        return "\n".join([head, *map("  ".join, lines), *self.left_out.values()]) + "\n"

    def to_dict(self, limits: Sequence[int | str]) -> dict[str, Any]:
        """All of it as plain JSON types: the rows of the table, and each frontier."""
        return {
            "plain_peak_bytes": self.plain_peak,
            "limits": list(limits),
            "left_out": self.left_out,
            "strategies": [
                {**row, "frontier": self.frontiers[row["strategy"]].to_dict()} for row in self.rows(limits)
            ],
        }

    def _at(self, frontier: Frontier, limit: int | str) -> dict[str, Any] | None:
        """The row of the fastest point under a limit; None if there is none."""
        if self.known_points:
            most = resolve_limit(limit, self.plain_peak)
            fitting = [point for point in frontier.points if point.peak <= most]
            return point_row(fitting[-1], frontier) if fitting else None
        try:
            return point_row(frontier.at(memory_limit=limit), frontier)
        except InfeasibleLimitError:
            return None

    def to_csv(self, path: Path) -> None:
        """Write the points of all frontiers, one row for each."""
        rows = [
            {"strategy": name, **point_row(point, frontier)}
            for name, frontier in self.frontiers.items()
            for point in frontier.points
        ]
        content = StringIO()
        writer = csv.DictWriter(content, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(path, content.getvalue())

    def plot(self, path: Path) -> None:
        """Write a picture: memory across, extra time up, a line for each strategy.

        Raises
        ------
        PlotError, MissingPackageError
            Before anything is drawn.
        """
        suffix = require_suffix(path)
        figure = new_figure()
        axes = figure.add_subplot()
        first = next(iter(self.frontiers.values()))
        size = scaled_axes(axes, first)
        for place, (name, frontier) in enumerate(self.frontiers.items()):
            peaks = [point.peak / size for point in frontier.points]
            times = [100 * point.overhead for point in frontier.points]
            color, over = COLORS[place], len(COLORS) - place  # the first one on top
            axes.plot(
                peaks, times, drawstyle="steps-post", color=color, label=name, marker=".", zorder=over
            )
        axes.legend(loc="best", fontsize=9, framealpha=0.95)
        write_atomic(path, picture(figure, suffix))


def compare(
    make: Callable[[StrategyName], Frontier], *, known_points: bool = False, moves: bool = False
) -> Comparison:
    """The comparison of all strategies; ``make`` plans with the one of a name, ``moves``: values may move."""
    frontiers: dict[str, Frontier] = {}
    left_out: dict[str, str] = {}
    for name in get_args(StrategyName):
        if name in MOVING and not moves:
            continue
        try:
            frontiers[name] = make(name)
        except GraphSizeError as error:
            left_out[name] = str(error)
    return Comparison(frontiers, left_out, known_points)


def _named(limit: int | str) -> str:
    return limit if isinstance(limit, str) else format_bytes(limit)
