"""Stages of a step: which ops run in each for the first time.

Jain et al. call the steps of their program *frontier-advancing stages*: stage t runs the op t of the plain
order for the first time, after what it makes again for it. Here a stage has one new op or several in a row,
and none reaches over the end of the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridremat.graph.joint import JointGraph, Phase, Schedule, plain_schedule


@dataclass(frozen=True)
class Stages:
    """The stages of a graph.

    Attributes
    ----------
    graph
        The joint graph.
    starts
        The place in the order at which each stage's new ops start; at the end, the number of ops.
    forward
        How many stages belong to the forward.
    order
        The ops in the order in which they run for the first time; optional ones that do not run are left out.
    """

    graph: JointGraph
    starts: tuple[int, ...]
    forward: int
    order: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def place(self) -> tuple[int, ...]:
        """For each op, its place in the order; behind all others if it does not run."""
        places = {op: place for place, op in enumerate(self.order)}
        return tuple(places.get(op.id, len(places)) for op in self.graph.ops)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """For each op, the stage in which it runs for the first time; -1 if it does not run."""
        stages = [t for t in range(len(self)) for _ in range(self.starts[t], self.starts[t + 1])]
        return tuple([*stages, -1][place] for place in self.place)

    @cached_property
    def again(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the earlier ops that may run again in it, by place.

        Ops of the backward and those that must not run twice do not, nor does what nothing later needs, nor
        what an update of a buffer has yet to read: it could be made of the buffer after another update.
        """
        graph, needed = self.graph, [False] * len(self.graph.ops)
        for value in graph.gradients:
            if (source := graph.values[value].producer) is not None:
                needed[source] = True
        found: list[tuple[int, ...]] = []
        for stage in reversed(range(len(self))):
            start, end = self.starts[stage], self.starts[stage + 1]
            for op in reversed(self.order[:end]):
                if self.place[op] >= start or (needed[op] and self.repeats(op, stage)):
                    for value in graph.ops[op].reads:
                        if (source := graph.values[value].producer) is not None:
                            needed[source] = True
            found.append(tuple(op for op in self.order[:start] if needed[op] and self.repeats(op, stage)))
        return tuple(found[::-1])

    def stays(self, value: int, stage: int) -> bool:
        """Whether a version of a value has to be there when a stage starts; the end is behind the last."""
        graph = self.graph
        if value in graph.held_outputs or (value in graph.gradients and stage == len(self)):
            return True
        return value in graph.released_outputs and stage <= self.forward

    def lasts(self, value: int, stage: int) -> bool:
        """Whether a value that was made before a stage is there when it starts, whatever is decided."""
        producer = self.graph.values[value].producer
        return self.stays(value, stage) or (producer is not None and not self.repeats(producer, stage))

    def repeats(self, number: int, stage: int) -> bool:
        """Whether an op may run again in a stage."""
        op = self.graph.ops[number]
        allowed = op.recomputable and not op.mutates and op.phase is not Phase.BACKWARD
        return allowed and stage > self._updated[number]

    @cached_property
    def _updated(self) -> tuple[int, ...]:
        """For each op, the last stage in which what it makes updates a buffer; -1 if nothing of it does."""
        found = [-1] * len(self.graph.ops)
        for op in self.graph.ops:
            for value in op.reads if op.mutates else ():
                if (producer := self.graph.values[value].producer) is not None:
                    found[producer] = max(found[producer], self.first[op.id])
        return tuple(found)

    def schedule(self, runs: Sequence[Sequence[int]]) -> Schedule:
        """The schedule that runs these ops again in each stage, all in the order."""
        steps: list[int] = []
        split = 0
        for stage, again in enumerate(runs):
            new = self.order[self.starts[stage] : self.starts[stage + 1]]
            steps += [*sorted(again, key=self.place.__getitem__), *new]
            if stage < self.forward:
                split = len(steps)
        return Schedule(tuple(steps), split)

    def decisions(self, schedule: Schedule) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """What runs again, and what is kept, in each stage of a schedule of these stages."""
        stage, done = 0, set[int]()
        runs: set[tuple[int, int]] = set()
        made: dict[int, int] = {}  # the stage in which a value was made last
        kept: set[tuple[int, int]] = set()

        def read(values: Collection[int], now: int) -> None:
            for value in values:
                if value in made:
                    kept.update((each, value) for each in range(made[value] + 1, now + 1))
                    made[value] = max(made[value], now)

        for op in schedule.steps:
            stage = max(stage, self.first[op]) if op not in done else self._next(stage, len(done))
            if op in done:
                runs.add((stage, op))
            read(self.graph.ops[op].reads, stage)
            done.add(op)
            made.update(dict.fromkeys(self.graph.ops[op].writes, stage))
        read(self.graph.gradients | self.graph.held_outputs, len(self))
        return runs, kept

    def _next(self, stage: int, done: int) -> int:
        """The stage after one whose new ops have run, the same one otherwise; ``done``: ops that have run."""
        return stage + (done == self.starts[stage + 1])


def one_op_stages(graph: JointGraph) -> Stages:
    """A stage for each op in the plain order: Checkmate's own."""
    return stages_of(graph, plain_schedule(graph))


def stages_of(graph: JointGraph, schedule: Schedule) -> Stages:
    """A stage for each op, in the order in which a schedule runs them for the first time."""
    order = tuple(dict.fromkeys(schedule.steps))
    forward = len(set(schedule.steps[: schedule.num_forward]))
    return Stages(graph, tuple(range(len(order) + 1)), forward, order)


def even_stages(graph: JointGraph, count: int) -> Stages:
    """About ``count`` stages of about as many ops each; as many as ops where there are fewer."""
    split, end = len(graph.phase_ops(Phase.FORWARD)), len(graph.ops)
    size = max(1, -(-end // count))
    starts = (*range(0, split, size), *range(split, end, size), end)
    return Stages(graph, starts, len(range(0, split, size)), plain_schedule(graph).steps)
