"""Room for Python's frames, so that calls at some depth are not slower than at others.

CPython keeps the frames of a thread in chunks of 16 KB. Where a function's frame ends a chunk, every call
that it makes maps memory for another one, touches it and gives it back: some microseconds each. A step is
captured and planned below some fifty frames of Dynamo and AOTAutograd, and it is a matter of luck which
loop stands at such an end: solving the blocks of ResNet-50 took 2.2 s there, with 128,000 page faults, for
1.0 s.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, TypeVar

T = TypeVar("T")

_WORDS: Final = 1 << 16
"""Of the frame that takes a chunk for itself: 512 KiB of address space, which nobody touches. The chunk is a
power of two that is larger, so as much is left to the frames that follow."""


def _called(call: Callable[[], Any]) -> Any:
    return call()


_with_room: Callable[[Callable[[], Any]], Any] = FunctionType(
    _called.__code__.replace(co_stacksize=_WORDS), globals(), "with_room"
)


def with_room(call: Callable[[], T]) -> T:
    """The call's result; the frames below it stand in one chunk."""
    result: T = _with_room(call)
    return result
