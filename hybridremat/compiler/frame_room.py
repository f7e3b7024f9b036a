"""Room for Python's frames, so that calls at some depth are not slower than at others.

CPython keeps the frames of a thread in chunks of 16 KB. Where a function's frame ends a chunk, every call
that it makes maps memory for another one, touches it and gives it back: some microseconds each. It is a
matter of luck which loop stands at such an end: solving the blocks of ResNet-50 took 2.2 s there, with
128,000 page faults, for 1.0 s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Final, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

_WORDS: Final = 1 << 16
"""Of the frame that takes a chunk for itself: 512 KiB of address space, which nobody touches. The chunk is a
power of two that is larger, so as much is left to the frames that follow."""


def with_room(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with the frames of all that it calls in one chunk."""
    own = cast(FunctionType, function)
    code = own.__code__.replace(co_stacksize=_WORDS)
    roomy = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    roomy.__kwdefaults__ = own.__kwdefaults__
    return cast(Callable[P, T], update_wrapper(roomy, own))
