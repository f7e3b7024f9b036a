"""Run recomputed kernels of a compiler right before they are read.

A compiler that fuses kernels puts a fused kernel where the first of its parts stands. A recomputation that is
ready long before it is read would so pull its reader forward, and what that reads with it.
"""

from __future__ import annotations

from collections.abc import Collection

from hybridremat.graph.joint import JointGraph, Phase, Schedule
from hybridremat.graph.memory import MemorySimulator


def sink_recomputations(graph: JointGraph, schedule: Schedule, fused: Collection[int]) -> Schedule:
    """The schedule with every recomputation by one of the ``fused`` ops of the backward as late as possible.

    Unless the step then takes more memory: then it is returned as it is.
    """
    forward, backward = schedule.steps[: schedule.num_forward], schedule.steps[schedule.num_forward :]
    late: list[int] = []  # from the end
    for op in reversed(backward):
        at = len(late)
        if op in fused and graph.ops[op].phase is not Phase.BACKWARD:
            at = _before_first_use(graph, op, late)
        late.insert(at, op)
    sunk = Schedule((*forward, *reversed(late)), schedule.num_forward)
    memory = MemorySimulator(graph)
    return sunk if memory(sunk).peak <= memory(schedule).peak else schedule


def _before_first_use(graph: JointGraph, op: int, late: list[int]) -> int:
    """Where in a reversed list an op belongs, so that it runs just before what reads or rewrites its values.

    It must not pass another run of an op that makes what it reads.
    """
    writes, reads = set(graph.ops[op].writes), set(graph.ops[op].reads)
    for at in range(len(late) - 1, -1, -1):
        other = graph.ops[late[at]]
        if writes.intersection((*other.reads, *other.writes)) or reads.intersection(other.writes):
            return at + 1
    return len(late)
