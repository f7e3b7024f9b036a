"""When Dynamo may forget what it compiled for a step that is gone: not while it looks code up, or compiles.

A step is gone when Python frees it, which a garbage collection does anywhere, also while guards run. What
Dynamo compiled of a model's own functions is in lists that models of a class share; to take entries out of
such a list while Dynamo walks it crashes the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from hybridremat.graph.private_dynamo import compile_lock


class _Forgetting:
    """Counts the planned calls that run; what is to be forgotten meanwhile waits for the last of them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection, and so a call of soon(), may come while it is held
        self._running = 0
        self._waiting: list[Callable[[], object]] = []

    def soon(self, forget: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.append(forget)
        self._forget_what_waits()

    def enter(self) -> None:
        with self._lock:
            self._running += 1

    def leave(self) -> None:
        with self._lock:
            self._running -= 1
        self._forget_what_waits()

    def _forget_what_waits(self) -> None:
        """Call what waits, unless a planned call runs or another thread compiles: the next call does then.

        It does not wait for Dynamo's lock: a collection may have come to a thread that holds any other.
        """
        if not self._waiting or not compile_lock.acquire(blocking=False):
            return
        try:
            with self._lock:
                while self._waiting and not self._running:
                    self._waiting.pop()()
        finally:
            compile_lock.release()


_FORGETTING: Final = _Forgetting()


def forget_soon(forget: Callable[[], object]) -> None:
    """Call a function at once, or as soon as no planned call runs and no other thread compiles."""
    _FORGETTING.soon(forget)


@contextmanager
def nothing_forgotten() -> Iterator[None]:
    """Around calls of compiled code."""
    _FORGETTING.enter()
    try:
        yield
    finally:
        _FORGETTING.leave()
