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
    ``DTensor``, by which the backward fails. Containers without one stay the same objects, and a tensor that
    is given twice stays one.
    """
    known = sys.modules.get(_MODULE)
    if known is None:
        return inputs
    kind = known.AsyncCollectiveTensor
    late = {id(item): item for item in tree_leaves(inputs) if isinstance(item, kind)}
    if not late:
        return inputs
    there = {key: _Arrived.apply(item) for key, item in late.items()}  # type: ignore[no-untyped-call]

    def has_none(item: Any) -> bool:
        return not any(id(leaf) in late for leaf in tree_leaves(item))

    found: T = tree_map(lambda item: there.get(id(item), item), inputs, is_leaf=has_none)
    return found


def empty_masks() -> list[torch.Tensor]:
    """Empty the buffers of lookups in rows, which no lookup after an error can use; what was in them.

    Placements keep these buffers, and PyTorch's caches keep the placements. Those that ``gc.freeze`` has
    taken out of the collector's sight are not found.
    """
    full = [each for each in gc.get_objects() if _is_mask(type(each)) and each.data is not None]
    masks = [buffer.data for buffer in full]
    for buffer in full:
        buffer.data, buffer.refcount = None, 0
    return masks


def _is_mask(kind: type) -> bool:
    return kind.__name__ == _MASK and kind.__module__.startswith("torch.distributed.")
