"""The distinct kernels among the ops of a joint graph, and real inputs for them.

Two ops are the same kernel if target, scalar arguments, and shapes, strides and dtypes of their
tensors are equal. A model has some tens of distinct kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from hybridremat.graph.costs.random_numbers import repeated
from hybridremat.graph.private_torch import _neg_view
from hybridremat.graph.tracing.flops import group_ends, grouped_rows
from hybridremat.graph.tracing.fx_nodes import has_effects, tensors
from hybridremat.graph.tracing.signature import fake_value, kernel_signature
from hybridremat.graph.tracing.trace import TracedStep


def _real(value: Any) -> Any:
    """A real tensor like the fake one: any numbers that every kernel accepts."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is torch.sparse_coo:
        indices, values = map(_real, tensors(value))
        return torch.sparse_coo_tensor(
            indices, values, value.shape, is_coalesced=value.is_coalesced(), check_invariants=False
        )
    extent = int(value.untyped_storage().nbytes()) // value.element_size()
    if value.dtype.is_floating_point:
        drawn = partial(torch.rand, dtype=torch.float32, device=value.device)
        base = repeated(extent, lambda count: drawn(count).to(value.dtype))
    elif value.dtype == torch.bool:
        base = torch.ones(extent, dtype=torch.bool, device=value.device)
    else:
        base = torch.zeros(extent, dtype=value.dtype, device=value.device)
    real = torch.as_strided(base, value.shape, value.stride(), int(value.storage_offset()))
    # kernels that cannot read a conjugated or negated view make a copy first
    real = real.conj() if value.is_conj() else real
    return _neg_view(real) if value.is_neg() else real


@dataclass(frozen=True)
class Kernels:
    """Distinct kernels of a traced step: ``key_of[op]`` is a signature, ``node_of[key]`` one node."""

    key_of: tuple[str, ...]
    node_of: dict[str, fx.Node]
    device: str


def distinct_kernels(step: TracedStep) -> Kernels:
    """Group the ops of a step by kernel.

    In-place updates are left out, since they only touch residents, and ops with effects: they run in the
    step alone, never to be measured. So are kernels that a compiler generates.
    """
    fused = step.fused_ops
    keys = tuple(
        "" if op.mutates or op.id in fused or has_effects(node) else kernel_signature(node)
        for op, node in zip(step.graph.ops, step.op_nodes, strict=True)
    )
    nodes: dict[str, fx.Node] = {}
    for key, node in zip(keys, step.op_nodes, strict=True):
        if key:
            nodes.setdefault(key, node)
    devices = {t.device.type for n in step.op_nodes for t in tensors(n.meta.get("val"))}
    return Kernels(keys, nodes, next(iter(sorted(devices - {"cpu"})), "cpu"))


def prepared(node: fx.Node, layouts: Sequence[tuple[Sequence[int], Sequence[int]]] = ()) -> partial[object]:
    """Make real inputs; the result calls the node's kernel on them.

    ``layouts``: size and strides of tensor inputs that are laid out in another way than they were traced, in
    the order of the arguments; an input that none of them fits is made as it was traced.
    """
    assert callable(node.target)
    ends = group_ends(node)
    left = [(tuple(size), tuple(strides)) for size, strides in layouts]

    def made(source: fx.Node) -> Any:
        value = fake_value(source)
        if isinstance(value, torch.Tensor):
            fitting = [layout for layout in left if layout[0] == tuple(value.shape)]
            if fitting:
                left.remove(fitting[0])
                value = value.new_empty_strided(*fitting[0])
        real = _real(value)
        return real.fill_(grouped_rows(node)) if source is ends else real

    args: Any = fx.map_arg(node.args, made)
    kwargs: Any = fx.map_arg(node.kwargs, made)
    return partial(node.target, *args, **kwargs)
