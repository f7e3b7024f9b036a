"""The memory of the step before and after planning, as one picture for a talk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridremat.files import write_atomic
from hybridremat.plans.plan_data import PlanData
from hybridremat.reports.figures import BLUE, GREEN, ORANGE, VERMILION, new_figure, picture, require_suffix
from hybridremat.reports.plain_step import plain_plan
from hybridremat.reports.whole_step import HostCopy, WholeStep, whole_step
from hybridremat.units import format_bytes, format_time, memory_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TALK = 14  # points: readable from the last row


def plot_memory(plan: PlanData, path: str | Path) -> None:
    """Draw both steps over time, the limit, and copies; the file is written whole or not.

    Raises
    ------
    PlotError, MissingPackageError, OutputError
        As :meth:`hybridremat.Plan.plot`.
    """
    suffix = require_suffix(path)
    planned, plain = whole_step(plan), whole_step(plain_plan(plan))
    unit_name, unit = memory_unit(max(plain.totals()))
    copies = list(planned.copies())
    figure = new_figure()
    heights = [5, 1] if copies else [1]
    rows = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    axes: Axes = rows[0, 0]
    for step, name, colour, filled in ((plain, "plain", VERMILION, 0.15), (planned, "planned", BLUE, 0.6)):
        totals, edges = [each / unit for each in step.totals()], _edges(step)
        label = f"{name}: {format_bytes(max(step.totals()))}"
        axes.stairs(totals, edges, fill=True, color=colour, alpha=filled, linewidth=0)
        axes.stairs(totals, edges, color=colour, linewidth=1.5, label=label)
    if plan.memory_limit is not None:
        label = f"limit: {format_bytes(plan.memory_limit)}"
        axes.axhline(plan.memory_limit / unit, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_title(f"{plan.origin.model or 'Training step'}: {plan.overhead:+.1%} time", fontsize=TALK + 2)
    axes.set_ylabel(f"step memory, {unit_name}", fontsize=TALK)
    axes.tick_params(labelsize=TALK - 2)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=TALK - 2)
    if copies:
        _draw_copies(rows[1, 0], copies)
    lowest: Axes = rows[-1, 0]
    lowest.set_xlabel(f"time by cost model {plan.cost_model}", fontsize=TALK)
    lowest.xaxis.set_major_formatter(lambda at, _: format_time(round(at)))
    lowest.tick_params(labelsize=TALK - 2)
    write_atomic(Path(path), picture(figure, suffix))


def _draw_copies(axes: Axes, copies: Sequence[HostCopy]) -> None:
    """A row for each direction, with a bar as long as each copy takes."""
    for row, (to_host, colour) in enumerate(((True, ORANGE), (False, GREEN))):
        bars = [(each.start, each.time) for each in copies if each.to_host == to_host]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=colour, linewidth=0)
    axes.set_yticks([0, 1], ["to host", "back"])
    axes.invert_yaxis()


def _edges(step: WholeStep) -> list[int]:
    """Nanoseconds at which executions start, and the last one ends."""
    starts = step.starts()
    return [*starts, starts[-1] + step.times()[-1]]
