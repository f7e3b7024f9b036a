"""Dead-code elimination on a flat schedule: recomputations and optional ops whose results nobody reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hybridremat.graph.joint import JointGraph, Phase, Schedule

Piece = tuple[int, ...]
"""Executions in a row."""


class DeadCodeElimination:
    """Removes dead executions from schedules of one graph.

    What runs in the forward as part of the forward stays (outputs, mutations), and so does every
    backward op and every op that must run exactly once. Of the copies of a ``rebuilt`` op, which stands
    in several blocks, only those stay that are read.
    """

    def __init__(self, graph: JointGraph, rebuilt: frozenset[int] = frozenset()) -> None:
        self._gradients = _bits(graph.gradients)
        self._stays_forward = [
            not op.recomputable or (op.phase is not Phase.OPTIONAL and op.id not in rebuilt)
            for op in graph.ops
        ]
        self._stays = [op.phase is Phase.BACKWARD or not op.recomputable for op in graph.ops]
        # only ops that may go need to know whether they are read
        may_go = [v.producer is not None and not self._stays[v.producer] for v in graph.values]
        # sets of values as bits of one number: a third of the time of sets
        self._reads = [_bits(v for v in op.reads if may_go[v]) for op in graph.ops]
        self._writes = [_bits(v for v in op.writes if may_go[v]) for op in graph.ops]
        self._others = [~written for written in self._writes]
        self._known: dict[tuple[Piece, bool], tuple[int, dict[int, tuple[Piece, int]]]] = {}

    def __call__(self, schedule: Schedule) -> Schedule:
        """``schedule`` without its dead executions."""
        split = schedule.num_forward
        backward, needed = self._kept(schedule.steps[split:], self._stays, self._gradients)
        forward, _ = self._kept(schedule.steps[:split], self._stays_forward, needed)
        return Schedule(tuple(forward[::-1] + backward[::-1]), len(forward))

    def of_pieces(self, forward: Sequence[Piece], backward: Sequence[Piece]) -> Schedule:
        """The schedule of executions in pieces, without the dead ones.

        What is dead in a piece depends on which of its results are needed after it, so where many schedules
        consist of the same pieces, each piece is looked at a few times.
        """
        last, needed = self._kept_of_pieces(backward, self._gradients, in_forward=False)
        first, _ = self._kept_of_pieces(forward, needed, in_forward=True)
        return Schedule((*first, *last), len(first))

    def _kept_of_pieces(
        self, pieces: Sequence[Piece], needed: int, *, in_forward: bool
    ) -> tuple[list[int], int]:
        """The executions that are kept, and the values that they read from before."""
        kept: list[Piece] = []
        for piece in reversed(pieces):
            if (piece, in_forward) not in self._known:
                self._known[piece, in_forward] = self._written(piece), {}
            written, known = self._known[piece, in_forward]
            inside = needed & written
            if inside not in known:
                stays = self._stays_forward if in_forward else self._stays
                steps, before = self._kept(piece, stays, inside)
                known[inside] = tuple(reversed(steps)), before
            steps_kept, before = known[inside]
            kept.append(steps_kept)
            needed = needed & ~written | before
        return list(itertools.chain.from_iterable(reversed(kept))), needed

    def _written(self, piece: Piece) -> int:
        written = 0
        for op in piece:
            written |= self._writes[op]
        return written

    def stays(self, op: int, *, in_forward: bool) -> bool:
        """Whether an execution stays even where nobody reads its results."""
        return (self._stays_forward if in_forward else self._stays)[op]

    def _kept(self, steps: tuple[int, ...], stays: list[bool], needed: int) -> tuple[list[int], int]:
        """The executions that are kept, last first, and the values that they read from before.

        ``needed``: the values that are read afterwards.
        """
        kept: list[int] = []
        reads, writes, others = self._reads, self._writes, self._others
        for op in reversed(steps):
            if stays[op] or needed & writes[op]:
                kept.append(op)
                needed = needed & others[op] | reads[op]
        return kept, needed


def _bits(values: Iterable[int]) -> int:
    bits = 0
    for value in values:
        bits |= 1 << value
    return bits
