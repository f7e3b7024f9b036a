"""Which inputs of a kernel are indices, and how many places they can name; and which it compares.

On CUDA an index out of range ends the process's work on the device for good, and on a CPU the gradient of a
pooling writes past its memory, so that numbers which are made up for a trial have to be in range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.tracing.fx_nodes import argument
from hybridremat.graph.tracing.signature import fake_value

_Size = Callable[[fx.Node], int]


def _size(name: str, dim: int | str) -> _Size:
    """The size of an argument in a dimension, which may be an argument itself."""

    def size(node: fx.Node) -> int:
        shape = _shape(argument(node, name))
        place = argument(node, dim) if isinstance(dim, str) else dim
        return shape[place] if shape else 1

    return size


def _number(name: str) -> _Size:
    return lambda node: int(argument(node, name))


def _classes(node: fx.Node) -> int:
    """The classes of a loss: scores are (classes,) or (samples, classes, …)."""
    shape = _shape(argument(node, "self"))
    return shape[0] if len(shape) == 1 else shape[1]


def _shape(source: Any) -> tuple[int, ...]:
    value = fake_value(source) if isinstance(source, fx.Node) else None
    return tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else ()


def _plane(name: str, dims: int) -> _Size:
    """The elements of the last dimensions of an argument; with 0 of all."""
    return lambda node: math.prod(_shape(argument(node, name))[-dims:])


def _unpooled(node: fx.Node) -> int:
    return math.prod(map(int, argument(node, "output_size")))


_ROWS, _ALONG, _FLAT = _size("weight", 0), _size("self", "dim"), _plane("self", 0)
_PLACES: Final[dict[str, dict[str, _Size]]] = {
    "embedding": {"indices": _ROWS},
    "embedding_dense_backward": {"indices": _number("num_weights")},
    "_embedding_bag": {"indices": _ROWS},
    "_embedding_bag_forward_only": {"indices": _ROWS},
    "_embedding_bag_backward": {"indices": _number("num_weights")},
    "_embedding_bag_dense_backward": {"indices": _number("num_weights")},
    "_embedding_bag_per_sample_weights_backward": {"indices": _ROWS},
    "take": {"index": _FLAT},
    "put": {"index": _FLAT},
    "gather": {"index": _ALONG},
    "gather_backward": {"index": _ALONG},
    "scatter": {"index": _ALONG},
    "scatter_add": {"index": _ALONG},
    "scatter_reduce": {"index": _ALONG},
    "index_select": {"index": _ALONG},
    "index_add": {"index": _ALONG},
    "index_copy": {"index": _ALONG},
    "index_fill": {"index": _ALONG},
    "index_reduce": {"index": _ALONG},
    "nll_loss_forward": {"target": _classes},
    "nll_loss_backward": {"target": _classes},
    "nll_loss2d_forward": {"target": _classes},
    "nll_loss2d_backward": {"target": _classes},
    "hybridremat::nll_log_softmax_backward": {"target": _size("log_probabilities", 1)},
    "multi_margin_loss": {"target": _classes},
    "multi_margin_loss_backward": {"target": _classes},
    "isin": {"elements": _plane("elements", 0), "test_elements": _plane("test_elements", 0)},
    "max_unpool2d": {"indices": _unpooled},
    "max_unpool3d": {"indices": _unpooled},
    **{
        f"{pooling}_backward": {"indices": _plane("self", dims)}
        for dims in (2, 3)
        for pooling in (f"adaptive_max_pool{dims}d", f"fractional_max_pool{dims}d")
    },
    "max_pool2d_with_indices_backward": {"indices": _plane("self", 2)},
    "max_pool3d_with_indices_backward": {"indices": _plane("self", 3)},
}
"""By the name of the op, which of its arguments are indices, or compared: then as many as there are."""

_BY_DIMENSION: Final = (
    *("index", "index_put", "_unsafe_index", "_unsafe_index_put"),
    *("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"),
)


def index_ranges(node: fx.Node) -> dict[fx.Node, int]:
    """Each input of a kernel that it takes for indices: they are from 0 up to, and without, this number."""
    if not isinstance(node.target, OpOverload):
        return {}
    name = node.target._schema.name.removeprefix("aten::")
    if name in _BY_DIMENSION:
        return _by_dimension(node)
    found = ((argument(node, given), size) for given, size in _PLACES.get(name, {}).items())
    return {source: size(node) for source, size in found if isinstance(source, fx.Node)}


def _by_dimension(node: fx.Node) -> dict[fx.Node, int]:
    """Indices that are given for the dimensions one by one; one that is given twice fits the smaller one."""
    found: dict[fx.Node, int] = {}
    for source, size in zip(argument(node, "indices"), _shape(argument(node, "self")), strict=False):
        if isinstance(source, fx.Node):
            found[source] = min(size, found.get(source, size))
    return found
