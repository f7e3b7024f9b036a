"""What a loop does between a model's forward and the end of its backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from hybridremat.errors import ProfilerActiveError
from hybridremat.graph.costs.allocations import recorder_for
from hybridremat.graph.costs.recorder import MemoryRecorder


class OutsideMemory:
    """Measures what a step allocates beside the forwards of a model."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._recorder: MemoryRecorder | None = None
        self._reset()

    def _reset(self) -> None:
        self._left = self._most = 0
        self._known = True

    def go_on(self) -> None:
        """A forward has ended."""
        if self._device != "cuda":
            gc.collect()  # what only a cycle holds must not be freed meanwhile
        recorder = recorder_for(self._device, interruptible=True)
        try:
            recorder.start()
        except ProfilerActiveError:
            self._known = False
        else:
            self._recorder = recorder

    def pause(self) -> None:
        """A forward begins, or the backward has ended."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recording = recorder.stop()
        if recording is None:
            self._known = False
            return
        self._most = max(self._most, self._left + recording.new_peak)
        self._left += max(0, recording.segments[-1].end)

    def end(self) -> tuple[int | None, int]:
        """Most bytes that were alive at one time in this step (None: not known), and those that are."""
        self.pause()
        found = self._most if self._known else None, self._left
        self._reset()
        return found

    def give_up(self) -> None:
        """Stop without figures."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.give_up()
        self._reset()


class NextBackward:
    """Calls ``then`` after each ``loss.backward()`` until it returns True, and ``failed`` if one fails.

    Autograd has no hook there: those that it has run in the middle of its work, where the profiler can be
    neither stopped nor started, as it is one of the thread's settings that autograd brings with it.

    Attributes
    ----------
    running
        Whether such a backward runs.
    """

    def __init__(self, then: Callable[[], bool], failed: Callable[[], None]) -> None:
        self._then, self._failed = then, failed
        self._waits = self.running = False

    def await_it(self) -> None:
        """Wait for the next backward, if this does not already."""
        if not self._waits:
            self._waits = True
            self._original, self._ours = torch.autograd.backward, self._run
            torch.autograd.backward = self._ours

    def forget(self) -> None:
        """Wait no longer."""
        if self._waits and torch.autograd.backward is self._ours:
            torch.autograd.backward = self._original
        self._waits = False

    def _run(self, *args: Any, **kwargs: Any) -> None:
        waited = self._waits
        self.forget()
        self.running = waited
        try:
            self._original(*args, **kwargs)
        except BaseException:
            self._failed()
            raise
        finally:
            self.running = False
        if waited and not self._then():
            self.await_it()
