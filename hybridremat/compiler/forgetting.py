"""What Dynamo is given to keep, and when it may forget it: not while it looks code up, or compiles.

Dynamo keeps backends, and what they return, where Python's garbage collector does not look (entries of code
objects), and as globals of code with graph breaks, which it does not take away. If these held the step, and
so its model, neither would ever be freed. So it is given what holds them weakly.

A step is gone when Python frees it, which a garbage collection does anywhere, also while guards run. What
Dynamo compiled of a model's own functions is in lists that models of a class share; to take entries out of
such a list while Dynamo walks it crashes the process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any, Final, Protocol

from hybridremat.graph.private_dynamo import compile_lock, compiled_by, forget_code_of, reset_code


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


class Captures(Protocol):
    """What captures graphs of a step (:class:`~hybridremat.compiler.backend.Backend`)."""

    codes: set[CodeType]
    for_dynamo: DynamoBackend
    runs: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]]

    def __call__(self, module: Any, example_inputs: Any, **_: object) -> Callable[..., Any]:
        """Capture one of Dynamo's graphs; what runs it."""
        ...


class DynamoBackend:
    """What Dynamo may keep in place of a backend, which is held by who runs the step."""

    def __init__(self, backend: Captures) -> None:
        self._backend = weakref.ref(backend)

    def __call__(self, module: Any, example_inputs: Any, **how: object) -> Callable[..., Any]:
        """Capture one of Dynamo's graphs; what runs it as long as the backend is there."""
        backend = self._backend()
        assert backend is not None, "a step is there while its code is compiled"
        run = backend(module, example_inputs, **how)
        call = _weakly(run)
        backend.runs[call] = run
        return call


def compiled_for(backend: Captures, call: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """``torch.compile`` of a call. Once that is gone, Dynamo forgets it, and all that it compiled within.

    Compiled code and the code object refer to each other, and would never be freed.
    """
    forget = partial(forget_code_of, backend.for_dynamo, backend.codes)
    for each in (partial(reset_code, call.__code__), forget):
        weakref.finalize(call, forget_soon, each).atexit = False
    return compiled_by(backend.for_dynamo, call, **how)


def _weakly(run: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.ref(run)

    def call(*args: object) -> Any:
        found = reference()
        assert found is not None, "a step is there while its code runs"
        return found(*args)

    return call
