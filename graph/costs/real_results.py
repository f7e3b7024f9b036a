"""What kernels return on this device, where their traced results say otherwise.

PyTorch's fake kernels are not always right: below autocast the statistics of BatchNorm are traced as
bfloat16 and come as float32, the sparse gradient of an EmbeddingBag is traced without elements, and the seeds
of some attention kernels on CUDA come on the CPU. What reads such a result has to be tried on what comes, and
has other results itself: each kernel is tried in the order of the graph, and the results that differ from
the traced ones go on from there (:data:`~hybridremat.graph.tracing.signature.REAL_VALUE`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.private_torch import HigherOrderOperator, detect_fake_mode
from hybridremat.graph.tracing.fx_nodes import has_effects, is_mutation
from hybridremat.graph.tracing.signature import REAL_VALUE, fake_value, kernel_signature
from hybridremat.graph.tracing.trace import TracedStep

logger = logging.getLogger(__name__)

Described = list[Any]
"""A result as plain JSON types: one entry for each of its items."""


def kernels_in_order(step: TracedStep, store: KernelStore) -> Iterator[tuple[fx.Node, str]]:
    """Every op that can be tried, with its kernel's signature; to be tried before the next one is asked for.

    Meanwhile results that are not as traced, by what the store knows then, are noted at their nodes.
    """
    changed: set[fx.Node] = set()
    alone = {node for op, node in enumerate(step.op_nodes) if not _is_left_out(step, op)}
    for node in step.module.graph.nodes:
        if not changed.isdisjoint(node.all_input_nodes) and _follows(node) and _note(node, _rerun(node)):
            changed.add(node)
        if node in alone:
            key = kernel_signature(node)
            yield node, key
            result = store.results.get(key)
            if result is not None and _note(node, _fake_results(result, fake_value(node))):
                changed.add(node)


def _is_left_out(step: TracedStep, op: int) -> bool:
    """Whether nothing is tried: updates in place, ops with effects, kernels that a compiler generates."""
    return step.graph.ops[op].mutates or op in step.fused_ops or has_effects(step.op_nodes[op])


def differs(traced: object, result: object) -> Described | None:
    """What a kernel returned, described, if it is not laid out as traced; else None."""
    found = described(result)
    return None if found == described(traced) else found


def described(result: object) -> Described:
    """Types, shapes, strides and devices of a result; None for what is no tensor."""
    return [_described(item) for item in (result if isinstance(result, (list, tuple)) else [result])]


def _described(item: object) -> Any:
    if not isinstance(item, torch.Tensor):
        return None
    if item.layout is torch.sparse_coo:
        parts = [_described(item._indices()), _described(item._values())]
        return ["sparse_coo", list(map(int, item.shape)), *parts, item.is_coalesced()]
    if item.layout is not torch.strided:
        return str(item.layout)
    strides = [int(step) if item.numel() else 0 for step in item.stride()]
    dtype = str(item.dtype).removeprefix("torch.")
    return [dtype, list(map(int, item.shape)), strides, int(item.storage_offset()), item.device.type]


def _note(node: fx.Node, value: object) -> bool:
    """Note what a node's result is; whether that is news to its users, who are to be run again."""
    if value is None:
        return False
    if described(value) != described(fake_value(node)):
        node.meta[REAL_VALUE] = value
    return described(value) != described(node.meta.get("val"))


def _follows(node: fx.Node) -> bool:
    """Whether a node's result can be found out from its inputs."""
    return (
        node.op == "call_function"
        and not is_mutation(node)
        and not isinstance(node.target, HigherOrderOperator)
    )


def _rerun(node: fx.Node) -> object:
    """The fake result on what the node's inputs really are; None if PyTorch has none."""

    def given(source: fx.Node) -> Any:
        return fake_value(source)

    args: Any = fx.map_arg(node.args, given)
    kwargs: Any = fx.map_arg(node.kwargs, given)
    mode = detect_fake_mode((args, kwargs))
    assert callable(node.target)
    if mode is None:
        return None
    try:
        with mode:
            result: object = node.target(*args, **kwargs)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        logger.info("%s stays as traced: %s", node, error)
        return None
    return result


def _fake_results(result: Described, traced: object) -> object:
    """Fake tensors of a described result; items that are as traced stay what they are."""
    items = traced if isinstance(traced, (list, tuple)) else [traced]
    if len(items) != len(result):
        return None
    mode = detect_fake_mode(tuple(items))
    if mode is None:
        return None
    with mode:
        made = [
            item if _described(item) == each else _fake(each, item)
            for each, item in zip(result, items, strict=True)
        ]
    return tuple(made) if isinstance(traced, (list, tuple)) else made[0]


def _fake(each: Any, traced: Any) -> Any:
    if not isinstance(each, list):
        return traced
    if each[0] == "sparse_coo":
        _, shape, indices, values, coalesced = each
        parts = _fake(indices, None), _fake(values, None)
        return torch.sparse_coo_tensor(*parts, shape, is_coalesced=coalesced, check_invariants=False)
    dtype, shape, strides, offset, device = each
    base = torch.empty(
        offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n),
        dtype=getattr(torch, dtype),
        device=device,
    )
    return torch.as_strided(base, shape, strides, offset) if 0 not in shape else base.new_empty(shape)
