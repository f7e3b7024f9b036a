"""Changes of a flat schedule: an execution less, a value made again, an op earlier or later.

Each returns another schedule that computes the same, or nothing. What that takes in memory is for the
simulator to say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from hybridremat.graph.joint import JointGraph, Op, Phase, Schedule
from hybridremat.sequence.dead_code import DeadCodeElimination


class Version(NamedTuple):
    """One version of a value: the executions (their places) that make it and that read it, in order."""

    value: int
    birth: int
    reads: tuple[int, ...]


class Versions:
    """All versions of a schedule, those of each value once they are asked for.

    ``readers``: of every value (:meth:`JointGraph.readers`), where there are many schedules.
    """

    def __init__(
        self, graph: JointGraph, steps: Sequence[int], readers: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._graph = graph
        self._readers = graph.readers() if readers is None else readers
        self._places: list[list[int]] = [[] for _ in graph.ops]
        for now, op in enumerate(steps):
            self._places[op].append(now)
        self._known: dict[int, list[Version]] = {}

    def __iter__(self) -> Iterator[Version]:
        for value in self._graph.values:
            yield from self.of(value.id)

    def of(self, value: int) -> list[Version]:
        """The versions of a value, in order; none of a graph input."""
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: int) -> list[Version]:
        producer = self._graph.values[value].producer
        births = [] if producer is None else self._places[producer]
        reads = sorted(now for op in set(self._readers[value]) for now in self._places[op])
        first = [bisect_right(reads, birth) for birth in births]
        return [
            Version(value, birth, tuple(reads[start:end]))
            for birth, (start, end) in zip(births, pairwise((*first, len(reads))), strict=True)
        ]

    def at(self, value: int, now: int) -> Version | None:
        """The version of a value that an execution at ``now`` would read."""
        producer = self._graph.values[value].producer
        place = -1 if producer is None else bisect_right(self._places[producer], now - 1) - 1
        return self.of(value)[place] if place >= 0 else None

    def alive(self, value: int, now: int) -> bool:
        """Whether a version is there at ``now`` and read then or later."""
        version = self.at(value, now)
        return version is not None and bool(version.reads) and version.reads[-1] >= now


class Edits:
    """Changes of schedules of one graph."""

    def __init__(self, graph: JointGraph, rebuilt: frozenset[int] = frozenset()) -> None:
        self._graph = graph
        self._readers = graph.readers()
        self._remove_dead = DeadCodeElimination(graph, rebuilt)
        self._held = graph.held_outputs

    def versions(self, schedule: Schedule) -> Versions:
        """All versions of a schedule."""
        return Versions(self._graph, schedule.steps, self._readers)

    def only_for(self, schedule: Schedule, versions: Versions, now: int) -> frozenset[int]:
        """The place of an execution of the backward, and those of what was only for it.

        In a schedule without dead executions these are the ones that are dead without it.
        """
        gone, pending = {now}, [now]
        while pending:
            reader = pending.pop()
            for value in self._graph.ops[schedule.steps[reader]].reads:
                version = versions.at(value, reader)
                if version is None or version.birth in gone:
                    continue
                made = self._graph.ops[schedule.steps[version.birth]]
                birth = version.birth
                stays = self._remove_dead.stays(made.id, in_forward=birth < schedule.num_forward)
                if not stays and not any(self._is_read(versions, each, birth, gone) for each in made.writes):
                    gone.add(birth)
                    pending.append(birth)
        return frozenset(gone)

    def _is_read(self, versions: Versions, value: int, birth: int, gone: Collection[int]) -> bool:
        """Whether a version is read, or returned, once executions are gone, and later versions with them."""
        for version in (each for each in versions.of(value) if each.birth >= birth):
            if version.birth != birth and version.birth not in gone:
                return False
            if any(read not in gone for read in version.reads):
                return True
        return value in self._graph.gradients  # it is the last version, which is returned

    def without(self, schedule: Schedule, gone: Collection[int]) -> Schedule:
        """The schedule without the executions at some places (:meth:`only_for`)."""
        steps = list(schedule.steps)
        for now in sorted(gone, reverse=True):
            del steps[now]
        return Schedule(tuple(steps), schedule.num_forward - sum(now < schedule.num_forward for now in gone))

    def made_again(self, versions: Versions, value: int, before: int) -> list[int] | None:
        """The ops that have to run for ``value`` to be made anew before an execution; None if they cannot.

        What they read and what is alive there anyway is not made again.
        """
        producer = self._graph.values[value].producer
        needed: set[int] = set()
        pending = [] if producer is None else [producer]
        while pending:
            op = self._graph.ops[pending.pop()]
            if op.id in needed:
                continue
            if op.phase is Phase.BACKWARD or op.mutates or not op.recomputable:
                return None
            needed.add(op.id)
            for read in op.reads:
                source = self._graph.values[read].producer
                there = versions.alive(read, before) and read != value
                if source is not None and not there and read not in self._held:
                    pending.append(source)
        return sorted(needed) or None

    def inserted(self, schedule: Schedule, ops: Sequence[int], before: int) -> Schedule:
        """The schedule with more executions before one of the backward."""
        steps = (*schedule.steps[:before], *ops, *schedule.steps[before:])
        return self._remove_dead(Schedule(steps, schedule.num_forward))

    def advanced(self, schedule: Schedule, versions: Versions, version: Version, to: int) -> Schedule | None:
        """The schedule in which all that still reads a version after ``to`` runs before ``to`` instead."""
        later = [now for now in version.reads if now >= to]
        for now in later:
            op = self._graph.ops[schedule.steps[now]]
            if not movable(op) or not self._ready(versions, op, now, to):
                return None
        moved = [schedule.steps[now] for now in later]
        rest = [step for now, step in enumerate(schedule.steps) if now not in later]
        return Schedule((*rest[:to], *moved, *rest[to:]), schedule.num_forward)

    def _ready(self, versions: Versions, op: Op, now: int, to: int) -> bool:
        """Whether what an execution at ``now`` reads is there before ``to``."""
        found = (versions.at(v, now) for v in op.reads if self._graph.values[v].producer is not None)
        return all(each is not None and each.birth < to for each in found)

    def postponed(
        self, schedule: Schedule, versions: Versions, version: Version, to: int
    ) -> Schedule | None:
        """The schedule in which a version that nothing reads before ``to`` is made right before that."""
        born = version.birth
        op = self._graph.ops[schedule.steps[born]]
        if not movable(op) or (op.phase is not Phase.BACKWARD and born < schedule.num_forward):
            return None
        first = [versions.at(value, born + 1) for value in op.writes]
        if any(each is not None and each.reads and each.reads[0] < to for each in first):
            return None
        for value in op.reads:  # still the same version there
            if versions.at(value, born) != versions.at(value, to):
                return None
        steps = schedule.steps
        return Schedule((*steps[:born], *steps[born + 1 : to], op.id, *steps[to:]), schedule.num_forward)


def movable(op: Op) -> bool:
    """Whether an op may run at another time: nothing but its inputs says when."""
    return op.recomputable and not op.random and not op.mutates
