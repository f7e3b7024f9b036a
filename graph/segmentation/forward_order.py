"""The forward ops in execution order, and what is alive between any two of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridremat.graph.joint import JointGraph, Op, Phase
from hybridremat.graph.segmentation.always_saved import AlwaysSaved


@dataclass(frozen=True)
class ForwardOrder:
    """Forward ops in execution order; an op's place in it is its position.

    Attributes
    ----------
    ops
        Global op ids: the forward ops, and the optional ops that run in the forward.
    rebuilt
        Ops that every block that reads what they make runs for itself: they have no position.
        For each the position from which on it can run.
    produced_at, last_read_at
        For every value id, the positions of its producer and of its last forward reader; −1
        for values that no op in the order makes. What no such op reads counts as read where it is made.
    always
        Values kept to the end of the step: part of no boundary.
    real
        For every position, whether the op makes a value that is not always saved.
    """

    ops: tuple[int, ...]
    rebuilt: dict[int, int]
    produced_at: tuple[int, ...]
    last_read_at: tuple[int, ...]
    always: frozenset[int]
    real: tuple[bool, ...]


def forward_order(graph: JointGraph, saved: AlwaysSaved) -> ForwardOrder:
    """Put the forward ops in order; an optional op among them follows the last op that it reads from."""
    order = _execution_order(graph, saved.forward_optional)
    ops = tuple(op for op in order if op not in saved.rebuilt)
    rebuilt = {op: at - earlier for earlier, (at, op) in enumerate(_places(order, saved.rebuilt))}
    produced_at = [-1] * len(graph.values)
    last_read_at = [-1] * len(graph.values)
    for position, op_id in enumerate(ops):
        op = graph.ops[op_id]
        for value in op.writes:
            produced_at[value] = last_read_at[value] = position
        for value in op.reads:
            if produced_at[value] >= 0:
                last_read_at[value] = position
    real = tuple(any(value not in saved.values for value in graph.ops[op].writes) for op in ops)
    return ForwardOrder(ops, rebuilt, tuple(produced_at), tuple(last_read_at), saved.values, real)


def _places(order: tuple[int, ...], chosen: frozenset[int]) -> list[tuple[int, int]]:
    return [(at, op) for at, op in enumerate(order) if op in chosen]


def _execution_order(graph: JointGraph, forward_optional: frozenset[int]) -> tuple[int, ...]:
    forward = graph.phase_ops(Phase.FORWARD)
    rank = {op: float(position) for position, op in enumerate(forward)}
    for op in graph.ops:
        if op.id in forward_optional:
            producers = (graph.values[value].producer for value in op.reads)
            rank[op.id] = max((rank[made] for made in producers if made is not None), default=-1.0)
    return tuple(sorted(rank, key=lambda op: (rank[op], op)))


def rebuilt_producers(graph: JointGraph, order: ForwardOrder, op: Op) -> list[int]:
    """The rebuilt ops that make what ``op`` reads."""
    if not order.rebuilt:
        return []
    producers = (graph.values[value].producer for value in op.reads)
    return [made for made in producers if made is not None and made in order.rebuilt]


def alive_after(order: ForwardOrder, weight: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every position p, the total ``weight`` (by value id) of the boundary after p."""
    change = np.zeros(len(order.ops) + 1, dtype=np.int64)
    carried = np.array(
        [v for v, p in enumerate(order.produced_at) if p >= 0 and v not in order.always], dtype=np.int64
    )
    if carried.size:
        np.add.at(change, np.asarray(order.produced_at)[carried], weight[carried])
        np.subtract.at(change, np.asarray(order.last_read_at)[carried], weight[carried])
    return np.cumsum(change)[:-1]


@dataclass(frozen=True)
class OpGroups:
    """Groups of forward ops: group k starts at position ``start[k]``; ``start[-1]`` is the number of ops."""

    start: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.start) - 1


def op_groups(order: ForwardOrder) -> OpGroups:
    """One group per real op; unreal ops ahead of the first real op belong to the first group."""
    starts = [position for position, real in enumerate(order.real) if real]
    return OpGroups((0, *starts[1:], len(order.ops)))
