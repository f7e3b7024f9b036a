"""Signatures of kernels, and the fingerprint of a graph.

Two calls are the same kernel if target, scalar arguments, and the layouts of all tensors are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_not
from types import FunctionType
from typing import Final

import torch
from torch import fx

from hybridremat.graph.joint import JointGraph, Op
from hybridremat.graph.opaque.ops import is_opaque
from hybridremat.graph.tracing.fx_nodes import storage_bytes, tensors

REAL_VALUE = "real value"
"""In the meta of a node: fake tensors like those that come on this device, if they are not as traced."""


def fake_value(node: fx.Node) -> object:
    """The value traced for a node: its fake tensors, or the subgraph that an op is to run.

    Where it is known that its kernel returns others here, fake ones like these.
    """
    if REAL_VALUE in node.meta:
        return node.meta[REAL_VALUE]
    if node.op == "get_attr" and "val" not in node.meta:
        assert node.graph.owning_module is not None
        return attrgetter(str(node.target))(node.graph.owning_module)
    return node.meta.get("val")


def target_text(node: fx.Node) -> str:
    """What a node runs, by a name that is the same in every process."""
    target = node.target
    return f"hybridremat.{target.__name__}" if isinstance(target, FunctionType) else str(target)


def kernel_signature(node: fx.Node) -> str:
    """What distinguishes one kernel from another, as text (a cache key)."""
    given = [node.args, node.kwargs, *map(fake_value, node.all_input_nodes)]
    target, known, text = node.meta.get(_TEXT, (None, (), ""))
    if target is not node.target or len(known) != len(given) or any(map(is_not, known, given)):
        text = _kernel_text(node)
        node.meta[_TEXT] = node.target, given, text
    return str(text)


_TEXT: Final = "hybridremat_signature"
"""A node's ``meta``: its signature, and what this was made of; every stage of a step asks for it."""


def _kernel_text(node: fx.Node) -> str:
    keywords = ",".join(f"{name}={_described(item)}" for name, item in sorted(node.kwargs.items()))
    repeated = f" of {distinct_arguments(node)}" if is_opaque(node.target) else ""
    return f"{target_text(node)}({_described(node.args)};{keywords}){repeated}"


def distinct_arguments(node: fx.Node) -> list[int]:
    """Its arguments by the number of the input: tells what is given more than once."""
    given: list[int] = []
    fx.map_arg((node.args, node.kwargs), lambda each: given.append(node.all_input_nodes.index(each)))
    return given


def memory_signature(node: fx.Node) -> str:
    """The kernel's signature without fractions (a dropout rate, a scale): on these no memory depends."""
    keywords = ",".join(f"{name}={_described(item, _FRACTION)}" for name, item in sorted(node.kwargs.items()))
    return f"{target_text(node)}({_described(node.args, _FRACTION)};{keywords})"


_FRACTION = "<fraction>"


def _described(item: object, fraction: str = "") -> str:
    if isinstance(item, float) and fraction:
        return fraction
    if isinstance(item, fx.Node):
        value = fake_value(item)
        if isinstance(value, fx.GraphModule):
            return hashlib.sha256(value.code.encode()).hexdigest()
        return _described_tensor(value) if isinstance(value, torch.Tensor) else str(value)
    if isinstance(item, (list, tuple)):
        return "[" + ",".join(_described(each, fraction) for each in item) + "]"
    return str(item)


def _described_tensor(value: torch.Tensor) -> str:
    if value.layout is not torch.strided:
        return f"{value.layout}{tuple(value.shape)}[{','.join(map(_described_tensor, tensors(value)))}]"
    lazy = ("~" if value.is_conj() else "") + ("-" if value.is_neg() else "")
    extent = storage_bytes(value)
    return f"{lazy}{value.dtype}{tuple(value.shape)}{value.stride()}@{value.storage_offset()}/{extent}"


def fingerprint(graph: JointGraph, op_nodes: Sequence[fx.Node]) -> str:
    """A hash of ops, edges, phases, and the layouts of all tensors; of nothing that is measured."""
    return fingerprint_of(graph, map(memory_signature, op_nodes), map(edges_text, graph.ops))


def fingerprint_of(graph: JointGraph, kernels: Iterable[str], edges: Iterable[str]) -> str:
    """As :func:`fingerprint`, of the memory signature of each op and of its :func:`edges_text`."""
    digest = hashlib.sha256()
    for kernel, text in zip(kernels, edges, strict=True):
        digest.update(f"({kernel!r}, {text[1:]}".encode())
    for value in graph.values:
        digest.update(repr((value.producer, value.shape, value.dtype, value.tangent)).encode())
    for group in (graph.held_outputs, graph.released_outputs, graph.gradients):
        digest.update(repr(sorted(group)).encode())
    if graph.deliveries:
        digest.update(repr(graph.deliveries).encode())
    return digest.hexdigest()[:32]


def edges_text(op: Op) -> str:
    """What a fingerprint has of an op beside its kernel."""
    return repr((op.phase.value, op.reads, op.writes, op.random, op.recomputable))
