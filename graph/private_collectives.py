"""What PyTorch keeps between a collective and its use: late results, and masks of lookups in rows."""

from __future__ import annotations

import gc
import sys
from typing import Any, Final, TypeVar

import torch

from hybridremat.graph.private_torch import tree_leaves, tree_map

T = TypeVar("T")

_MODULE: Final = "torch.distributed._functional_collectives"
_MASK: Final = "MaskBuffer"


class _Arrived(torch.autograd.Function):
    """The tensor of a collective once it is there; its gradient is the collective's."""

    @staticmethod
    def forward(_: Any, pending: Any) -> torch.Tensor:
        tensor: torch.Tensor = pending.trigger_wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient


def arrived(inputs: T) -> T:
    """Inputs of a module with what collectives make (``AsyncCollectiveTensor``) waited for.

    A compiled graph that is given a tensor that still arrives hands its gradient past the autograd of
    ``DTensor``, by which the backward fails. Containers stay the same, unless there is one in them.
    """
    known = sys.modules.get(_MODULE)
    if known is None:
        return inputs
    kind = known.AsyncCollectiveTensor
    if not any(isinstance(item, kind) for item in tree_leaves(inputs)):
        return inputs

    def waited(item: Any) -> Any:
        return _Arrived.apply(item) if isinstance(item, kind) else item  # type: ignore[no-untyped-call]

    found: T = tree_map(waited, inputs)
    return found


def empty_masks() -> bool:
    """Empty the buffers of all lookups in rows, which caches of placements keep; whether one was full."""
    full = [each for each in gc.get_objects() if type(each).__name__ == _MASK and each.data is not None]
    for buffer in full:
        buffer.data, buffer.refcount = None, 0
    return bool(full)
