"""Losses by chunks of rows in a compiled step: an op that Inductor leaves as it is.

It runs the body of the loss op by op, chunk after chunk, as a step without a compiler does. The op names the
body by a hash of it, which is part of the generated code: a process that takes this code from a cache has
planned the same body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from hybridremat.graph.private_inductor import decompose
from hybridremat.graph.rewrites.by_chunks import loss_by_chunks
from hybridremat.graph.rewrites.row_rules import LOSSES


@dataclass(frozen=True)
class _Loss:
    """A loss by chunks: its body, how its results are put together, rows of a chunk, and their layouts.

    Generated code that names it may be kept anywhere, so it is for good, and holds nothing of its step.
    """

    body: fx.GraphModule
    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    results: tuple[_Layout, ...]


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a result."""

_LOSSES: Final[dict[str, _Loss]] = {}


def _run(rows: Sequence[Tensor], whole: Sequence[Tensor], loss: str) -> list[Tensor]:
    known = _LOSSES[loss]
    return list(loss_by_chunks(known.body, known.kinds, known.sizes, rows, whole))


def _fake(rows: Sequence[Tensor], _whole: Sequence[Tensor], loss: str) -> list[Tensor]:
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device=rows[0].device)
        for shape, strides, dtype in _LOSSES[loss].results
    ]


_LIBRARY: Final = torch.library.Library("hybridremat", "FRAGMENT")
_LIBRARY.define(
    "loss_by_chunks(Tensor[] rows, Tensor[] whole, str loss) -> Tensor[]",
    tags=[torch.Tag.needs_fixed_stride_order],
)
_LIBRARY.impl("loss_by_chunks", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("loss_by_chunks", _fake, "Meta")

LOSS: Final = torch.ops.hybridremat.loss_by_chunks.default


def as_ops(graph: fx.GraphModule) -> None:
    """Make the losses by chunks of an emitted graph, which has been checked, calls of the op.

    What was written beside them is put as Inductor knows it, and losses that are left are decomposed.
    """
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _KNOWN:
            node.target, node.args, node.kwargs = _KNOWN[node.target](*node.args, **node.kwargs)
        elif node.target in LOSSES:
            decompose(node)
    for node in graph.graph.find_nodes(op="call_function", target=loss_by_chunks):
        body, kinds, sizes, rows, whole = node.args
        module = graph.get_submodule(body.target)
        assert isinstance(module, fx.GraphModule)
        results = tuple((tuple(each.shape), each.stride(), each.dtype) for each in node.meta["val"])
        name = _key(module, kinds, sizes, results)
        _LOSSES[name] = _Loss(_bare(module), tuple(kinds), tuple(sizes), results)
        node.target, node.args = LOSS, (list(rows), list(whole), name)
        if not body.users:
            graph.graph.erase_node(body)
    graph.recompile()


_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _converted(given: fx.Node, *, dtype: torch.dtype) -> _Call:
    return torch.ops.prims.convert_element_type.default, (given, dtype), {}


def _filled(size: list[int], **how: Any) -> _Call:
    return _ATEN.full.default, (size, 1), how


def _indexed(given: fx.Node, dim: int, places: fx.Node) -> _Call:
    return _ATEN.index.Tensor, (given, [*[None] * dim, places]), {}


def _padded(given: fx.Node, size: list[int], dim: int, start: int, end: int, _: int) -> _Call:
    first, last, _ = slice(start, end).indices(size[dim])
    after = [0, 0] * (len(size) - 1 - dim % len(size))
    return _ATEN.constant_pad_nd.default, (given, [*after, first, size[dim] - last], 0), {}


_ATEN: Final = torch.ops.aten
_KNOWN: Final[dict[object, Callable[..., _Call]]] = {
    _ATEN._to_copy.default: _converted,
    _ATEN.ones.default: _filled,
    _ATEN.index_select.default: _indexed,
    _ATEN.slice_backward.default: _padded,
}
"""Ops that Inductor does without, and the same call of one that it has."""


def _bare(body: fx.GraphModule) -> fx.GraphModule:
    """The body without what was traced of it."""
    copied = fx.GraphModule(body, deepcopy(body.graph))
    for node in copied.graph.nodes:
        node.meta = {}
    return copied


def _key(body: fx.GraphModule, kinds: Any, sizes: Any, results: Sequence[_Layout]) -> str:
    text = repr((body.code, list(kinds), list(sizes), list(results)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
