"""Dead-code elimination on a flat schedule: recomputations and optional ops whose results nobody reads."""

from __future__ import annotations

from hybridremat.graph.joint import JointGraph, Phase, Schedule


class DeadCodeElimination:
    """Removes dead executions from schedules of one graph.

    What runs in the forward as part of the forward stays (outputs, mutations), and so does every
    backward op and every op that must run exactly once. Of the copies of a ``rebuilt`` op, which stands
    in several blocks, only those stay that are read.
    """

    def __init__(self, graph: JointGraph, rebuilt: frozenset[int] = frozenset()) -> None:
        self._gradients = graph.gradients
        self._stays_forward = [
            not op.recomputable or (op.phase is not Phase.OPTIONAL and op.id not in rebuilt)
            for op in graph.ops
        ]
        self._stays = [op.phase is Phase.BACKWARD or not op.recomputable for op in graph.ops]
        # only ops that may go need to know whether they are read
        may_go = [v.producer is not None and not self._stays[v.producer] for v in graph.values]
        self._reads = [tuple(v for v in op.reads if may_go[v]) for op in graph.ops]
        self._writes = [tuple(v for v in op.writes if may_go[v]) for op in graph.ops]

    def __call__(self, schedule: Schedule) -> Schedule:
        """``schedule`` without its dead executions."""
        needed = set(self._gradients)
        split = schedule.num_forward
        backward = self._kept(schedule.steps[split:], self._stays, needed)
        forward = self._kept(schedule.steps[:split], self._stays_forward, needed)
        return Schedule(tuple(forward[::-1] + backward[::-1]), len(forward))

    def _kept(self, steps: tuple[int, ...], stays: list[bool], needed: set[int]) -> list[int]:
        """The executions that are kept, last first; ``needed``: values read later, updated on the way."""
        kept: list[int] = []
        reads, writes = self._reads, self._writes
        for op in reversed(steps):
            if stays[op] or not needed.isdisjoint(writes[op]):
                kept.append(op)
                needed.difference_update(writes[op])
                needed.update(reads[op])
        return kept
