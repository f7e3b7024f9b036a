"""What a run of a training loop ends with: one line, a report and a picture, and their way to its loggers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from hybridremat.analysis.frontier_data import FrontierData
from hybridremat.analysis.frontier_plot import draw_frontier
from hybridremat.errors import MissingPackageError
from hybridremat.files import write_atomic
from hybridremat.integrations.loop_figures import PREFIX, StepFigures
from hybridremat.planning.plan import Plan
from hybridremat.plans.records import FrontierPoint
from hybridremat.reports.figures import new_figure, picture
from hybridremat.units import format_bytes

logger = logging.getLogger(__name__)

FOLDER = "hybridremat-report"  # in the folder that the loop writes to; no name that Python could import


@dataclass(frozen=True)
class RunSummary:
    """One run in figures.

    Attributes
    ----------
    plan
        The plan of the step with the largest peak.
    peak
        Bytes of that step: measured if ``measured``, else predicted.
    overhead
        Extra time as a fraction: measured if it was, else by the cost model.
    plans
        How many plans ran, one for each input shape.
    captures, schedules
        How many captures of all sizes there were, and how many schedules these ran; 0 without.
    planning_seconds
        What all of them took to plan.
    report
        The HTML report; None if none was written.
    """

    plan: Plan
    peak: int
    measured: bool
    overhead: float
    plans: int
    planning_seconds: float
    report: Path | None = None
    captures: int = 0
    schedules: int = 0

    def __str__(self) -> str:
        shapes = _counted(self.plans, "shape")
        if self.captures:
            made = _counted(self.captures, "capture"), _counted(self.schedules, "schedule")
            shapes += " ({} of all sizes, {})".format(*made)
        how = "" if self.measured else " (predicted)"
        line = (
            f"peak {format_bytes(self.peak)}{how} instead of {format_bytes(self.plan.plain_peak)}, "
            f"{100 * self.overhead:+.1f} %, {shapes}, {self.planning_seconds:.0f} s planning"
        )
        return line if self.report is None else f"{line}; report: {self.report}"


@dataclass(frozen=True)
class Uploads:
    """Where a report goes: TensorBoard's writers, W&B's runs, and the step that they file it under."""

    writers: tuple[Any, ...] = ()
    runs: tuple[Any, ...] = ()
    step: int = 0


NO_UPLOADS: Final = Uploads()


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def run_summary(
    plans: Sequence[Plan],
    largest: StepFigures | None,
    overhead: float | None,
    planning_seconds: float,
    captures: tuple[int, int] = (0, 0),
) -> RunSummary | None:
    """The figures of a run; None if nothing was planned in it.

    ``captures``: those of all sizes, and their schedules.
    """
    if not plans:
        return None
    plan = largest.plan if largest is not None else max(plans, key=lambda each: each.predicted_peak)
    return RunSummary(
        plan=plan,
        peak=plan.predicted_peak if largest is None else largest.measured,
        measured=largest is not None,
        overhead=plan.overhead if overhead is None else overhead,
        plans=len(plans),
        planning_seconds=planning_seconds,
        captures=captures[0],
        schedules=captures[1],
    )


def with_report(summary: RunSummary, folder: Path) -> RunSummary:
    """The summary with its report, which is written below a folder; without, if that cannot be written.

    Training is over by then, and is not to fail because of a report.
    """
    path = folder / FOLDER / "plan.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        summary.plan.to_html(path)
        if (image := frontier_figure(summary.plan)) is not None:
            write_atomic(path.with_name("frontier.png"), picture(image, ".png"))
    except OSError as error:
        logger.warning("no report of the plan is written: %s", error)
        return summary
    return replace(summary, report=path)


def frontier_figure(plan: Plan) -> Any | None:
    """The frontier that the plan was chosen from as a matplotlib figure; None where there is none."""
    if plan.details is None or not plan.details.frontier:
        return None
    data = FrontierData(
        plan.details.frontier,
        plan.plain_peak,
        plan.details.checkpointed,
        origin=plan.origin,
        cost_model=plan.cost_model,
    )
    try:
        figure = new_figure()
    except MissingPackageError:
        logger.info("no picture of the frontier: matplotlib is not installed")
        return None
    chosen = FrontierPoint(plan.predicted_peak, plan.overhead, plan.extra_flops)
    draw_frontier(figure.add_subplot(), data, chosen, plan.memory_limit)
    return figure


def to_tensorboard(writer: Any, summary: RunSummary, step: int) -> None:
    """Hand the picture to a ``SummaryWriter``, and the line with the plan as text: it takes no HTML."""
    import numpy as np

    figure = frontier_figure(summary.plan)
    if figure is not None:
        figure.canvas.draw()
        pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()
        writer.add_image(f"{PREFIX}frontier", pixels, step, dataformats="HWC")
    lines = "\n".join(f"    {line}" for line in str(summary.plan).splitlines())
    writer.add_text(f"{PREFIX}report", f"{summary}\n\n{lines}", step)


def to_wandb(run: Any, summary: RunSummary) -> None:
    """Hand picture and HTML report to a run of Weights & Biases, in one entry."""
    if summary.report is None:
        return
    wandb = sys.modules["wandb"]
    entry = {f"{PREFIX}report": wandb.Html(summary.report.read_text(encoding="utf-8"))}
    if (image := summary.report.with_name("frontier.png")).exists():
        entry[f"{PREFIX}frontier"] = wandb.Image(str(image))
    run.log(entry)


def upload(targets: Uploads, summary: RunSummary) -> None:
    """Hand a report to the loop's loggers; what fails there is logged, not raised: training is over."""
    sends = [partial(to_tensorboard, writer, summary, targets.step) for writer in targets.writers]
    sends += [partial(to_wandb, run, summary) for run in targets.runs]
    for send in sends:
        try:
            send()
        except Exception as error:  # noqa: BLE001 (whatever a logger raises)
            logger.warning("the report did not reach a logger: %s", error)
