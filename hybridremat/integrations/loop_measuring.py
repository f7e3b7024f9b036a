"""Measure the memory of steps inside a loop, from the model's forward to the end of its backward.

On CUDA the caching allocator counts anyway, so every step is measured. On CPU it takes the profiler, which
makes a step slow, so few are.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time

import torch

from hybridremat.errors import ProfilerActiveError
from hybridremat.graph.costs.allocations import recorder_for
from hybridremat.graph.costs.recorder import FREEING, MemoryRecorder

logger = logging.getLogger(__name__)

FIRST_MEASURED = 1  # the step after the first planned one, which plans


class StepPeaks:
    """Records the steps that are to be measured. ``every``: see the callbacks' ``measure_every``."""

    def __init__(self, device: str, every: int | None) -> None:
        self._device = device
        self._cuda = device == "cuda"
        self._every = every
        self._count = 0  # planned steps so far
        self._due: float = FIRST_MEASURED
        self._recorder: MemoryRecorder | None = None

    @property
    def slow(self) -> bool:
        """Whether the step that runs takes more time because it is measured."""
        return self._recorder is not None and not self._cuda

    def begin(self) -> None:
        """A planned forward begins; the first one of its step starts the recording, if one is due."""
        if self._recorder is not None or self._count < self._due:
            return
        if not self._cuda:
            gc.collect()  # what only a cycle holds must not be freed meanwhile
        recorder = recorder_for(self._device, interruptible=True)
        try:
            recorder.start()
        except ProfilerActiveError:  # the next step is tried instead
            logger.info("a profiler of the caller is running, so this step is not measured")
        else:
            self._recorder = recorder

    @property
    def rare(self) -> bool:
        """Whether few steps are measured."""
        return self._every is not None or not self._cuda

    def pause(self) -> None:
        """What is freed until :meth:`resume` was there before the step."""
        if self._recorder is not None:
            self._recorder.mark(FREEING)

    def resume(self) -> None:
        """See :meth:`pause`."""
        if self._recorder is not None:
            self._recorder.mark("step")

    def give_up(self) -> None:
        """The step has failed, or came to be planned: no figures; the next one is measured instead."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.give_up()

    def end(self) -> int | None:
        """The backward of a planned step is over: its peak in bytes, or None if it was not measured."""
        self._count += 1
        recorder, self._recorder = self._recorder, None
        recording = recorder.stop() if recorder is not None else None
        if recording is None:
            return None
        self._due = self._next()
        return recording.new_peak

    def _next(self) -> float:
        if self._every is None:
            return self._count if self._cuda else float("inf")
        return self._due + self._every


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
