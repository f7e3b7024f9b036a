"""The least time of a small graph, by a search over all its schedules.

A state is what has run, and which values can be read. Best first by the time spent beyond one run of each op
that has to run: the first state in which all is done is optimal. The rules are those of
:mod:`hybridremat.graph.memory`, without the bytes of generator states and of gradients that wait to leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from hybridremat.graph.joint import JointGraph, Op, Phase, Variant
from hybridremat.sequence.bounds.moments import needed_ops
from hybridremat.sequence.bounds.relaxation import PhaseLimits

MOST_OPS: Final = 16
MOST_STATES: Final = 20_000
"""States that are looked at before the search gives up: about a second."""


class _State(NamedTuple):
    """Sets as bits: ops that ran, values that can be read, outputs of which a later version can."""

    backward: bool
    done: int
    readable: int
    again: int


def least_time(graph: JointGraph, limits: PhaseLimits) -> int | None:
    """The nanoseconds of the fastest schedule under limits; None if the graph is too large, or none fits."""
    return _Search(graph, limits).least_time() if len(graph.ops) <= MOST_OPS else None


@dataclass
class _Search:
    graph: JointGraph
    limits: PhaseLimits

    def __post_init__(self) -> None:
        graph = self.graph
        self.bytes = [value.bytes for value in graph.values]
        self.made = _bits(value.id for value in graph.values if value.producer is not None)
        self.outputs = _bits(graph.held_outputs | graph.released_outputs) & self.made
        self.held = _bits(graph.held_outputs) & self.made
        self.gradients = _bits(graph.gradients) & self.made
        self.tangents = sum(value.bytes for value in graph.values if value.tangent)
        self.reads = [_bits(op.reads) & self.made for op in graph.ops]
        self.writes = [_bits(op.writes) for op in graph.ops]
        self.forward = _bits(op.id for op in graph.ops if op.phase is Phase.FORWARD)
        needed = needed_ops(graph)
        self.needed = _bits(needed)
        self.once = {
            op.id: min(way.time for way in op.ways) if op.id in needed else 0 for op in graph.ops
        }

    def least_time(self) -> int | None:
        order = count()
        waiting = [(0, next(order), _State(False, 0, 0, 0))]
        seen: set[_State] = set()
        while waiting and len(seen) < MOST_STATES:
            spent, _, state = heappop(waiting)
            if state in seen:
                continue
            seen.add(state)
            if state.backward and self._finished(state):
                return spent + sum(self.once.values())
            for extra, following in self._following(state):
                if following not in seen:
                    heappush(waiting, (spent + extra, next(order), following))
        return None

    def _finished(self, state: _State) -> bool:
        return not self.needed & ~state.done and not self.gradients & ~state.readable

    def _following(self, state: _State) -> Iterator[tuple[int, _State]]:
        """States one move on, each with the time that it takes."""
        if not state.backward and not self.forward & ~state.done:
            yield 0, state._replace(backward=True)
        for value in _members(state.readable & ~(self._pinned(state) & ~state.again)):
            yield 0, state._replace(readable=state.readable & ~(1 << value))
        for op in self.graph.ops:
            early = op.phase is Phase.BACKWARD and not state.backward
            if early or self.reads[op.id] & ~state.readable:
                continue
            first = not state.done >> op.id & 1
            if not (first or op.recomputable):
                continue
            for way in op.ways:
                for gone in self._fitting(op, way, state):
                    yield way.time - first * self.once[op.id], self._after(op, state, gone, first=first)

    def _pinned(self, state: _State) -> int:
        """Outputs whose first version is there and has to stay."""
        kept = self.held if state.backward else self.outputs
        return _bits(v for v in _members(kept) if state.done >> self._producer(v) & 1)

    def _producer(self, value: int) -> int:
        producer = self.graph.values[value].producer
        assert producer is not None
        return producer

    def _fitting(self, op: Op, way: Variant, state: _State) -> Iterator[int]:
        """What an op can write over, as bits (0: nothing), where it then fits under the limit."""
        limit = self.limits.backward if state.backward else self.limits.forward
        readable = state.readable & ~self.writes[op.id]
        pinned = self._pinned(state)
        level = self._size(readable & ~(pinned & ~state.again)) + self._size(pinned)
        level += self._size(self.writes[op.id]) + way.temp + self.tangents * state.backward
        if level <= limit:
            yield 0
        first_outputs = self.outputs & ~state.again
        for value in _members(_bits(way.overwrites) & self.reads[op.id] & ~first_outputs):
            if level - self.bytes[value] <= limit:
                yield 1 << value

    def _after(self, op: Op, state: _State, gone: int, *, first: bool) -> _State:
        written = self.writes[op.id]
        made_again = written & self.outputs if not first else 0
        return _State(
            state.backward,
            state.done | 1 << op.id,
            (state.readable | written) & ~gone,
            state.again | made_again,
        )

    def _size(self, values: int) -> int:
        return sum(self.bytes[value] for value in _members(values))


def _bits(members: Iterable[int]) -> int:
    bits = 0
    for member in members:
        bits |= 1 << member
    return bits


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
