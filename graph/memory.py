"""Exact memory of a flat schedule, op by op.

The rules (they predict measured peaks to the byte on CPU):

- a value is one storage and every execution of its producer makes a new version of it; a version
  dies after its last reader;
- the first version of a held output and the last version of a gradient live to the end of the step;
  the first version of a released output lives at least to the end of the forward;
- the last version of a gradient that leaves early (``JointGraph.deliveries``) lives to the last execution
  that reads it or its parameter, and then until whoever takes it, with a workspace, is done;
- graph inputs cost nothing; tangents are alive during the whole backward;
- the memory at an execution is what is alive, its outputs included, plus its workspace;
- an op that may overwrite something that it reads (``Op.overwrites``) does so where this version dies with
  it and is no output of the step: of several the first one. The output then takes its storage over, so the
  version is gone one execution earlier;
- a random op that runs more than once keeps its generator state from its first run to its last;
- a version that moves to host memory (``Schedule.moves``) is not on the device from ``free`` to right before
  ``fetch``, however fast the link is.

Hundreds of schedules of one graph are replayed for one plan, so the replay works on arrays.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridremat.graph.joint import Delivery, JointGraph, Schedule

Integers = NDArray[np.int64]


def inputs_read(graph: JointGraph, schedule: Schedule) -> frozenset[int]:
    """The graph inputs that the backward reads, or what it computes again."""
    read = {value for op in schedule.steps[schedule.num_forward :] for value in graph.ops[op].reads}
    return frozenset(value for value in read if graph.values[value].producer is None)


def inputs_in_backward(graph: JointGraph, schedule: Schedule, inputs: frozenset[int]) -> int:
    """Bytes of some of them."""
    return sum(graph.values[value].bytes for value in inputs & inputs_read(graph, schedule))


class ScheduleError(ValueError):
    """A schedule reads a value that is not there, or breaks a rule of the joint graph."""


@dataclass(frozen=True)
class StepMemory:
    """Exact figures of one schedule.

    Attributes
    ----------
    peak, peak_at
        Bytes, and the index in ``schedule.steps`` where it is reached.
    saved
        Bytes alive across the boundary between forward and backward (outputs that stay included).
    profile
        Bytes at every execution.
    released
        Bytes of outputs that the caller drops there, and the backward does not read.
    """

    peak: int
    peak_at: int
    saved: int
    profile: tuple[int, ...]
    released: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A version that is made in the forward, and waits for a reader in the backward.

    ``last``: its last reader in the forward, ``birth`` without any; ``first``: that in the backward.
    """

    value: int
    bytes: int
    birth: int
    last: int
    first: int


@dataclass(frozen=True, slots=True)
class _Lists:
    """Lists of integers, one for each op, laid end to end: op i has ``items[start[i]:start[i+1]]``."""

    start: Integers
    items: Integers

    @staticmethod
    def of(lists: list[list[int]]) -> _Lists:
        start = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return _Lists(start, np.array([item for items in lists for item in items], np.int64))

    def along(self, steps: Integers) -> tuple[Integers, Integers]:
        """The items of every execution in turn, and the index of the execution that each belongs to."""
        length = self.start[steps + 1] - self.start[steps]
        now = np.repeat(np.arange(len(steps)), length)
        within = np.arange(len(now)) - np.repeat(np.cumsum(length) - length, length)
        return self.items[self.start[steps][now] + within], now


@dataclass(frozen=True, slots=True)
class _Lifetimes:
    """Versions and states that are alive from execution ``birth`` to execution ``death``, both included."""

    size: Integers
    birth: Integers
    death: Integers


@dataclass(frozen=True, slots=True)
class _Versions:
    """Every version of every value, sorted by value and birth, and what it is to the step.

    ``leaving``: for each delivery, the version that leaves.
    """

    value: Integers
    birth: Integers
    death: Integers
    keys: Integers
    returned: NDArray[np.bool_]
    leaving: Integers

    @property
    def first(self) -> NDArray[np.bool_]:
        """Which are the first of their value."""
        new: NDArray[np.bool_] = np.diff(self.value, prepend=-1) != 0
        return new

    def read(self, value: Integers, now: Integers, end: int) -> Integers:
        """The versions that reads see: of each the last one born before it."""
        found: Integers = np.searchsorted(self.keys, value * (end + 1) + now) - 1
        return found


