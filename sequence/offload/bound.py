"""The time that no schedule with moves beats under a limit.

All that moves leaves in the forward, by a link of :math:`β` bytes in a nanosecond. Let a step
take :math:`T`, of which its backward's own ops take :math:`t_b` at least, each once. Then its forward, waits
included, takes :math:`T - t_b` at most, and :math:`β (T - t_b)` bytes leave at most. Without its moves the
schedule would need so many bytes more than the limit :math:`M`, and take no longer:

.. math:: T ≥ f(M + β (T - t_b))

where :math:`f` is what no schedule without moves beats. It falls as memory grows, so the least :math:`T` is
found by bisection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hybridremat.graph.joint import Phase, Schedule
from hybridremat.sequence.bounds.certificate import MANY, BoundEffort, bound_under, time_once
from hybridremat.sequence.bounds.moments import needed_ops
from hybridremat.sequence.judge import Judge

NEAR: Final = 0.001
"""The share of the step's time within which the bisection ends."""


def offload_bound(judge: Judge, limit: int, schedule: Schedule, effort: BoundEffort = MANY) -> int:
    """Nanoseconds that no schedule with moves beats that needs at most ``limit`` bytes.

    ``schedule`` is a good one without moves, of about this memory (:func:`bound_under`).
    """
    assert judge.link is not None
    rate = judge.link.out / 1e9
    graph, bare = judge.graph, replace(judge, link=None, host_limit=None)
    needed = (graph.ops[op] for op in needed_ops(graph))
    backward = sum(min(way.time for way in op.ways) for op in needed if op.phase is Phase.BACKWARD)

    def leaving(time: int) -> int:
        """Bytes that leave at most in a step of so many nanoseconds."""
        return int((time - backward) * rate) + 1

    def bound(time: int) -> int:
        return bound_under(bare, limit + leaving(time), schedule, effort)

    low = time_once(graph)
    if (high := bound(low)) <= low:
        return low
    while high - low > NEAR * high:  # no step takes ``low``; whether one takes ``high`` is not known
        middle = (low + high) // 2
        low, high = (middle, high) if bound(middle) > middle else (low, middle)
    return low
