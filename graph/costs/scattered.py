"""How many places a mask may name: as many as there are elements that a kernel puts there."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.tracing.fx_nodes import argument

_ELEMENTS: Final = {
    "masked_scatter": "source",
    "masked_scatter_": "source",
    "masked_scatter_backward": "sizes",
}
_ROWS_BY_MASK: Final = ("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl", "_index_put_impl_")


def scatter_mask(node: fx.Node) -> object:
    """The mask that a kernel scatters by; None for other kernels."""
    if _elements(node) is not None:
        return argument(node, "mask")
    return _mask_of_rows(node) if _rows(node) is not None else None


def with_as_many_places(mask: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """The mask with as many truths as the kernel takes: what it allocates grows with them."""
    rows, elements = _rows(node), _elements(node)
    if rows is not None:
        return mask.copy_(torch.arange(mask.numel(), device=mask.device).view(mask.shape) < rows)
    held = mask.untyped_storage().nbytes()
    if elements is not None and held:  # a mask that is broadcast names each of its places several times
        places = elements * held // max(1, mask.numel(), _numel(node.args[0]))
        torch.as_strided(mask, (held,), (1,), 0)[places:] = False
    return mask


def _elements(node: fx.Node) -> int | None:
    """How many elements a kernel scatters; None for other kernels."""
    name = _ELEMENTS.get(_name(node))
    return None if name is None else _numel(argument(node, name))


def _rows(node: fx.Node) -> int | None:
    """How many rows ``index_put`` puts where a mask says; None where that is free, and for other kernels."""
    mask = _mask_of_rows(node)
    if mask is None:
        return None
    indices: Any = argument(node, "indices")
    put, whole, values = map(_shape, (mask, argument(node, "self"), argument(node, "values")))
    behind = len(whole) - indices.index(mask) - len(put)
    rows = int(values[-1 - behind]) if len(values) > behind else 1
    return None if rows == 1 else rows


def _mask_of_rows(node: fx.Node) -> fx.Node | None:
    """The mask that ``index_put`` is given, if it is alone."""
    if _name(node) not in _ROWS_BY_MASK:
        return None
    indices: Any = argument(node, "indices")
    given = [each for each in indices if each is not None]
    if len(given) != 1:
        return None
    mask: torch.Tensor = given[0].meta["val"]
    overlaps = any(size > 1 and not step for size, step in zip(mask.shape, mask.stride(), strict=True))
    return given[0] if mask.dtype in (torch.bool, torch.uint8) and not overlaps else None


def _name(node: fx.Node) -> str:
    return node.target._schema.name.removeprefix("aten::") if isinstance(node.target, OpOverload) else ""


def _numel(value: Any) -> int:
    """Elements of a tensor in a graph, or of one of such sizes."""
    return math.prod(_shape(value) if isinstance(value, fx.Node) else value)


def _shape(source: Any) -> torch.Size:
    shape: torch.Size = source.meta["val"].shape
    return shape