@dataclass(frozen=True, slots=True)
class _Takeovers:
    """Executions that write over one of the versions, and which."""

    now: Integers
    version: Integers


class MemorySimulator:
    """Replays schedules of one graph and counts their bytes."""

    def __init__(self, graph: JointGraph) -> None:
        self._graph = graph
        made = [value.producer is not None for value in graph.values]
        self._reads = _Lists.of([[v for v in op.reads if made[v]] for op in graph.ops])
        self._writes = _Lists.of([list(op.writes) for op in graph.ops])
        self._read_ops(graph)
        self._bytes = np.array([value.bytes for value in graph.values], np.int64)
        self._random = np.array([op.random for op in graph.ops], bool)
        self._held = self._marks(graph.held_outputs)
        self._released = self._marks(graph.released_outputs)
        self._gradients = self._marks(graph.gradients)
        taken = graph.deliveries
        self._leaving = np.array([each.gradient for each in taken], np.int64)
        self._workspace = np.array([each.workspace for each in taken], np.int64)
        self._parameter_readers = _readers_of_inputs(graph, [each.parameter for each in taken])
        self._tangent_bytes = sum(value.bytes for value in graph.values if value.tangent)

    def _read_ops(self, graph: JointGraph) -> None:
        """Read what depends on how each op is run."""
        self._overwrites = _Lists.of([list(op.overwrites) for op in graph.ops])
        self._temp = np.array([op.temp for op in graph.ops], np.int64)

    def with_ops_of(self, graph: JointGraph) -> MemorySimulator:
        """The simulator of the same graph with ops that are run in other ways."""
        other = copy(self)
        other._graph = graph
        other._read_ops(graph)
        return other

    def __call__(self, schedule: Schedule) -> StepMemory:
        """Replay ``schedule`` and return its exact memory.

        Raises
        ------
        ScheduleError
            If an execution reads a value that no earlier execution wrote.
        """
        return self.replay(schedule)[0]

    def replay(self, schedule: Schedule) -> tuple[StepMemory, dict[int, int]]:
        """The memory of ``schedule``, and what :meth:`overwritten` returns.

        Raises
        ------
        ScheduleError
            If an execution reads a value that no earlier execution wrote.
        """
        steps, split, end = np.array(schedule.steps, np.int64), schedule.num_forward, len(schedule.steps)
        if not end:
            return StepMemory(0, 0, 0, ()), {}
        change, gone = np.zeros(end + 2, np.int64), np.zeros(end + 2, np.int64)
        saved = 0
        states, replayed = self._generator_states(steps)
        versions = self._lifetimes(steps, split)
        takeovers = self._takeovers(steps, versions)
        for lifetimes in (self._spans(versions, takeovers), states):
            np.add.at(change, lifetimes.birth, lifetimes.size)
            np.add.at(gone, np.minimum(lifetimes.death, end) + 1, lifetimes.size)
            saved += int(lifetimes.size[(lifetimes.birth < split) & (split <= lifetimes.death)].sum())
        saved -= self._move(change, schedule) if schedule.moves else 0
        # what the first execution of the backward writes over is saved as well
        first = takeovers.version[takeovers.now == split]
        saved += int(self._bytes[versions.value[first]][versions.birth[first] < split].sum())
        released = versions.first & self._released[versions.value] & (versions.death < split)
        change -= gone
        change[split] += self._tangent_bytes
        level = np.cumsum(change[:end])
        profile = level + self._temp[steps]
        # a replay holds the generator's current state aside
        profile[replayed] += self._graph.rng_state_bytes
        after = level - gone[1 : end + 1]
        after[takeovers.now - 1] += self._bytes[versions.value[takeovers.version]]
        self._deliver(profile, after, versions)
        peak_at = int(np.argmax(profile))
        memory = StepMemory(
            int(profile[peak_at]),
            peak_at,
            saved,
            tuple(profile.tolist()),
            int(self._bytes[versions.value[released]].sum()),
        )
        return memory, self._by_execution(takeovers, versions)

    def waiting(self, schedule: Schedule, least: int = 1) -> list[Waiting]:
        """The versions of at least so many bytes that wait from the forward for the backward, by birth.

        Without those that are returned: the caller has them, too.

        Raises
        ------
        ScheduleError
            If an execution reads a value that no earlier execution wrote.
        """
        steps, split = np.array(schedule.steps, np.int64), schedule.num_forward
        versions = self._lifetimes(steps, split)
        read, now = self._reads.along(steps)
        seen = versions.read(read, now, len(steps))
        last, first = versions.birth.copy(), np.full(len(versions.value), len(steps))
        ahead = now < split
        np.maximum.at(last, seen[ahead], now[ahead])
        np.minimum.at(first, seen[~ahead], now[~ahead])
        size = self._bytes[versions.value]
        found = (versions.birth < split) & (first < len(steps)) & ~versions.returned & (size >= least)
        columns = (versions.value, size, versions.birth, last, first)
        rows = zip(*(column[found].tolist() for column in columns), strict=True)
        return sorted((Waiting(*row) for row in rows), key=lambda each: (each.birth, each.value))

    def _move(self, change: Integers, schedule: Schedule) -> int:
        """Take what moves off a running change of bytes; the bytes that are not saved for it."""
        split, taken = schedule.num_forward, 0
        known = {(each.value, each.birth): each for each in self.waiting(schedule)}
        for move in schedule.moves:
            each = known.pop((move.value, move.birth), None)
            if each is None or not each.last < move.free <= split <= move.fetch <= move.ready == each.first:
                name = self._graph.values[move.value].name or move.value
                raise ScheduleError(f"{name}, made by step {move.birth}, does not wait where {move} takes it")
            change[move.free] -= each.bytes
            change[move.fetch] += each.bytes
            taken += each.bytes
        return taken

    def _marks(self, values: frozenset[int]) -> NDArray[np.bool_]:
        marks = np.zeros(len(self._graph.values), bool)
        marks[list(values)] = True
        return marks

    def overwritten(self, schedule: Schedule) -> dict[int, int]:
        """For each execution that writes its output over something that it reads, the value that goes.

        Raises
        ------
        ScheduleError
            If an execution reads a value that no earlier execution wrote.
        """
        return self.replay(schedule)[1]

    @staticmethod
    def _by_execution(takeovers: _Takeovers, versions: _Versions) -> dict[int, int]:
        """The value that goes in each execution that writes over one."""
        values = versions.value[takeovers.version]
        return dict(zip(takeovers.now.tolist(), values.tolist(), strict=True))

    def alive_beyond(self, schedule: Schedule, now: int) -> list[int]:
        """The values that are made before an execution and needed after it, ascending.

        Raises
        ------
        ScheduleError
            If an execution reads a value that no earlier execution wrote.
        """
        versions = self._lifetimes(np.array(schedule.steps, np.int64), schedule.num_forward)
        found: list[int] = versions.value[(versions.birth < now) & (now < versions.death)].tolist()
        return found

    def read_in_backward(self, schedule: Schedule, values: frozenset[int]) -> int:
        """Bytes of those of some values whose first version is read in the backward.

        Raises
        ------
        ScheduleError
            If an execution reads a value that no earlier execution wrote.
        """
        versions = self._lifetimes(np.array(schedule.steps, np.int64), schedule.num_forward)
        found = versions.first & self._marks(values)[versions.value]
        found &= versions.death >= schedule.num_forward
        return int(self._bytes[versions.value[found]].sum())

    def departures(self, schedule: Schedule) -> dict[int, list[Delivery]]:
        """For each execution after which gradients leave, these in order.

        Raises
        ------
        ScheduleError
            If an execution reads a value that no earlier execution wrote.
        """
        versions = self._lifetimes(np.array(schedule.steps, np.int64), schedule.num_forward)
        found: dict[int, list[Delivery]] = {}
        for now, each in zip(versions.death[versions.leaving].tolist(), self._graph.deliveries, strict=True):
            found.setdefault(now, []).append(each)
        return found

    def _deliver(self, profile: Integers, after: Integers, versions: _Versions) -> None:
        """Raise a profile to what is alive while gradients leave; ``after`` each execution, the rest is."""
        when = versions.death[versions.leaving]
        order = np.argsort(when, kind="stable")
        when, waiting = when[order], np.cumsum(self._bytes[self._leaving[order]])
        together = np.searchsorted(when, when, side="right") - 1
        waiting = waiting[together] - waiting + self._bytes[self._leaving[order]]
        np.maximum.at(profile, when, after[when] + waiting + self._workspace[order])

    def _spans(self, versions: _Versions, takeovers: _Takeovers) -> _Lifetimes:
        """Lifetimes of all versions, without what is written over in their last execution."""
        death = versions.death.copy()
        death[takeovers.version] -= 1
        return _Lifetimes(self._bytes[versions.value], versions.birth, death)

    def _lifetimes(self, steps: Integers, split: int) -> _Versions:
        """All versions, each to its last reader or the end of what holds it."""
        end = len(steps)
        value, birth = self._writes.along(steps)
        order = np.argsort(value, kind="stable")
        value, birth = value[order], birth[order]
        new = np.diff(value, prepend=-1) != 0
        last = np.diff(value, append=-1) != 0
        held, released = new & self._held[value], new & self._released[value]
        returned = held | released | (last & self._gradients[value])
        leaving = np.searchsorted(value, self._leaving, side="right") - 1
        returned[leaving] = True
        versions = _Versions(value, birth, birth.copy(), value * (end + 1) + birth, returned, leaving)
        read, now = self._reads.along(steps)
        version = versions.read(read, now, end)
        missing = (version < 0) | (value[version] != read) if len(value) else np.ones(len(read), bool)
        if missing.any():
            self._refuse(steps, int(now[missing][0]), int(read[missing][0]))
        death = versions.death
        np.maximum.at(death, version, now)
        death[released] = np.maximum(death[released], split - 1)
        death[held | (last & self._gradients[value])] = end
        if len(leaving):
            last_run = np.full(len(self._graph.ops) + 1, -1, np.int64)
            last_run[steps] = np.arange(end)  # of several runs of an op, numpy keeps the last
            reader, delivery = self._parameter_readers
            np.maximum.at(death, leaving[delivery], last_run[reader])
        return versions

    def _takeovers(self, steps: Integers, versions: _Versions) -> _Takeovers:
        """The executions that write over a version that dies with them."""
        value, now = self._overwrites.along(steps)
        version = versions.read(value, now, len(steps))
        dies = (versions.death[version] == now) & ~versions.returned[version]
        now, first = np.unique(now[dies], return_index=True)
        return _Takeovers(now, version[dies][first])

    def _refuse(self, steps: Integers, now: int, value: int) -> None:
        op, name = self._graph.ops[steps[now]].name, self._graph.values[value].name or value
        raise ScheduleError(f"step {now} ({op}) reads {name}, which was not computed before")

    def _generator_states(self, steps: Integers) -> tuple[_Lifetimes, Integers]:
        """Lifetimes of the saved generator states, and the executions that replay one."""
        runs: dict[int, list[int]] = {}
        for now in np.flatnonzero(self._random[steps]).tolist():
            runs.setdefault(int(steps[now]), []).append(now)
        again = [r for r in runs.values() if len(r) > 1]
        size = np.full(len(again), self._graph.rng_state_bytes, np.int64)
        birth, death = (np.array([r[i] for r in again], np.int64) for i in (0, -1))
        return _Lifetimes(size, birth, death), np.array([now for r in again for now in r[1:]], np.int64)


def _readers_of_inputs(graph: JointGraph, inputs: list[int]) -> tuple[Integers, Integers]:
    """The ops that read each of some graph inputs, and which of these it is."""
    readers = graph.readers()
    pairs = [(op, place) for place, value in enumerate(inputs) for op in readers[value]]
    found = np.array(pairs, np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def step_memory(graph: JointGraph, schedule: Schedule) -> StepMemory:
    """Replay ``schedule`` and return its exact memory. For many schedules of a graph, keep a simulator.

    Raises
    ------
    ScheduleError
        If an execution reads a value that no earlier execution wrote.
    """
    return MemorySimulator(graph)(schedule)


def schedule_time(graph: JointGraph, schedule: Schedule) -> int:
    """Nanoseconds of all executions."""
    return sum(map(graph.op_times.__getitem__, schedule.steps))


def schedule_flops(graph: JointGraph, schedule: Schedule) -> int:
    """Matrix-product, convolution and attention flops of all executions."""
    return sum(map(graph.op_flops.__getitem__, schedule.steps))
