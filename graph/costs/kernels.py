"""The distinct kernels among the ops of a joint graph.

Two ops are the same kernel if target, scalar arguments, and shapes, strides and dtypes of their
tensors are equal. A model has some tens of distinct kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from hybridremat.graph.tracing.fx_nodes import has_effects, tensors
from hybridremat.graph.tracing.signature import kernel_signature
from hybridremat.graph.tracing.trace import TracedStep


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
    return Kernels(keys, nodes, device_of(step.op_nodes))


def device_of(nodes: Iterable[fx.Node]) -> str:
    """The kind of device that calls run on: the one that is not the CPU, if there is one."""
    devices = {t.device.type for n in nodes for t in tensors(n.meta.get("val"))}
    return next(iter(sorted(devices - {"cpu"})), "cpu")
