"""Moments of a step that come in one order in every schedule, and when each op can run between them.

A moment is the first execution of an op of one path of dependencies. As each op of a path needs, directly or
not, what the one before makes, no schedule has these first executions in another order. The executions from
one moment up to the next are a *stage*: stage 0 comes before the first moment, stage k starts with moment
k − 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hybridremat.graph.joint import JointGraph, Phase

BOUNDARY: Final = -1
"""In place of an op: the moment between the phases, when no op runs."""

MOMENTS: Final = 20
"""Most moments: twice as many took three times as long for 0.1 points at most."""


@dataclass(frozen=True)
class Moments:
    """Moments of a graph and what they say about every op.

    Attributes
    ----------
    ops
        The op of each moment, in order; :data:`BOUNDARY` for that between the phases, if it is one.
    forward
        How many of them are in the forward; the others are between the phases or in the backward.
    earliest
        For each op, the first stage in which it can run.
    latest
        For each op, the last stage in which its first execution can be, if it runs at all.
    """

    ops: tuple[int, ...]
    forward: int
    earliest: tuple[int, ...]
    latest: tuple[int, ...]

    @property
    def boundary(self) -> int | None:
        """The number of the moment between the phases; None without it."""
        return self.forward if BOUNDARY in self.ops else None

    @property
    def stages(self) -> int:
        """How many stages there are: one more than moments."""
        return len(self.ops) + 1


def needed_ops(graph: JointGraph) -> frozenset[int]:
    """The ops that run in any schedule.

    These are forward and backward ops, those that make gradients and outputs, and all that these need.
    """
    needed = {op.id for op in graph.ops if op.phase is not Phase.OPTIONAL}
    for value in graph.gradients | graph.held_outputs | graph.leaving:
        if (producer := graph.values[value].producer) is not None:
            needed.add(producer)
    for op in reversed(graph.ops):
        if op.id in needed:
            needed.update(made for v in op.reads if (made := graph.values[v].producer) is not None)
    return frozenset(needed)


def choose_moments(graph: JointGraph, level: Sequence[int], count: int = MOMENTS) -> Moments:
    """Up to ``count`` moments, where a schedule takes most memory.

    Parameters
    ----------
    graph
        The joint graph, with a backward.
    level
        For each op, bytes alive while it runs in a schedule to go by.
    """
    path = _heaviest_path(graph, level)
    first_backward = next(op for op in path if graph.ops[op].phase is Phase.BACKWARD)
    others = (op for op in path if op != first_backward and graph.ops[op].phase is not Phase.OPTIONAL)
    by_level = sorted(others, key=lambda op: (-level[op], op))
    return moments_at(graph, sorted([first_backward, *by_level[: count - 1]]))


def moments_at(graph: JointGraph, ops: Sequence[int]) -> Moments:
    """The moments of these forward and backward ops, in order, which lie on one path of dependencies."""
    forward = sum(op != BOUNDARY and graph.ops[op].phase is not Phase.BACKWARD for op in ops)
    first = forward + (BOUNDARY in ops)  # stage in which a backward op can run
    return Moments(tuple(ops), forward, _earliest(graph, ops, first), _latest(graph, ops, forward))


def with_boundary(graph: JointGraph, moments: Moments) -> Moments:
    """The same moments, and that between the phases."""
    ops = list(moments.ops)
    ops.insert(moments.forward, BOUNDARY)
    return moments_at(graph, ops)


def _heaviest_path(graph: JointGraph, level: Sequence[int]) -> list[int]:
    """The path of dependencies whose ops take most memory in all, and ends in the backward.

    Squares let it rather pass through one high op than through many low ones.
    """
    best: list[int] = []
    before: list[int | None] = []
    for op in graph.ops:
        sources = (graph.values[value].producer for value in op.reads)
        source = max((s for s in sources if s is not None), key=lambda s: best[s], default=None)
        best.append(level[op.id] ** 2 + (0 if source is None else best[source]))
        before.append(source)
    at: int | None = max((op.id for op in graph.ops if op.phase is Phase.BACKWARD), key=lambda op: best[op])
    path: list[int] = []
    while at is not None:
        path.append(at)
        at = before[at]
    return path[::-1]


def _earliest(graph: JointGraph, ops: Sequence[int], forward: int) -> tuple[int, ...]:
    """What needs a moment's op cannot run before it, nor the backward before the last forward moment."""
    place = {op: index for index, op in enumerate(ops)}
    found: list[int] = []
    for op in graph.ops:
        sources = (graph.values[value].producer for value in op.reads)
        stage = max((found[source] for source in sources if source is not None), default=0)
        if op.phase is Phase.BACKWARD:
            stage = max(stage, forward)
        found.append(place[op.id] + 1 if op.id in place else stage)
    return tuple(found)


def _latest(graph: JointGraph, ops: Sequence[int], forward: int) -> tuple[int, ...]:
    """What a moment's op needs has run before it, and the whole forward before the backward."""
    place = {op: index for index, op in enumerate(ops)}
    found = [forward if op.phase is Phase.FORWARD else len(ops) for op in graph.ops]
    for op in reversed(graph.ops):
        if op.id in place:
            found[op.id] = place[op.id] + 1
        before = place.get(op.id, found[op.id])
        for value in op.reads:
            source = graph.values[value].producer
            if source is not None:
                found[source] = min(found[source], before)
    return tuple(found)
