"""Exact memory of a flat schedule, op by op.

The rules (they predict measured peaks to the byte on CPU):

- a value is one storage and every execution of its producer makes a new version of it; a version
  dies after its last reader;
- the first version of a held output and the last version of a gradient live to the end of the step;
  the first version of a released output lives at least to the end of the forward;
- graph inputs cost nothing; tangents are alive during the whole backward;
- the memory at an execution is what is alive, its outputs included, plus its temporary;
- a random op that runs more than once keeps its generator state from its first run to its last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from hybridremat.graph.joint import JointGraph, Schedule


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
    """

    peak: int
    peak_at: int
    saved: int
    profile: tuple[int, ...]


def _lifetimes(graph: JointGraph, schedule: Schedule) -> list[tuple[int, int, int]]:
    """(bytes, first index, last index) for every version of every value."""
    values, ops = graph.values, graph.ops
    end = len(schedule.steps)
    current: dict[int, int] = {}
    first: dict[int, int] = {}
    birth: list[int] = []
    death: list[int] = []
    value_of: list[int] = []
    for now, op_id in enumerate(schedule.steps):
        op = ops[op_id]
        for value in op.reads:
            if values[value].producer is None:
                continue
            version = current.get(value)
            if version is None:
                raise ScheduleError(
                    f"step {now} ({op.name}) reads {values[value].name or value}, which was not computed before"
                )
            death[version] = now
        for value in op.writes:
            current[value] = len(birth)
            first.setdefault(value, len(birth))
            birth.append(now)
            death.append(now)
            value_of.append(value)
    for value in graph.released_outputs & first.keys():
        death[first[value]] = max(death[first[value]], schedule.num_forward - 1)
    for value in graph.held_outputs & first.keys():
        death[first[value]] = end
    for value in graph.gradients & current.keys():
        death[current[value]] = end
    return [(values[v].bytes, b, d) for v, b, d in zip(value_of, birth, death, strict=True)]


def _generator_states(graph: JointGraph, schedule: Schedule) -> list[tuple[int, int, int]]:
    """Lifetimes of the saved generator states."""
    runs: dict[int, list[int]] = {}
    for now, op_id in enumerate(schedule.steps):
        if graph.ops[op_id].random:
            runs.setdefault(op_id, []).append(now)
    return [(graph.rng_state_bytes, r[0], r[-1]) for r in runs.values() if len(r) > 1]


def step_memory(graph: JointGraph, schedule: Schedule) -> StepMemory:
    """Replay ``schedule`` and return its exact memory.

    Raises
    ------
    ScheduleError
        If an execution reads a value that no earlier execution wrote.
    """
    steps, split, end = schedule.steps, schedule.num_forward, len(schedule.steps)
    change = [0] * (end + 2)
    saved = 0
    lifetimes = _lifetimes(graph, schedule) + _generator_states(graph, schedule)
    lifetimes += [(v.bytes, split, end) for v in graph.values if v.tangent]
    for size, birth, death in lifetimes:
        change[birth] += size
        change[min(death, end) + 1] -= size
        if birth < split <= death:
            saved += size
    levels = accumulate(change[:end])
    seen: Counter[int] = Counter()
    profile = []
    for op_id, level in zip(steps, levels, strict=True):
        op = graph.ops[op_id]
        replay = 2 * graph.rng_state_bytes if op.random and seen[op_id] else 0
        seen[op_id] += 1
        profile.append(level + op.temp + replay)
    peak_at = max(range(end), key=profile.__getitem__, default=0)
    return StepMemory(profile[peak_at] if profile else 0, peak_at, saved, tuple(profile))


def schedule_time(graph: JointGraph, schedule: Schedule) -> int:
    """Nanoseconds of all executions."""
    return sum(graph.ops[op].time for op in schedule.steps)


def schedule_flops(graph: JointGraph, schedule: Schedule) -> int:
    """Matrix-product, convolution and attention flops of all executions."""
    return sum(graph.ops[op].flops for op in schedule.steps)
