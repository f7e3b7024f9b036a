"""A linear program that every schedule of a joint graph satisfies.

Over the moments 0…K−1 of :mod:`hybridremat.sequence.bounds.moments` and the stages between them, with c an
op, v a value, p(v) the op that makes it:

- alive[v, k] ∈ [0, 1]: at moment k, a version of v that was made before is read then or later, or has to
  stay;
- runs[c, a, b] ∈ [0, 1]: c runs at least once in the stages a…b; here of single stages, and of all
  stages from a to the last.

What holds in every schedule:

- runs[c, a, b] ≤ Σ runs[c, i, i], i = a…b;
- what c reads was there before or is made meanwhile: runs[c, a, b] ≤ alive[v, a − 1] + runs[p(v), a, b];
- alive[v, b] ≤ alive[v, a − 1] + runs[p(v), a, b];
- the op of a moment runs then, and what it reads is alive; an op that has to run does so in one of the
  stages in which its first execution can be; an op that must not be repeated runs in one stage at most;
- the bytes alive at a moment, with the outputs and the workspace of its op, less what that writes over, are
  under the limit.

The rows from a stage to the last make it a good bound. With single stages alone, a fractional solution
spreads an op over many stages, a little of it in each, and keeps only that little of what it reads.

Bytes of values under 1/10,000 of the limit are not counted, nor generator states and workspaces of whoever
takes gradients. Of an op that can be run in several ways, the least time and workspace count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hybridremat.graph.joint import JointGraph, Op, Phase
from hybridremat.sequence.bounds.linear_program import LinearProgram, Term
from hybridremat.sequence.bounds.moments import BOUNDARY, Moments, needed_ops

_UNCOUNTED: Final = 10_000
Stages = tuple[int, int]


PRICE_BITS: Final = 30


@dataclass(frozen=True)
class PhaseLimits:
    """Most bytes of step memory during the forward and during the backward."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Prices:
    """What bytes cost, in nanoseconds by 2^−30: those saved between the phases, and each phase's peak."""

    saved: int = 0
    forward: int = 0
    backward: int = 0


NO_PRICES: Final = Prices()


def priced_program(
    graph: JointGraph, moments: Moments, limits: PhaseLimits, prices: Prices, *, with_time: bool = True
) -> LinearProgram:
    """Minimize the nanoseconds of all executions, or none, and the prices of bytes.

    ``moments`` have that between the phases if what is saved has a price.
    """
    priced = _Relaxation(graph, moments, limits, prices=prices, with_time=with_time)
    priced.price_saved()
    return priced.program


def time_program(graph: JointGraph, moments: Moments, limits: PhaseLimits) -> LinearProgram:
    """Minimize the nanoseconds of all executions under limits."""
    return _Relaxation(graph, moments, limits).program


def peak_program(graph: JointGraph, moments: Moments, known: int) -> LinearProgram:
    """Minimize the peak, in bytes; ``known`` is one that can be reached."""
    each = Prices(forward=1 << PRICE_BITS)  # the whole step has one peak
    return _Relaxation(
        graph, moments, PhaseLimits(known, known), prices=each, with_time=False, one_peak=True
    ).program


