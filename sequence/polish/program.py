"""Checkmate's program with most of a schedule given: what of a few ops runs again, and when.

The order in which ops run for the first time is the schedule's, and so is what runs again of all other ops.
What these take in memory is simulated once, with nothing counted for the values that are decided on
(*open* values: what the ops in question make and read), and stands on the right side of the rows. Unlike in
:mod:`hybridremat.sequence.checkmate.program` an op may write over an open value. A value stays as it is from
one stage to the next where nothing can read or make it, so its variable is the same there; only rows that
can be broken are kept; and states of generators, which random ops need to run again, are counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.graph.memory import MemorySimulator
from hybridremat.sequence.checkmate.program import CheckmateProgram

Runs = frozenset[tuple[int, int]]
"""Pairs of a stage and an op that runs again in it."""


@dataclass
class PolishProgram(CheckmateProgram):
    """The program for one limit in bytes.

    ``given``: what runs again in the schedule. ``open_ops``: the ops that are decided on. ``open_runs``: when
    these may run again.
    """

    given: Runs = frozenset()
    open_ops: frozenset[int] = frozenset()
    open_runs: Runs = frozenset()

    def __post_init__(self) -> None:
        graph = self.stages.graph
        touched = (v for op in self.open_ops for v in (*graph.ops[op].reads, *graph.ops[op].writes))
        self._open = frozenset(v for v in touched if graph.values[v].producer is not None)
        self._fixed = frozenset(each for each in self.given if each[1] not in self.open_ops)
        self._outside = self._simulated_outside()
        super().__post_init__()

    @cached_property
    def again(self) -> Sequence[Sequence[int]]:
        """For each stage, the ops that run again in it, or may."""
        found: list[list[int]] = [[] for _ in range(len(self.stages))]
        for stage, op in self._fixed | self.open_runs:
            found[stage].append(op)
        return [sorted(ops, key=self.stages.place.__getitem__) for ops in found]

    def _simulated_outside(self) -> dict[tuple[int, int], int]:
        """The bytes that are not decided on, at each op of each stage."""
        graph, steps, keys, split = self.stages.graph, list[int](), list[tuple[int, int]](), 0
        for stage in range(len(self.stages)):
            for op in (*self.again[stage], self.stages.order[stage]):
                steps.append(op)
                keys.append((stage, op))
            if stage < self.stages.forward:
                split = len(steps)
        memory = MemorySimulator(_without(graph, self._open, self.open_ops))(Schedule(tuple(steps), split))
        return dict(zip(keys, memory.profile, strict=True))

    @cached_property
    def _made(self) -> list[tuple[int, int]]:
        made = ((value, self.graph.values[value].producer) for value in sorted(self._open))
        return [(value, producer) for value, producer in made if producer is not None]

    def _certain(self, stage: int, op: int) -> bool:
        return super()._certain(stage, op) or (stage, op) in self._fixed

    def _add_runs(self) -> None:
        super()._add_runs()
        for each in self._fixed:
            self.program.lower[self.runs[each]] = 1

    def _add_kept(self) -> None:
        """kept[t, v] as far as anything may read v, with one variable for stages that nothing touches."""
        touched: list[set[int]] = [set() for _ in self.graph.values]
        read_last = [-1] * len(self.graph.values)
        for stage in range(len(self.stages)):
            for op in self._ops_of(stage):
                for value in (*self.graph.ops[op].reads, *self.graph.ops[op].writes):
                    touched[value].add(stage)
                for value in self.graph.ops[op].reads:
                    read_last[value] = stage
        for value, op in self._made:
            variable = None
            for stage in range(self.stages.first[op] + 1, self._end(value, read_last[value]) + 1):
                stays = int(self.stages.stays(value, stage))
                new = stage - 1 in touched[value] or variable is None
                if variable is None or new or self.program.lower[variable] != stays:
                    variable = self.program.variable(stays, 1)
                self.kept[stage, value] = variable

    def _end(self, value: int, read_last: int) -> int:
        """The last stage for which a value may be kept."""
        if value in self.graph.gradients | self.graph.held_outputs:
            return len(self.stages)
        released = value in self.graph.released_outputs
        return max(read_last, self.stages.forward) if released else read_last

    def _there(self, stage: int, value: int) -> list[int] | None:
        return super()._there(stage, value) if value in self._open else None

    def _at_most_there(self, variable: int, stage: int, value: int) -> None:
        if self.kept.get((stage, value)) != variable:  # else it is the same from stage to stage
            super()._at_most_there(variable, stage, value)

    def _add_memory(self) -> None:
        """The bytes at each op where they may be more than the limit."""
        self._states = {op: self._replays(op) for op in self.open_ops if self.graph.ops[op].random}
        everything = sum(self.graph.values[value].bytes for value in self._open)
        everything += self.graph.rng_state_bytes * (len(self._states) + 1)
        for stage in range(len(self.stages)):
            for op in self._ops_of(stage):
                spare = self.limit - self._outside[stage, op]
                if everything + self._own(op) > spare:
                    terms, number = self._alive(stage, op)
                    self.program.at_most(terms.items(), spare - number)

    def _replays(self, op: int) -> list[tuple[int, int]]:
        """For each stage in which an op may run again, whether it does there or later, by stage."""
        found: list[tuple[int, int]] = []
        for stage in sorted((stage for stage, other in self.open_runs if other == op), reverse=True):
            variable = self.program.variable()
            self.program.at_most([(self.runs[stage, op], 1), (variable, -1)], 0)
            if found:
                self.program.at_most([(found[-1][1], 1), (variable, -1)], 0)
            found.append((stage, variable))
        return found[::-1]

    def _waiting_states(self, stage: int, op: int) -> Iterator[int]:
        """For each open random op that has run, the variable that says whether it will run again."""
        place, first = self.stages.place, self.stages.first
        for number, replays in self._states.items():
            if first[number] < stage or place[number] <= place[op]:
                here_already = place[number] < place[op]  # its run of this stage, if there is one, is over
                following = bisect_left(replays, (stage + here_already, 0))
                yield from (variable for _, variable in replays[following : following + 1])

    def _own(self, number: int) -> int:
        """The bytes that an op takes while it runs, open ones and what an open op works with."""
        op = self.graph.ops[number]
        written = sum(self.graph.values[value].bytes for value in op.writes if value in self._open)
        return written + (op.temp if number in self.open_ops else 0)

    def _alive(self, stage: int, op: int) -> tuple[dict[int, int], int]:
        """The open bytes alive while an op runs in a stage."""
        place, written_over = self.stages.place, self._written_over(op)
        terms: dict[int, int] = defaultdict(int)
        number = 0
        state, runs = self.graph.rng_state_bytes, self.runs.get((stage, op))
        replayed = state if runs is not None and op in self._states else 0
        counted = [(runs, self._own(op) + replayed)]
        counted += [(variable, state) for variable in self._waiting_states(stage, op)]
        for value, producer in self._made:
            size = self.graph.values[value].bytes
            if place[producer] >= place[op]:
                before = self._kept_or_needed(stage, value)
            else:
                before = self._needed_from(stage, value, place[op] + (value == written_over))
            if before is not None:
                counted.append((before, size))
        for variable, size in counted:
            if variable is None or self.program.lower[variable]:
                number += size
            elif size:
                terms[variable] += size
        return terms, number

    def _written_over(self, number: int) -> int | None:
        """The open value that an op may write over; of several values it is the first one."""
        op, graph = self.graph.ops[number], self.graph
        stays = graph.held_outputs | graph.released_outputs | graph.gradients
        first = next((value for value in op.overwrites if value in op.reads and value not in stays), None)
        return first if first in self._open else None


def _without(graph: JointGraph, values: frozenset[int], ops: frozenset[int]) -> JointGraph:
    """A graph in which some values and some ops take nothing."""
    return replace(
        graph,
        values=tuple(replace(each, bytes=0) if each.id in values else each for each in graph.values),
        ops=tuple(
            replace(op, temp=0, overwrites=(), random=False, variants=()) if op.id in ops else op
            for op in graph.ops
        ),
    )
