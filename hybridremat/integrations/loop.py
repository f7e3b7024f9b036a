"""What the callbacks for training loops share: wrap, measure, compare with the plan, warn, unwrap.

A callback reports when training and steps begin and end, and when the backward of a micro-batch ends; the
wrapped model itself reports its forwards. The callback reads the figures for the loop's logger.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

from torch import nn

from hybridremat.compiler.capture import model_device
from hybridremat.errors import PredictionWarning, TuningError, warn_caller
from hybridremat.integrations.loop_figures import StepFigures, StepLog
from hybridremat.integrations.loop_measuring import StepPeaks, StepTimes
from hybridremat.integrations.loop_options import LoopOptions, find_target
from hybridremat.integrations.loop_report import (
    NO_UPLOADS,
    RunSummary,
    Uploads,
    run_summary,
    upload,
    with_report,
)
from hybridremat.planning.plan import Plan
from hybridremat.runtime.planned_call import PlannedCall, planned_call
from hybridremat.runtime.prepare import require_wrappable, wrap_at_first_step

logger = logging.getLogger(__name__)

SETTLED: Final = 2
"""Micro-batches after which the plan is the one that stays: the first may show where the loss is computed."""


class LoopWatch:
    """Plans and watches one training run at a time, from :meth:`begin` to :meth:`end`.

    Attributes
    ----------
    target
        The module that is planned; None outside of a run.
    log
        Figures for the loop's logger, and the plans that ran; they stay until the next run.
    summary
        What :meth:`finish` said.
    """

    def __init__(self, options: LoopOptions) -> None:
        self.options = options
        self.target: nn.Module | None = None
        self._reset()

    def _reset(self, device: str = "cpu") -> None:
        self.log = StepLog()
        self.summary: RunSummary | None = None
        self._times = StepTimes(self.options.plain_steps)
        self._peaks = StepPeaks(device, self.options.measure_every)
        self._call: PlannedCall | None = None
        self._wrapped_here = self._measured = self._warned = False
        self._to_tune = self.options.tune_steps
        self._ran: Plan | None = None  # the plan of the last forward
        self._forwards = 0  # planned ones of the current micro-batch
        self._planned = 0  # micro-batches that ran planned
        self._captures = 0  # graphs captured by the end of the last forward
        self._loss_outside = False
        self._pure = True  # whether the current step spends its time on training alone

    def begin(self, model: nn.Module, *, loss_outside: bool = False) -> None:
        """Training begins: wrap the module, unless its owner has.

        ``loss_outside``: the loop computes the loss from what the module returns. With
        ``grad_outputs="all"`` or ``outputs="loss"`` its owner has said how.

        Raises
        ------
        HybridRematError
            As ``wrap_at_first_step`` and :func:`find_target`; nothing has changed.
        """
        self.end()
        target = find_target(model, self.options.module)
        call = planned_call(target)
        if call is None:
            require_wrappable(target, self.options.settings)
        self._reset(model_device(target))
        self.target = target
        settings = self.options.settings
        self._loss_outside = loss_outside and (settings.grad_outputs, settings.outputs) == ("auto", "all")
        if call is not None:
            self._times = StepTimes(0)  # its owner wants no plain steps
            self._watch(call)
        elif not self._times.in_plain_steps:
            self._wrap()

    def end(self) -> None:
        """Training is over or has failed: unwrap what :meth:`begin` wrapped. May be called at any time."""
        self._peaks.give_up()
        call, self._call = self._call, None
        if call is not None:
            call.around_forward = nullcontext
            if call.first_steps is not None:
                call.first_steps.give_up()
            # Someone may have unwrapped the model meanwhile, or wrapped it anew.
            if self._wrapped_here and planned_call(call.model) is call:
                call.remove()
        self.target = None

    def finish(self, folder: Path | None, *, upload_to: Uploads = NO_UPLOADS) -> None:
        """Training has come to its end: log a line about it, and write and hand over its report, once.

        Parameters
        ----------
        folder
            Where the report is written (``hybridremat-report/plan.html`` in it); None: nowhere.
        upload_to
            The loop's loggers.
        """
        log = self.log
        sizes = self._call.sizes if self._call is not None else None
        counts = sizes.counts() if sizes is not None else (0, 0)
        self.summary = run_summary(log.plans, log.largest, log.overhead, log.planning_seconds, counts)
        if self.target is None or self.summary is None:
            return
        if folder is not None and self.options.report:
            self.summary = with_report(self.summary, folder)
            upload(upload_to, self.summary)
        shown = logger.isEnabledFor(logging.INFO) or not self.options.progress
        # Nobody asks for INFO by default, and this line is what one looks for at the end.
        logger.log(logging.INFO if shown else logging.WARNING, "%s", self.summary)

    def step_begins(self) -> None:
        """A step begins; it is timed until :meth:`step_ends`."""
        if self.target is None:
            return
        if self._call is None and not self._times.in_plain_steps:
            self._wrap()
        if self._to_tune is not None and self._planned >= SETTLED:
            self._tune(self._to_tune)
        self._pure = True
        self._times.begin()

    def backward_ends(self) -> None:
        """The backward of a micro-batch is over: compare its peak with the plan's."""
        call, forwards = self._call, self._forwards
        self._forwards = 0
        if call is None:
            return
        if call.first_steps is not None:
            call.first_steps.give_up()
        if not forwards:
            self._warn_unplanned()
            return
        self._pure = self._pure and self._planned > 0 and not self._peaks.slow
        self._planned += 1
        peak = self._peaks.end()
        if (plan := self._ran) is None:
            return
        self.log.ran(plan)
        if peak is not None:
            settings = call.context.settings
            bound = bool(plan.parts) or settings.hold_outputs
            self._compare(StepFigures(plan, peak, upper_bound=bound))

    def step_ends(self) -> None:
        """All forwards and backwards of the step are over."""
        self._times.end(planned=self._call is not None, counts=self._pure)
        overhead, count = self._times.overhead, len(self._times.planned)
        if overhead is not None:
            self.log.timed(overhead, due=count == self._times.plain_steps)

    def pause(self) -> None:
        """Ignore what is freed until :meth:`resume`: gradients of the step before."""
        self._peaks.pause()

    def resume(self) -> None:
        """See :meth:`pause`."""
        self._peaks.resume()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Around each planned forward: measure it, unless it is the one that is captured and planned."""
        call = self._call
        assert call is not None
        if call.captures == self._captures:
            self._peaks.begin()
        try:
            yield
        except BaseException:
            self._peaks.give_up()
            raise
        if call.captures != self._captures:
            self._captures, self._pure = call.captures, False
            self._peaks.give_up()
        self._ran = call.plan  # the next one may have another schedule
        self._forwards += 1

    def _wrap(self) -> None:
        assert self.target is not None
        self._wrapped_here = True
        options = self.options
        call = wrap_at_first_step(
            self.target,
            options.settings,
            given=options.plan,
            progress=options.progress,
            loss_outside=self._loss_outside,
        )
        self._watch(call)

    def _watch(self, call: PlannedCall) -> None:
        self._call, self._captures = call, call.captures
        call.around_forward = self._forward

    def _tune(self, steps: int) -> None:
        """Let schedules take turns from now on, if they can."""
        from hybridremat.runtime.tune import tune

        assert self.target is not None
        self._to_tune = None
        try:
            tune(self.target, steps=steps, progress=self.options.progress)
        except TuningError as error:
            logger.warning("tune_steps=%d: %s", steps, error)

    def _compare(self, figures: StepFigures) -> None:
        self.log.measured(figures, due=self._peaks.rare or not self._measured)
        self._measured = True
        if abs(figures.deviation()) > self.options.tolerance:
            self._warn(figures.warning(type(self.target).__name__))

    def _warn_unplanned(self) -> None:
        if self._planned == 0:
            name = type(self.target).__name__
            self._warn(
                f"a training step ran without a planned forward of {name}, so the memory limit does not hold "
                "for it. The loop has to call the module itself, in training mode and with gradients: name "
                "the submodule that it calls with module=, or call self(…) instead of self.forward(…)."
            )

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s", text)
            warn_caller(text, PredictionWarning)