class _Relaxation:
    def __init__(
        self,
        graph: JointGraph,
        moments: Moments,
        limits: PhaseLimits,
        *,
        prices: Prices = NO_PRICES,
        with_time: bool = True,
        one_peak: bool = False,
    ) -> None:
        self.graph, self.moments, self.prices = graph, moments, prices
        self.program = LinearProgram()
        self.needed = needed_ops(graph)
        self.last = moments.stages - 1
        self.counted = [
            value.producer is not None and value.bytes * _UNCOUNTED > min(limits.forward, limits.backward)
            for value in graph.values
        ]
        self.place = {op: index for index, op in enumerate(moments.ops)}
        self.runs: dict[tuple[int, int, int], int] = {}
        self.alive: dict[tuple[int, int], int] = {}
        spans = [(stage, stage) for stage in range(self.last + 1)]
        self.spans = [*spans, *((stage, self.last) for stage in range(1, self.last))]
        self._add_runs(with_time=with_time)
        self._add_alive()
        self._add_sums()
        self._add_sources()
        self._add_survival()
        forward = self._peak(prices.forward, limits.forward)
        backward = forward if one_peak else self._peak(prices.backward, limits.backward)
        self._add_memory(limits, forward, backward)

    def _add_runs(self, *, with_time: bool) -> None:
        """runs[c, a, b], certain where the first execution of c cannot be anywhere else."""
        for op in self.graph.ops:
            time = min(way.time for way in op.ways) if with_time else 0
            first, last = self.moments.earliest[op.id], self.moments.latest[op.id]
            for a, b in self.spans:
                if b >= first and (op.recomputable or a <= last):
                    certain = op.id in self.needed and a <= first and last <= b
                    cost = time if a == b else 0
                    self.runs[op.id, a, b] = self.program.variable(int(certain), 1, cost)

    def _add_alive(self) -> None:
        """alive[v, k], certain where the moment's op reads v or v has to stay."""
        for value in self.graph.values:
            if not self.counted[value.id]:
                continue
            assert value.producer is not None
            stays = value.id in self.graph.gradients or value.id in self.graph.held_outputs
            for k in range(self.moments.earliest[value.producer], self.last + stays):
                certain = self._stays(value.id, k) or value.id in self._reads(k)
                self.alive[value.id, k] = self.program.variable(int(certain), 1)

    def _reads(self, k: int) -> tuple[int, ...]:
        op = self._op(k)
        return op.reads if op else ()

    def _op(self, k: int) -> Op | None:
        """The op of a moment; None between the phases and at the end of the step."""
        if k == self.last or self.moments.ops[k] == BOUNDARY:
            return None
        return self.graph.ops[self.moments.ops[k]]

    def _stays(self, value: int, k: int) -> bool:
        """Whether a version of a value has to be there at moment k (the last: the end of the step)."""
        producer = self.graph.values[value].producer
        made = producer is not None and self.moments.latest[producer] <= k
        if value in self.graph.gradients:
            return k == self.last
        if self.graph.ops[producer or 0].phase is not Phase.FORWARD:
            return value in self.graph.held_outputs and k == self.last
        released = value in self.graph.released_outputs and k < self.moments.forward + (
            self.moments.boundary is not None
        )
        return made and (released or value in self.graph.held_outputs)

    def _add_sums(self) -> None:
        """An op runs in a span of stages only if it runs in one of them; where it must, in one at least."""
        for op in self.graph.ops:
            each = {a: run for a in range(self.last + 1) if (run := self.runs.get((op.id, a, a))) is not None}
            for a, b in self.spans:
                if a < b and (whole := self.runs.get((op.id, a, b))) is not None:
                    self.program.at_most([(whole, 1), *((each[i], -1) for i in each if a <= i <= b)], 0)
            first, last = self.moments.earliest[op.id], self.moments.latest[op.id]
            if op.id in self.needed and first < last:
                self.program.at_most([(each[i], -1) for i in each if first <= i <= last], -1)
            if not op.recomputable and len(each) > 1:
                self.program.at_most([(run, 1) for run in each.values()], 1)

    def _made(self, value: int, a: int, b: int) -> Iterator[Term]:
        """What lets a value be there in the stages a…b: the negative terms of a row."""
        producer = self.graph.values[value].producer
        for variable in (self.alive.get((value, a - 1)), self.runs.get((producer or 0, a, b))):
            if variable is not None:
                yield variable, -1

    def _add_sources(self) -> None:
        """What an op reads was alive before the stages, or is made in them."""
        for (op, a, b), runs in self.runs.items():
            if a == 0 or self.place.get(op) == a - 1:
                continue
            for value in set(self.graph.ops[op].reads):
                if self.counted[value]:
                    self.program.at_most([(runs, 1), *self._made(value, a, b)], 0)

    def _add_survival(self) -> None:
        """What is alive at the end of some stages was alive before them, or is made in them."""
        for (value, k), alive in self.alive.items():
            for a, b in self.spans:
                if b == k:
                    self.program.at_most([(alive, 1), *self._made(value, a, b)], 0)

    def _peak(self, price: int, most: int) -> Term | None:
        """The peak of a phase, if it has a price.

        As a share of the most: a variable like the others is what a solver in floats likes.
        """
        return (self.program.variable(cost=price * most >> PRICE_BITS), -most) if price else None

    def price_saved(self) -> None:
        """Let what is alive between the phases cost its price."""
        for (value, k), alive in self.alive.items():
            if k == self.moments.boundary:
                size = self.graph.values[value].bytes
                self.program.cost[alive] += self.prices.saved * size >> PRICE_BITS

    def _add_memory(self, limits: PhaseLimits, forward: Term | None, backward: Term | None) -> None:
        """The bytes at every moment, and at the end of the step."""
        alive: list[list[int]] = [[] for _ in range(self.last + 1)]
        for value, k in self.alive:
            alive[k].append(value)
        values = self.graph.values
        tangents = sum(value.bytes for value in values if value.tangent)
        for k in range(self.last + 1):
            if k == self.moments.boundary:
                continue
            op = self._op(k)
            written = op.writes if op else ()
            late = k >= self.moments.forward
            fixed = sum(values[value].bytes for value in written) + (tangents if late else 0)
            terms = [(self.alive[v, k], values[v].bytes) for v in alive[k] if v not in written]
            if op:
                fixed += min(way.temp for way in op.ways)
                terms += self._overwritten(op, k)
            peak, limit = (backward, limits.backward) if late else (forward, limits.forward)
            limit = limit if peak is None else 0
            self.program.at_most([*terms, *([peak] if peak is not None else [])], limit - fixed)

    def _overwritten(self, op: Op, k: int) -> list[Term]:
        """What the moment's op may write over: at most one value, which is not alive afterwards.

        The first version of an output stays, whatever happens to later ones; of a gradient only the last.
        """
        candidates = {value for way in op.ways for value in way.overwrites}
        candidates -= self.graph.held_outputs
        chosen = {v: self.program.variable() for v in sorted(candidates) if (v, k) in self.alive}
        for value, variable in chosen.items():
            if (after := self.alive.get((value, k + 1))) is not None:
                again = self.runs.get((self.graph.values[value].producer or 0, k + 1, k + 1))
                made = [] if again is None else [(again, -1)]
                self.program.at_most([(variable, 1), (after, 1), *made], 1)
        if len(chosen) > 1:
            self.program.at_most([(variable, 1) for variable in chosen.values()], 1)
        return [(variable, -self.graph.values[value].bytes) for value, variable in chosen.items()]
