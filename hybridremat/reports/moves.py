"""The moves of a step as its cost model sees them: copies, waits for them, and what waits in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from hybridremat.graph.joint import JointGraph, Move, Schedule
from hybridremat.sequence.offload.clocks import Copy, timed
from hybridremat.sequence.offload.link import Link


@dataclass(frozen=True, slots=True)
class MovedValue:
    """One move: its bytes, and when it is copied to the host and back, in nanoseconds from the start."""

    move: Move
    size: int
    out: Copy
    back: Copy


@dataclass(frozen=True)
class StepMoves:
    """The moves of one graph.

    Attributes
    ----------
    values
        Each of them.
    times
        Nanoseconds of each execution.
    waits_out, waits_back
        By execution, the nanoseconds that are waited before it for copies to the host, and from it.
    """

    values: tuple[MovedValue, ...]
    times: tuple[int, ...]
    waits_out: dict[int, int]
    waits_back: dict[int, int]

    @cached_property
    def waits(self) -> tuple[int, ...]:
        """Nanoseconds that are waited before each execution."""
        places = range(len(self.times))
        return tuple(self.waits_out.get(now, 0) + self.waits_back.get(now, 0) for now in places)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Nanoseconds at which each execution starts, and at which the last one ends."""
        return starts(self.times, self.waits)


def starts(times: Sequence[int], waits: Sequence[int]) -> tuple[int, ...]:
    """When executions start that take so long and wait so long before, and when the last one ends."""
    ends = accumulate((wait + time for time, wait in zip(times, waits, strict=True)), initial=0)
    return tuple(end + wait for end, wait in zip(ends, (*waits, 0), strict=True))


def step_moves(graph: JointGraph, schedule: Schedule, link: Link | None) -> StepMoves:
    """The moves of a schedule by a link; it has none where there is no link."""
    times = tuple(map(graph.op_times.__getitem__, schedule.steps))
    if link is None or not schedule.moves:
        return StepMoves((), times, {}, {})
    sizes = [graph.values[move.value].bytes for move in schedule.moves]
    took, out, back = timed(times, schedule.moves, sizes, link)
    values = map(MovedValue, schedule.moves, sizes, out, back)
    return StepMoves(tuple(values), times, took.before_out, took.before_back)
