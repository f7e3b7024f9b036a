"""What kernels of an EmbeddingBag are told of its bags: none is empty, and they share the indices evenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import fx

from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.tracing.fx_nodes import argument
from hybridremat.graph.tracing.signature import fake_value

Filled = Callable[[torch.Tensor], torch.Tensor]
_KERNELS: Final = "_embedding_bag"


def bag_inputs(node: fx.Node) -> dict[fx.Node, Filled]:
    """How to fill the inputs of such a kernel that describe bags; nothing for other kernels."""
    if not isinstance(node.target, OpOverload) or _KERNELS not in node.target._schema.name:
        return {}
    indices, bags = _rows(node, "indices"), _bags(node)
    if not indices or not bags:
        return {}

    def starts(offsets: torch.Tensor) -> torch.Tensor:
        return offsets.copy_(_counted(offsets).mul_(indices).div_(bags, rounding_mode="floor"))

    def bag_of(places: torch.Tensor) -> torch.Tensor:
        return places.copy_(_counted(places).mul_(bags).div_(indices, rounding_mode="floor"))

    known: dict[str, Filled] = {
        "offsets": starts,
        "offset2bag": bag_of,
        "bag_size": lambda sizes: sizes.fill_(max(1, indices // bags)),
    }
    found = ((argument(node, name), fill) for name, fill in known.items())
    return {source: fill for source, fill in found if isinstance(source, fx.Node)}


def _counted(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.numel(), dtype=torch.int64, device=like.device)


def _bags(node: fx.Node) -> int:
    """How many bags there are; there may be one offset more."""
    rows = _rows(node, "grad")
    return rows if rows else _rows(node, "offsets") - bool(argument(node, "include_last_offset"))


def _rows(node: fx.Node, name: str) -> int:
    source = argument(node, name)
    value = fake_value(source) if isinstance(source, fx.Node) else None
    return int(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else 0
