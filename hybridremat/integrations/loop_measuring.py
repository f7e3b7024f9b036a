"""Measure the memory of steps inside a loop, from the model's forward to the end of its backward.

On CUDA the caching allocator counts anyway, so every step is measured. On CPU it takes the profiler, which
makes a step slow, so few are.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from typing import Protocol

import torch

from hybridremat.errors import ProfilerActiveError
from hybridremat.graph.costs.open_recording import OpenRecording

logger = logging.getLogger(__name__)

FIRST_MEASURED = 1  # the step after the first planned one, which plans


class Recording(Protocol):
    """Bytes of one step, recorded from its making on."""

    def peak(self) -> int | None:
        """Stop; most bytes allocated since the start and alive at one time. None: not known."""

    def give_up(self) -> None:
        """Stop without figures."""

    def pause(self) -> None:
        """Leave out what is freed until :meth:`resume`."""

    def resume(self) -> None:
        """See :meth:`pause`."""


class CudaRecording:
    """The caching allocator's own counters, read above what was allocated at the start."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        self._highest = 0
        self._paused: int | None = None

    def peak(self) -> int:
        """See :class:`Recording`."""
        return max(self._highest, torch.cuda.max_memory_allocated() - self._before)

    def give_up(self) -> None:
        """See :class:`Recording`."""

    def pause(self) -> None:
        """See :class:`Recording`."""
        self._paused = torch.cuda.memory_allocated()

    def resume(self) -> None:
        """See :class:`Recording`."""
        if self._paused is None:
            return
        self._highest = self.peak()
        torch.cuda.reset_peak_memory_stats()
        self._before -= self._paused - torch.cuda.memory_allocated()
        self._paused = None


class StepPeaks:
    """Records the steps that are to be measured. ``every``: see the callbacks' ``measure_every``."""

    def __init__(self, device: str, every: int | None) -> None:
        self._cuda = device == "cuda"
        self._every = every
        self._count = 0  # planned steps so far
        self._due: float = FIRST_MEASURED
        self._recording: Recording | None = None

    @property
    def slow(self) -> bool:
        """Whether the step that runs takes more time because it is measured."""
        return self._recording is not None and not self._cuda

    def begin(self) -> None:
        """A planned forward begins; the first one of its step starts the recording, if one is due."""
        if self._recording is not None or self._count < self._due:
            return
        if self._cuda:
            self._recording = CudaRecording()
            return
        gc.collect()  # what only a cycle holds must not be freed meanwhile
        try:
            self._recording = OpenRecording()
        except ProfilerActiveError as error:  # the next step is tried instead
            logger.info("%s", error)

    @property
    def rare(self) -> bool:
        """Whether few steps are measured."""
        return self._every is not None or not self._cuda

    def pause(self) -> None:
        """What is freed until :meth:`resume` was there before the step."""
        if self._recording is not None:
            self._recording.pause()

    def resume(self) -> None:
        """See :meth:`pause`."""
        if self._recording is not None:
            self._recording.resume()

    def give_up(self) -> None:
        """The step has failed, or came to be planned: no figures; the next one is measured instead."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.give_up()

    def end(self) -> int | None:
        """The backward of a planned step is over: its peak in bytes, or None if it was not measured."""
        self._count += 1
        recording, self._recording = self._recording, None
        peak = recording.peak() if recording is not None else None
        if peak is not None:
            self._due = self._next()
        return peak

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
