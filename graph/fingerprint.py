"""What names a traced step: the same for the same model and input shape, in any process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import fx

from hybridremat.graph.joint import JointGraph
from hybridremat.graph.signature import layout


def fingerprint(graph: JointGraph, op_nodes: Sequence[fx.Node]) -> str:
    """A hash of ops, edges, phases, and the layouts of all tensors; of nothing that is measured."""
    digest = hashlib.sha256()
    for op, node in zip(graph.ops, op_nodes, strict=True):
        parts = layout(node), op.phase.value, op.reads, op.writes, op.random, op.recomputable
        digest.update(repr(parts).encode())
    for value in graph.values:
        digest.update(repr((value.producer, value.shape, value.dtype, value.tangent)).encode())
    for group in (graph.held_outputs, graph.released_outputs, graph.gradients):
        digest.update(repr(sorted(group)).encode())
    return digest.hexdigest()[:32]
