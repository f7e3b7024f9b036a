"""Times of plain steps and of planned ones: what a plan costs, measured in the loop itself."""

from __future__ import annotations

import statistics
import time

import torch


class StepTimes:
    """Seconds of steps, from :meth:`begin` to :meth:`end`. Medians are compared, against odd slow steps."""

    def __init__(self, plain_steps: int) -> None:
        self.plain_steps = plain_steps
        self.plain: list[float] = []
        self.planned: list[float] = []
        self._started: float | None = None

    @property
    def in_plain_steps(self) -> bool:
        """Whether plain steps are still to come."""
        return len(self.plain) < self.plain_steps

    def begin(self) -> None:
        """A step begins."""
        if self.plain_steps:
            self._started = _now()

    def end(self, *, planned: bool, counts: bool = True) -> None:
        """Its backward is over; ``counts``: whether nothing but the step took its time."""
        started, self._started = self._started, None
        if started is None:
            return
        taken = _now() - started
        if not planned:
            self.plain.append(taken)
        elif counts:
            self.planned.append(taken)

    @property
    def overhead(self) -> float | None:
        """(planned time − plain time) / plain time; None before there are both."""
        if not self.plain or not self.planned:
            return None
        plain = statistics.median(self.plain)
        return (statistics.median(self.planned) - plain) / plain


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
