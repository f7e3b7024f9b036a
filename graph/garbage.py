"""When Python's garbage collector may run, and what errors keep from it."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

SELDOM: Final = 50_000
"""New objects between two collections of the young ones, while a step is captured and planned: what is made
then mostly stays. Looking through all of it again and again takes a tenth of the time of a plain capture; a
Llama of 32 layers needs 18 MB more with this many."""


class _Threshold:
    """The collector's threshold while some threads plan: changed by the first, set back by the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0
        self._before = self._meanwhile = (0, 0, 0)

    def enter(self) -> None:
        with self._lock:
            self._within += 1
            if self._within == 1:
                self._before = self._meanwhile = gc.get_threshold()
                if self._before[0]:
                    self._meanwhile = (max(self._before[0], SELDOM), *self._before[1:])
                    gc.set_threshold(*self._meanwhile)

    def leave(self) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0 and gc.get_threshold() == self._meanwhile:  # nobody else has set one
                gc.set_threshold(*self._before)


_THRESHOLD: Final = _Threshold()


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Collect garbage less often; if the collector is off, it stays so."""
    _THRESHOLD.enter()
    try:
        yield
    finally:
        _THRESHOLD.leave()


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect garbage now and not meanwhile: a collection would free what a step without it holds."""
    gc.collect()
    with collector_off():
        yield


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch Python's garbage collector off, for code that makes many objects and few cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def noting_freed(count: Callable[[], int]) -> Iterator[list[int]]:
    """Note how many of some things each collection frees meanwhile; ``count``: those that are there."""
    before, freed = [0], list[int]()

    def note(phase: str, _: object) -> None:
        if phase == "start":
            before[0] = count()
        elif gone := before[0] - count():
            freed.append(gone)

    gc.callbacks.append(note)
    try:
        yield freed
    finally:
        gc.callbacks.remove(note)


def free_frames(error: BaseException, *, until: BaseException | None) -> None:
    """Let go of what the calls that an error has ended held, as it may be kept: of those before it, too.

    A variable of theirs may hold the error as well, and then only a collection would free them.
    ``until``: the error that was being handled when those calls began, if any; it is not ours, and a
    debugger may look at it.
    """
    each: BaseException | None = error
    while each is not None and each is not until:
        traceback.clear_frames(each.__traceback__)
        each = each.__context__
