"""Run a forward for a device that is not here: nothing is computed, and all memory is allocated.

What ops return lies in memory that nobody touches (:mod:`hybridremat.compiler.unread_memory`), of the shapes
and strides that PyTorch's fake tensors have, in sizes of that device's allocator. So it takes address space
alone, and what is recorded of it is what the ops return; what kernels take while they run is not in it. Code
that asks for a value is refused: there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from hybridremat.compiler.unread_memory import untouched
from hybridremat.errors import CaptureError
from hybridremat.graph.private_torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    _disable_current_modes,
    tree_leaves,
    tree_map,
)

Rounded = Callable[[int], int]
"""Bytes that an allocator takes for so many."""


class UnreadRun(TorchDispatchMode):
    """Where ops return memory that nobody touches."""

    def __init__(self, rounded: Rounded) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded = rounded

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo captures what runs here."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:  # it reads no values
            return func(*args, **kwargs)
        return unread_results(func, args, kwargs, self.rounded)


def no_modes() -> AbstractContextManager[None]:
    """Where ops run as ever."""
    found: AbstractContextManager[None] = _disable_current_modes()
    return found


def unread_results(call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], rounded: Rounded) -> Any:
    """What a call would return, in memory that nobody touches; it does not run.

    Results in the memory of an argument, or of one another, are so here.

    Raises
    ------
    CaptureError
        If the call needs values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    fakes = {id(each): mode.from_tensor(each.detach()) for each in given}
    memory = {fakes[id(each)].untyped_storage()._cdata: each.untyped_storage() for each in given}
    known = {id(fakes[id(each)]): each for each in given}
    fake_args, fake_kwargs = tree_map(lambda each: fakes.get(id(each), each), (args, dict(kwargs)))
    try:
        with mode, torch.no_grad():
            made = call(*fake_args, **fake_kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"the forward asks for a value ({error.func}), and for a device that is not here nothing runs, "
            "so that there is none. Leave that out, or plan on that device."
        ) from error

    def real(result: Any) -> Any:
        if id(result) in known or not isinstance(result, torch.Tensor):
            return known.get(id(result), result)
        storage = result.untyped_storage()
        if storage._cdata not in memory:
            size = rounded(storage.nbytes())
            memory[storage._cdata] = torch.empty(size, dtype=torch.uint8).untyped_storage()
        empty = torch.empty(0, dtype=result.dtype)
        own = memory[storage._cdata]
        return empty.set_(own, result.storage_offset(), result.shape, result.stride())

    with untouched(), torch.no_grad():
        return tree_map(real, made)
