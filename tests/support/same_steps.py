"""Whether a changed schedule still computes the same."""

from __future__ import annotations

from collections import Counter

from hybridremat.graph.joint import JointGraph, Phase, Schedule


def assert_computes_the_same(graph: JointGraph, schedule: Schedule, like: Schedule) -> None:
    """Each read is of something made before; forward and backward ops run as often as they have to."""
    made: set[int] = set()
    runs = Counter(schedule.steps)
    for now, step in enumerate(schedule.steps):
        op = graph.ops[step]
        assert all(v in made or graph.values[v].producer is None for v in op.reads)
        assert op.phase is not Phase.BACKWARD or now >= schedule.num_forward
        made.update(op.writes)
    forward = Counter(schedule.steps[: schedule.num_forward])
    for op in graph.ops:
        assert op.phase is not Phase.FORWARD or forward[op.id] == like.steps[: like.num_forward].count(op.id)
        assert op.phase is not Phase.BACKWARD or runs[op.id] == 1
        assert op.recomputable or runs[op.id] <= 1
    assert graph.gradients <= made
    once = [op for op in schedule.steps if not graph.ops[op].recomputable or graph.ops[op].random]
    assert list(dict.fromkeys(once)) == [op for op in dict.fromkeys(like.steps) if op in set(once)]
