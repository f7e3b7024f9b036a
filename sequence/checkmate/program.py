"""Checkmate's program over a joint graph, in binary variables and linear rows.

Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica and Gonzalez, "Checkmate: Breaking the Memory Wall with
Optimal Tensor Rematerialization" (MLSys 2020). With t a stage (:mod:`hybridremat.sequence.checkmate.stages`),
c an op, v a value and p(v) the op that makes it:

- runs[t, c]: c runs again in stage t; its new ops run for certain;
- kept[t, v]: v is there when stage t starts;
- what c reads is there or is made in the stage: runs[t, c] ≤ kept[t, v] + runs[t, p(v)];
- what is kept was: kept[t + 1, v] ≤ kept[t, v] + runs[t, p(v)];
- minimize the time of all runs, with the bytes alive at any op of any stage under the limit.

The paper counts memory with products of variables that free a value after its last reader in a stage. Here
needed[t, v, k] ∈ {0, 1} says that v is read at place k of stage t or later, or kept for the next one; it is
at least each of these, so at a place behind the one that makes v, its bytes count just then. The schedules
are the same, and no product is left. A value is a storage and an op may make several, so outputs that must
stay, tangents and workspaces count as they do in :mod:`hybridremat.graph.memory`. Not counted are: writing in
place; generator states; gradients that leave early while they wait, and what whoever takes them allocates; a
second version of an output that stays, where an op with several outputs runs again for another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridremat.sequence.bounds.linear_program import LinearProgram
from hybridremat.sequence.checkmate.stages import Stages


@dataclass
class CheckmateProgram:
    """The program for one limit in bytes; ``most_terms`` bounds what the rows of memory hold in all.

    With ``least_peak`` the peak is what is minimized, in bytes, and ``limit`` one that can be reached.
    Beyond ``most_terms`` rows are left out at the ops that take least: only a relaxation may do that.
    """

    stages: Stages
    limit: int
    least_peak: bool = False
    most_terms: int | None = None

    def __post_init__(self) -> None:
        self.graph, self.program = self.stages.graph, LinearProgram()
        self.runs: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], int] = {}
        self._needed: dict[tuple[int, int, int], int] = {}
        self._add_runs()
        self._add_kept()
        self._add_sources()
        self.peak = self.program.variable(0, self.limit, 1) if self.least_peak else None
        self._add_memory()

    @property
    def again(self) -> Sequence[Sequence[int]]:
        """For each stage, the earlier ops that may run again in it."""
        return self.stages.again

    def runs_in(self, solution: Callable[[int], bool]) -> list[list[int]]:
        """For each stage, what runs again in it; ``solution`` says whether a variable is set."""
        found: list[list[int]] = [[] for _ in range(len(self.stages))]
        for (stage, op), variable in self.runs.items():
            if solution(variable):
                found[stage].append(op)
        return found

    @cached_property
    def _readers(self) -> list[list[int]]:
        """For each value, the ops that read it, by place."""
        place = self.stages.place
        return [sorted(readers, key=place.__getitem__) for readers in self.graph.readers()]

    @cached_property
    def _made(self) -> list[tuple[int, int]]:
        """The values that ops make, with the op."""
        return [(value.id, value.producer) for value in self.graph.values if value.producer is not None]

    @cached_property
    def _tangent_bytes(self) -> int:
        return sum(value.bytes for value in self.graph.values if value.tangent)

    def _possible(self, stage: int, op: int) -> bool:
        """Whether an op runs in a stage, or may."""
        return self.stages.first[op] == stage or (stage, op) in self.runs

    def _certain(self, stage: int, op: int) -> bool:
        """Whether an op runs in a stage, whatever is decided."""
        return self.stages.first[op] == stage

    def _add_runs(self) -> None:
        for stage, again in enumerate(self.again):
            for op in again:
                cost = 0 if self.least_peak else self.graph.ops[op].time
                self.runs[stage, op] = self.program.variable(0, 1, cost)

    def _add_kept(self) -> None:
        """kept[t, v] where something in stage t or later may read it; the last stage plus one is the end."""
        last = list(self.stages.first)  # the last stage in which each op may run
        for stage, again in enumerate(self.again):
            for repeated in again:
                last[repeated] = stage
        for value, op in self._made:
            end = max((last[reader] for reader in self._readers[value]), default=-1)
            if value in self.graph.released_outputs:
                end = max(end, self.stages.forward)
            if value in self.graph.gradients | self.graph.held_outputs:
                end = len(self.stages)
            for stage in range(self.stages.first[op] + 1, end + 1):
                self.kept[stage, value] = self.program.variable(int(self.stages.stays(value, stage)), 1)

    def _add_sources(self) -> None:
        """What runs again, and what is kept, needs something there or made in the stage."""
        for (stage, op), runs in self.runs.items():
            for value in set(self.graph.ops[op].reads):
                self._at_most_there(runs, stage, value)
        for (stage, value), kept in self.kept.items():
            self._at_most_there(kept, stage - 1, value)
        for new in self.stages.order:
            for value in set(self.graph.ops[new].reads):
                self._require_there(self.stages.first[new], value)

    def _there(self, stage: int, value: int) -> list[int] | None:
        """The variables of which one makes a value be there in a stage; None if it is for certain."""
        producer = self.graph.values[value].producer
        if producer is None or self.stages.first[producer] == stage:
            return None
        both = (self.kept.get((stage, value)), self.runs.get((stage, producer)))
        return [variable for variable in both if variable is not None]

    def _at_most_there(self, variable: int, stage: int, value: int) -> None:
        if (there := self._there(stage, value)) is not None:
            self.program.at_most([(variable, 1), *((each, -1) for each in there)], 0)

    def _require_there(self, stage: int, value: int) -> None:
        if (there := self._there(stage, value)) is not None:
            self.program.at_most([(each, -1) for each in there], -1)

    def _add_memory(self) -> None:
        """The bytes alive at each op that runs, or may, in each stage."""
        places = [(stage, op) for stage in range(len(self.stages)) for op in self._ops_of(stage)]
        if self.most_terms is not None:
            places = self._heaviest(places, self.most_terms)
        for stage, op in places:
            terms, number = self._alive(stage, op)
            if self.peak is not None:
                terms[self.peak] = -1
            spare = (0 if self.peak is not None else self.limit) - number
            self.program.at_most(terms.items(), spare)

    def _ops_of(self, stage: int) -> Iterator[int]:
        yield from self.again[stage]
        yield from self.stages.order[self.stages.starts[stage] : self.stages.starts[stage + 1]]

    def _heaviest(self, places: list[tuple[int, int]], most_terms: int) -> list[tuple[int, int]]:
        """The new ops of the stages first, then by what they take, up to so many terms."""
        rows = max(1, most_terms // max(1, len(self._made)))

        def weight(each: tuple[int, int]) -> tuple[bool, int]:
            op = self.graph.ops[each[1]]
            new = self.stages.first[op.id] == each[0]
            return new, op.temp + sum(self.graph.values[value].bytes for value in op.writes)

        return sorted(places, key=weight, reverse=True)[:rows]

    def _alive(self, stage: int, op: int) -> tuple[dict[int, int], int]:
        """The bytes alive while an op runs in a stage."""
        graph, place = self.graph, self.stages.place
        backward = stage >= self.stages.forward
        number = self._tangent_bytes if backward else 0
        terms: dict[int, int] = defaultdict(int)
        again = self.runs.get((stage, op))
        own = graph.ops[op].temp + sum(graph.values[value].bytes for value in graph.ops[op].writes)
        if again is None:
            number += own
        else:
            terms[again] += own
        for value, producer in self._made:
            size = graph.values[value].bytes
            if place[producer] >= place[op]:
                before = self._kept_or_needed(stage, value)
            else:
                before = self._needed_from(stage, value, place[op])
            if before is not None and size:
                if self.program.lower[before]:
                    number += size
                else:
                    terms[before] += size
        return terms, number

    def _kept_or_needed(self, stage: int, value: int) -> int | None:
        """The variable that says that a value is there that is not made yet, in the plain order."""
        kept = self.kept.get((stage, value))
        if kept is None or value in self.graph.held_outputs or not self.program.lower[kept]:
            return kept
        return self._needed_from(stage, value, -1)

    def _needed_from(self, stage: int, value: int, place: int) -> int | None:
        """The variable that says that a value is read at a place of a stage or later; None if it never is."""
        following = self.kept.get((stage + 1, value))
        if following is not None and self.program.lower[following] and self.stages.stays(value, stage + 1):
            return following
        readers = [
            reader
            for reader in self._readers[value]
            if self.stages.place[reader] >= place and self._possible(stage, reader)
        ]
        return self._needed_by(stage, value, readers, following)

    def _needed_by(self, stage: int, value: int, readers: list[int], following: int | None) -> int | None:
        """The variable that is at least each of these readers' runs, and ``following``."""
        rest = following
        for number in reversed(range(len(readers))):
            key = stage, value, self.stages.place[readers[number]]
            if key not in self._needed:
                certain = any(self._certain(stage, reader) for reader in readers[number:])
                self._needed[key] = needed = self.program.variable(int(certain), 1)
                for each in (rest, self.runs.get((stage, readers[number]))) if not certain else ():
                    if each is not None:
                        self.program.at_most([(each, 1), (needed, -1)], 0)
            rest = self._needed[key]
        return rest
