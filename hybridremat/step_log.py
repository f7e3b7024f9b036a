"""Collects figures between two entries of a loop's log."""

from __future__ import annotations

from hybridremat.plans import Plan
from hybridremat.step_figures import StepFigures

PREFIX = "hybridremat/"


class StepLog:
    """What is new since the last entry: of several measurements the one with the largest peak.

    Attributes
    ----------
    due
        Whether something has come that is worth an entry of its own.
    waiting
        Whether something has come that has not been logged.
    """

    def __init__(self) -> None:
        self.due = self.waiting = False
        self._plan: Plan | None = None
        self._figures: StepFigures | None = None
        self._overhead: float | None = None

    def ran(self, plan: Plan) -> None:
        """A step has run under a plan."""
        if self._plan is None:
            self.due = self.waiting = True
        self._plan = plan

    def measured(self, figures: StepFigures, *, due: bool) -> None:
        """A step has been measured."""
        if self._figures is None or figures.measured > self._figures.measured:
            self._figures = figures
        self.waiting = True
        self.due = self.due or due

    def timed(self, overhead: float, *, due: bool) -> None:
        """The measured overhead as a fraction has changed."""
        self._overhead, self.waiting = overhead, True
        self.due = self.due or due

    def entry(self) -> dict[str, float]:
        """Keys and figures to be logged: bytes, and overheads as fractions. Empty before there is a plan."""
        figures, self._figures = self._figures, None
        self.due = self.waiting = False
        plan = figures.plan if figures is not None else self._plan
        if plan is None:
            return {}
        entry: dict[str, float] = {f"{PREFIX}predicted_peak_bytes": plan.predicted_peak}
        if figures is not None:
            entry[f"{PREFIX}measured_peak_bytes"] = figures.measured
        entry[f"{PREFIX}predicted_overhead"] = plan.overhead
        if self._overhead is not None:
            entry[f"{PREFIX}measured_overhead"] = self._overhead
        return entry
