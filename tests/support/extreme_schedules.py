"""Schedules that nobody would choose: each backward op has what it reads computed again, at random.

They reach what plans seldom do: every op that may run again does, some many times, from inputs that were
themselves computed again or not.
"""

from __future__ import annotations

from random import Random

from hybridremat.graph.joint import Phase, Schedule


def extreme_schedule(graph, seed: int, share: float) -> Schedule:
    """Before each backward op, every op that it needs runs again with this probability."""
    draw = Random(seed)
    forward = graph.phase_ops(Phase.FORWARD)
    steps, done = list(forward), set(forward)

    def bring(value, seen):
        op = graph.producer(value)
        if op is None or op.phase is Phase.BACKWARD or op.id in seen:
            return
        seen.add(op.id)
        if op.id in done and not (op.recomputable and draw.random() < share):
            return
        for read in op.reads:
            bring(read, seen)
        steps.append(op.id)
        done.add(op.id)

    for late in graph.phase_ops(Phase.BACKWARD):
        seen: set[int] = set()
        for value in graph.ops[late].reads:
            bring(value, seen)
        steps.append(late)
    for value in sorted(graph.gradients | graph.held_outputs):  # those that no backward op makes or reads
        op = graph.producer(value)
        if op is not None and op.id not in done and op.phase is not Phase.BACKWARD:
            bring(value, set())
    return Schedule(tuple(steps), len(forward))
