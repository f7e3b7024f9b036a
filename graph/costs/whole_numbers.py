"""What kernels are told by whole numbers, where zeros do not do.

Divisors are ones. Of an EmbeddingBag no bag is empty, and they share the indices evenly, as elements that are
repeated share the places of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import fx

from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.tracing.fx_nodes import argument
from hybridremat.graph.tracing.signature import fake_value

Filled = Callable[[torch.Tensor], torch.Tensor]
_BAGS: Final = "_embedding_bag"
_DIVISIONS: Final = ("remainder", "fmod", "floor_divide", "div")


def whole_inputs(node: fx.Node) -> dict[fx.Node, Filled]:
    """How to fill such inputs of a kernel; nothing for most kernels."""
    name = node.target._schema.name.removeprefix("aten::") if isinstance(node.target, OpOverload) else ""
    filled: dict[str, Filled] = {}
    if _BAGS in name:
        filled = _of_bags(node)
    elif name in _DIVISIONS:
        filled = {"other": _as_divisors}
    elif name == "repeat_interleave":
        filled = {"repeats": partial(_shares, argument(node, "output_size"))}
    found = ((argument(node, each), fill) for each, fill in filled.items())
    return {source: fill for source, fill in found if isinstance(source, fx.Node)}


def _as_divisors(numbers: torch.Tensor) -> torch.Tensor:
    return numbers if numbers.is_floating_point() else torch.ones_like(numbers)


def _shares(places: object, repeats: torch.Tensor) -> torch.Tensor:
    """So many repeats that they fill the result."""
    if not isinstance(places, int) or not repeats.numel():
        return repeats
    ends = torch.arange(repeats.numel() + 1, device=repeats.device) * places // repeats.numel()
    return repeats.copy_(ends.diff())


def _of_bags(node: fx.Node) -> dict[str, Filled]:
    indices, bags = _rows(node, "indices"), _bags(node)
    if not indices or not bags:
        return {}

    def starts(offsets: torch.Tensor) -> torch.Tensor:
        return offsets.copy_(_counted(offsets).mul_(indices).div_(bags, rounding_mode="floor"))

    def bag_of(places: torch.Tensor) -> torch.Tensor:
        return places.copy_(_counted(places).mul_(bags).div_(indices, rounding_mode="floor"))

    return {
        "offsets": starts,
        "offset2bag": bag_of,
        "bag_size": lambda sizes: sizes.fill_(max(1, indices // bags)),
    }


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
