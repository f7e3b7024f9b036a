"""Ops that the user has pinned, and whether a schedule does as they ask.

A *must-save* op runs once, in the forward; what the backward reads of it is what the forward left. Of a
*must-recompute* op the backward reads nothing that the forward left: it makes it again where it needs it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hybridremat.graph.joint import JointGraph, Schedule


@dataclass(frozen=True)
class Pins:
    """Ids of forward and optional ops: ``must_save`` and ``must_recompute``, disjoint."""

    must_save: frozenset[int] = frozenset()
    must_recompute: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.must_save or self.must_recompute)

    def saved_values(self, graph: JointGraph) -> frozenset[int]:
        """What the ops that must be saved write."""
        return frozenset(value for op in self.must_save for value in graph.ops[op].writes)

    def recomputed_values(self, graph: JointGraph) -> frozenset[int]:
        """What the ops that must be recomputed write."""
        return frozenset(value for op in self.must_recompute for value in graph.ops[op].writes)


NO_PINS = Pins()


def obeys(graph: JointGraph, schedule: Schedule, pins: Pins) -> bool:
    """Whether a schedule does as the pins ask, execution by execution.

    An optional op that must be saved may also not run at all: nobody reads it then.
    """
    if not pins:
        return True
    forward, backward = schedule.steps[: schedule.num_forward], schedule.steps[schedule.num_forward :]
    if not pins.must_save.isdisjoint(backward):
        return False
    if any(runs > 1 for op, runs in Counter(forward).items() if op in pins.must_save):
        return False
    left_by_forward = set(pins.recomputed_values(graph))
    for op in map(graph.ops.__getitem__, backward):
        if not left_by_forward.isdisjoint(op.reads):
            return False
        left_by_forward.difference_update(op.writes)
    return True
