"""``layers-lp``: a linear program shares the limit out among layers, and each layer drops what is cheapest.

``auto_perf_maxing`` of torchtitan's graph trainer, after its description (pull requests 3881, 3975 and 4636
of pytorch/torchtitan, 2026): per layer the program chooses which fraction of what it saves is made again,
least time in all, with the bytes alive under the limit at every place of the backward; then each layer by
itself turns its fraction into tensors, greedily or by an integer program. Random ops never run again, what a
layer hands on is saved, and what is dropped is made again where its first reader in the backward needs it.
Equal layers are solved once. Both ways to choose tensors are tried here, and compete by exact figures.

Left out: what moves to host memory (the description has a third fraction for that). Added: each schedule is
simulated, and only one that keeps the limit counts; where it needs more than the program counts, less is
asked for, as for any strategy over the whole graph. Optimal for nothing: within a layer what is made again
is not charged for what it needs that another tensor has dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from hybridremat.graph.joint import JointGraph, Phase, Schedule, plain_schedule
from hybridremat.graph.memory import MemorySimulator
from hybridremat.sequence.bounds.integer import integer_model, single_solver
from hybridremat.sequence.bounds.linear_program import LinearProgram
from hybridremat.sequence.solving import solved
from hybridremat.sequence.strategies.layers import layers_of
from hybridremat.sequence.strategies.whole_graph import Found, WholeGraph

ITERATIONS: Final = 10_000
"""Of the solver: the program has a variable for each tensor, and a row for each layer and phase."""

SLACK: Final = 1_000
"""A layer that drops all but one part in so many of what it is to drop has dropped it: solvers round."""

EFFORT: Final = 0.1
"""Deterministic seconds of the integer program of one layer."""

LIMITS: Final = 9
"""Between dropping all and the plain step, for which a frontier is looked at."""


@dataclass(frozen=True)
class Item:
    """What one op saves: ``op`` makes ``bytes`` that wait for the backward, again in ``time`` nanoseconds.

    ``last``: the place of their last reader in the forward; ``first``: of the first in the backward.
    """

    op: int
    bytes: int
    time: int
    last: int
    first: int


def cheapest(items: Sequence[Item], needed: int) -> tuple[Item, ...]:
    """Items of at least so many bytes, those of least time per byte first."""
    chosen: list[Item] = []
    for each in sorted(items, key=lambda item: (item.time / item.bytes, -item.bytes)):
        if needed <= 0:
            break
        chosen.append(each)
        needed -= each.bytes
    return tuple(chosen)


def least_time(items: Sequence[Item], needed: int) -> tuple[Item, ...]:
    """Items of at least so many bytes, of least time together, or the cheapest if none are found in time."""
    from ortools.sat.python import cp_model

    program = LinearProgram()
    chosen = [program.variable(cost=item.time) for item in items]
    program.at_most([(at, -item.bytes) for at, item in zip(chosen, items, strict=True)], -needed)
    model, variables = integer_model(program)
    solver = single_solver(EFFORT)
    if solved(solver, model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return cheapest(items, needed)
    return tuple(item for item, each in zip(items, variables, strict=True) if solver.value(each))


Inner = Callable[[Sequence[Item], int], tuple[Item, ...]]
"""Chooses what a layer drops, of at least so many bytes."""


class LayersLp:
    """The search in one graph."""

    def __init__(self, graph: JointGraph) -> None:
        self._graph, self._plain = graph, plain_schedule(graph)
        simulate = MemorySimulator(graph)
        self._profile = simulate(self._plain).profile
        self._waiting = {each.value: each for each in simulate.waiting(self._plain)}
        self._layer_of = layers_of(graph)
        self._again = self._can_run_again()
        self._items = self._by_layer()

    def under(self, limit: int) -> Found:
        """See :class:`~hybridremat.sequence.strategies.whole_graph.Search`."""
        needed = self._shared_out(limit)
        return Found([self._schedule(self._dropped(needed, inner)) for inner in (cheapest, least_time)])

    def least(self, known: int) -> Found:
        """See :class:`~hybridremat.sequence.strategies.whole_graph.Search`."""
        everything = self._schedule({item.op for items in self._items.values() for item in items})
        low = min(known, MemorySimulator(self._graph)(everything).peak)
        limits = (low + (known - low) * step // LIMITS for step in range(LIMITS))
        return Found([everything, *(each for limit in limits for each in self.under(limit).schedules)])

    def _can_run_again(self) -> frozenset[int]:
        """The ops of layers that may run again: not random, and the layer alone reads what they make."""
        graph, layer_of = self._graph, self._layer_of
        handed_on = set(graph.held_outputs | graph.released_outputs)
        for number in graph.phase_ops(Phase.FORWARD):
            for value in graph.ops[number].reads:
                made = graph.values[value].producer
                if made is not None and layer_of.get(made) != layer_of.get(number):
                    handed_on.add(value)
        ops = (graph.ops[number] for number in layer_of)
        return frozenset(
            op.id for op in ops if op.recomputable and not op.random and not handed_on.intersection(op.writes)
        )

    def _by_layer(self) -> dict[str, list[Item]]:
        """What may be dropped in each layer."""
        found: dict[str, list[Item]] = defaultdict(list)
        for number in sorted(self._again):
            own = [self._waiting[v] for v in self._graph.ops[number].writes if v in self._waiting]
            if size := sum(each.bytes for each in own):
                time = sum(self._graph.ops[op].time for op in self._needed_by({number}, ()))
                last, first = max(each.last for each in own), min(each.first for each in own)
                found[self._layer_of[number]].append(Item(number, size, time, last, first))
        return found

    def _needed_by(self, ops: Collection[int], dropped: Collection[int]) -> list[int]:
        """These ops and those that have to run before, in order, where what some made is dropped."""
        found, left = set(ops), list(ops)
        while left:
            for value in self._graph.ops[left.pop()].reads:
                made = self._graph.values[value].producer
                gone = made in dropped or value not in self._waiting
                if made in self._again and made not in found and gone:
                    found.add(made)
                    left.append(made)
        return sorted(found)

    def _shared_out(self, limit: int) -> dict[str, int]:
        """The bytes that each layer is to drop, by the program over all layers."""
        program = LinearProgram()
        shares = {item: program.variable(cost=item.time) for items in self._items.values() for item in items}
        for free, alive in self._rows():
            program.at_most([(shares[item], -item.bytes) for item in free], limit - alive)
        found = program.values(ITERATIONS) if program.limits else [0.0] * len(shares)
        wanted = {
            name: sum(item.bytes * found[shares[item]] for item in items)
            for name, items in self._items.items()
        }
        return {name: round(each - each / SLACK) for name, each in wanted.items()}

    def _rows(self) -> Iterator[tuple[list[Item], int]]:
        """What is gone at places of the step if it is dropped, and the most bytes of the plain step there.

        A layer's items are gone between its last reader in the forward and its first one in the backward.
        """
        spans = {
            name: (max(item.last for item in items), min(item.first for item in items))
            for name, items in self._items.items()
        }
        most: dict[frozenset[str], int] = defaultdict(int)
        for place, alive in enumerate(self._profile):
            free = frozenset(name for name, (last, first) in spans.items() if last < place < first)
            most[free] = max(most[free], alive)
        for names, alive in most.items():
            yield [item for name in sorted(names) for item in self._items[name]], alive

    def _dropped(self, needed: dict[str, int], inner: Inner) -> set[int]:
        """The ops whose values are dropped; equal layers are solved once."""

        @cache
        def chosen(shape: tuple[tuple[int, int], ...], bytes_: int) -> tuple[int, ...]:
            items = [Item(number, *figures, 0, 0) for number, figures in enumerate(shape)]
            return tuple(each.op for each in inner(items, bytes_))

        found = set[int]()
        for name, bytes_ in needed.items():
            items = self._items[name]
            if bytes_ > 0:
                shape = tuple((item.bytes, item.time) for item in items)
                found.update(items[number].op for number in chosen(shape, bytes_))
        return found

    def _schedule(self, dropped: Collection[int]) -> Schedule:
        """The step in which what these ops make is dropped, and made again just before it is read."""
        plain, split = self._plain.steps, self._plain.num_forward
        steps, there = list(plain[:split]), set[int]()
        for number in plain[split:]:
            producers = (self._graph.values[value].producer for value in self._graph.ops[number].reads)
            gone = {made for made in producers if made is not None and made in dropped and made not in there}
            missing = [op for op in self._needed_by(gone, dropped) if op not in there] if gone else []
            there.update(missing)
            steps += [*missing, number]
        return Schedule(tuple(steps), split)


LAYERS_LP: Final = WholeGraph("layers-lp", LayersLp)
