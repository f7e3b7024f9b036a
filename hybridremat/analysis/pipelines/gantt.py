"""The replay of a pipeline's step as a Gantt chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridremat.analysis.pipelines.plan_data import PipelineData
from hybridremat.files import write_atomic
from hybridremat.reports.figures import BLUE, ORANGE, new_figure, picture, require_suffix
from hybridremat.units import format_time

NAMED = 0.02  # of the step: an action this long has room for the number of its microbatch
_COLOURS = {"forward": BLUE, "backward": ORANGE}


def plot_timeline(plan: PipelineData, path: str | Path) -> None:
    """Draw one row for each device; the file is written whole or not.

    Raises
    ------
    PlotError, MissingPackageError, OutputError
        As :meth:`hybridremat.PipelinePlan.plot`.
    """
    suffix = require_suffix(path)
    figure = new_figure()
    axes = figure.add_subplot()
    for kind, colour in _COLOURS.items():
        mine = [each for each in plan.timeline if each.kind == kind]
        long, left = [each.end - each.start for each in mine], [each.start for each in mine]
        rows = [each.device for each in mine]
        style: dict[str, Any] = {"height": 0.8, "color": colour, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(rows, long, left=left, label=kind, **style)
    for each in plan.timeline:
        if each.end - each.start >= NAMED * plan.step_time:
            middle = (each.start + each.end) / 2
            axes.text(middle, each.device, str(each.microbatch), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(plan.devices), [f"device {device}" for device in range(plan.devices)])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda at, _: format_time(round(at)))
    axes.set_xlabel("time by cost model; numbers are microbatches")
    axes.set_title(f"{plan.schedule}: {format_time(plan.step_time)} a step, {plan.bubble:.1%} of it waiting")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    write_atomic(Path(path), picture(figure, suffix))
