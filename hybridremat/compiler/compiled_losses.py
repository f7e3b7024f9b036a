"""Losses by chunks of rows in a compiled step: an op that Inductor leaves as it is.

It runs the body of the loss op by op, chunk after chunk, as a step without a compiler does. The op names the
body by a hash of it, which is part of the generated code: a process that takes this code from a cache has
planned the same body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from hybridremat.graph.tracing.by_chunks import loss_by_chunks


@dataclass(frozen=True)
class _Loss:
    """A loss by chunks: its body, how its results are put together, rows of a chunk, and fakes of them."""

    body: fx.GraphModule
    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    results: tuple[Tensor, ...]


_LOSSES: Final[dict[str, _Loss]] = {}


def _run(rows: Sequence[Tensor], whole: Sequence[Tensor], loss: str) -> list[Tensor]:
    known = _LOSSES[loss]
    return list(loss_by_chunks(known.body, known.kinds, known.sizes, rows, whole))


def _fake(rows: Sequence[Tensor], _whole: Sequence[Tensor], loss: str) -> list[Tensor]:
    return [
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=rows[0].device)
        for each in _LOSSES[loss].results
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
    """Make the losses by chunks of an emitted graph, which has been checked, calls of the op."""
    for node in graph.graph.find_nodes(op="call_function", target=loss_by_chunks):
        body, kinds, sizes, rows, whole = node.args
        module = graph.get_submodule(body.target)
        assert isinstance(module, fx.GraphModule)
        results: Any = node.meta["val"]
        name = _key(module, kinds, sizes, results)
        _LOSSES[name] = _Loss(module, tuple(kinds), tuple(sizes), tuple(results))
        node.target, node.args = LOSS, (list(rows), list(whole), name)
        if not body.users:
            graph.graph.erase_node(body)
    graph.recompile()


def _key(body: fx.GraphModule, kinds: Any, sizes: Any, results: Sequence[Tensor]) -> str:
    shapes = [(tuple(each.shape), each.stride(), each.dtype) for each in results]
    text = repr((body.code, list(kinds), list(sizes), shapes))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
