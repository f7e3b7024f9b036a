"""The memory of the step before and after planning, as one picture for a talk."""

from __future__ import annotations

from pathlib import Path

from hybridremat.files import write_atomic
from hybridremat.plans.plan_data import PlanData
from hybridremat.reports.figures import BLUE, VERMILION, new_figure, picture, require_suffix
from hybridremat.reports.plain_step import plain_plan
from hybridremat.reports.whole_step import WholeStep, whole_step
from hybridremat.units import format_bytes, format_time

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
TALK = 14  # points: readable from the last row


def plot_memory(plan: PlanData, path: str | Path) -> None:
    """Draw both steps over time, and the limit; the file is written whole or not.

    Raises
    ------
    PlotError, MissingPackageError, OutputError
        As :meth:`hybridremat.Plan.plot`.
    """
    suffix = require_suffix(path)
    planned, plain = whole_step(plan), whole_step(plain_plan(plan))
    power = min((max(1, *plain.totals()).bit_length() - 1) // 10, len(UNITS) - 1)
    unit = 1024**power
    figure = new_figure()
    axes = figure.add_subplot()
    for step, name, colour, filled in ((plain, "plain", VERMILION, 0.15), (planned, "planned", BLUE, 0.6)):
        totals, edges = [each / unit for each in step.totals()], _edges(step)
        label = f"{name}: {format_bytes(max(step.totals()))}"
        axes.stairs(totals, edges, fill=True, color=colour, alpha=filled, linewidth=0)
        axes.stairs(totals, edges, color=colour, linewidth=1.5, label=label)
    if plan.memory_limit is not None:
        label = f"limit: {format_bytes(plan.memory_limit)}"
        axes.axhline(plan.memory_limit / unit, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_title(f"{plan.origin.model or 'Training step'}: {plan.overhead:+.1%} time", fontsize=TALK + 2)
    axes.set_xlabel(f"time by cost model {plan.cost_model}", fontsize=TALK)
    axes.set_ylabel(f"step memory, {UNITS[power]}", fontsize=TALK)
    axes.xaxis.set_major_formatter(lambda at, _: format_time(round(at)))
    axes.tick_params(labelsize=TALK - 2)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=TALK - 2)
    write_atomic(Path(path), picture(figure, suffix))


def _edges(step: WholeStep) -> list[int]:
    """Nanoseconds at which executions start, and the last one ends."""
    starts = step.starts()
    return [*starts, starts[-1] + step.times()[-1]]
