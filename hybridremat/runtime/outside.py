"""What a loop does between a model's forward and the end of its backward."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, ClassVar

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

    It waits for those of the thread that it is told to wait in. Autograd has no hook there: those that it has
    run in the middle of its work, where the profiler can be neither stopped nor started, as it is one of the
    thread's settings that autograd brings with it. So ``torch.autograd.backward`` is another function as long
    as something waits.

    Attributes
    ----------
    running
        Whether such a backward runs, of all gradients.
    """

    _waiting: ClassVar[list[NextBackward]] = []
    _usual: ClassVar[Callable[..., None]] = staticmethod(torch.autograd.backward)
    _is_watched: ClassVar[bool] = False
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, then: Callable[[], bool], failed: Callable[[], None]) -> None:
        self._then, self._failed = then, failed
        self._thread = 0
        self.running = False

    def await_it(self) -> None:
        """Wait for the next backward of this thread, if this does not already."""
        with self._lock:
            self.forget()
            self._thread = threading.get_ident()
            self._waiting.append(self)
            if not NextBackward._is_watched:
                NextBackward._usual, NextBackward._is_watched = torch.autograd.backward, True
                torch.autograd.backward = _backward

    def forget(self) -> None:
        """Wait no longer."""
        with self._lock:
            if self in self._waiting:
                self._waiting.remove(self)
            if not self._waiting and torch.autograd.backward is _backward:  # else somebody has wrapped ours
                torch.autograd.backward, NextBackward._is_watched = NextBackward._usual, False

    @classmethod
    def run(cls, *args: Any, **kwargs: Any) -> None:
        """A backward, and what waited for it in this thread."""
        usual, thread = cls._usual, threading.get_ident()
        waited = [each for each in cls._waiting if each._thread == thread]
        for each in waited:
            each.forget()
            each.running = kwargs.get("inputs") is None and len(args) <= _PLACE_OF_INPUTS
        try:
            usual(*args, **kwargs)
        except BaseException:
            for each in waited:
                each._failed()
            raise
        finally:
            for each in waited:
                each.running = False
        for each in waited:
            if not each._then():
                each.await_it()


_PLACE_OF_INPUTS = 5  # among the arguments of torch.autograd.backward


def _backward(*args: Any, **kwargs: Any) -> None:
    NextBackward.run(*args, **kwargs)
