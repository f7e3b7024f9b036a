"""How many places the mask of a masked scatter may name: no more than there are elements to be put there."""

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


def scatter_mask(node: fx.Node) -> object:
    """The mask that a kernel scatters by; None for other kernels."""
    return argument(node, "mask") if _elements(node) is not None else None


def with_as_many_places(mask: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """The mask with as many truths as the kernel takes: what it allocates grows with them."""
    elements = _elements(node)
    held = mask.untyped_storage().nbytes()
    if elements is None or not held:
        return mask
    # a mask that is broadcast names each of its places several times
    places = elements * held // max(1, mask.numel(), _numel(node.args[0]))
    torch.as_strided(mask, (held,), (1,), 0)[places:] = False
    return mask


def _elements(node: fx.Node) -> int | None:
    """How many elements a kernel scatters; None for other kernels."""
    if not isinstance(node.target, OpOverload):
        return None
    name = _ELEMENTS.get(node.target._schema.name.removeprefix("aten::"))
    if name is None:
        return None
    value = argument(node, name)
    return _numel(value)


def _numel(value: Any) -> int:
    """Elements of a tensor in a graph, or of one of such sizes."""
    return math.prod(value.meta["val"].shape if isinstance(value, fx.Node) else value)
