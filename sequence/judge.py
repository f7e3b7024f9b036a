"""The judge: what a schedule of one graph costs, and whether it is allowed.

It is made once from a graph and what was asked, and is all that a search knows of either: what the user's
pins forbid, what the caller's code and further forwards take around the step. A search returns only what its
judge allows. It adds nothing to the exact count of :mod:`hybridremat.graph.memory` but these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hybridremat.graph.joint import JointGraph, Schedule, host_bytes
from hybridremat.graph.memory import MemorySimulator, StepMemory, schedule_flops, schedule_time
from hybridremat.graph.pins import NO_PINS, Pins, obeys
from hybridremat.sequence.decisions import Decision
from hybridremat.sequence.outside_memory import (
    NO_OUTSIDE_MEMORY,
    Moment,
    OutsideMemory,
    PhasePeaks,
    needed_bytes,
    outside_phases,
)
from hybridremat.sequence.pool import Pool, SchedulePoint

if TYPE_CHECKING:
    from hybridremat.sequence.offload.link import Link


@dataclass(frozen=True)
class Judge:
    """Judges schedules of one graph.

    Attributes
    ----------
    graph
        The joint graph with its costs.
    pins
        Ops that the user wants saved or recomputed.
    outside
        What is alive around the step.
    with_saved
        Whether what a schedule saves counts by itself: others run beside it, as those of several graphs do.
    moments
        Of a whole step of several graphs, whose others are decided; none: the graph is the step.
    link
        How fast values move to host memory and back; None if they do not.
    host_limit
        Bytes of host memory that they may take; None for any.
    """

    graph: JointGraph
    pins: Pins = NO_PINS
    outside: OutsideMemory = NO_OUTSIDE_MEMORY
    with_saved: bool = False
    moments: tuple[Moment, ...] = ()
    link: Link | None = None
    host_limit: int | None = None

    @cached_property
    def simulate(self) -> MemorySimulator:
        """The graph's own count of a schedule's memory."""
        return MemorySimulator(self.graph)

    def with_ops_of(self, graph: JointGraph) -> Judge:
        """The judge of the same graph with ops that are run in other ways."""
        other = replace(self, graph=graph)
        vars(other)["simulate"] = self.simulate.with_ops_of(graph)
        return other

    def without_outside(self, graph: JointGraph) -> Judge:
        """As :meth:`with_ops_of`, and nothing but the step itself counts."""
        other = Judge(graph)
        vars(other)["simulate"] = self.simulate.with_ops_of(graph)
        return other

    def __call__(self, schedule: Schedule, decisions: tuple[Decision, ...] = ()) -> SchedulePoint:
        """The exact figures of a schedule; ``decisions``: what it decides for each block.

        Raises
        ------
        ScheduleError
            If it reads what is not there.
        """
        phases = self.phases(schedule)
        return SchedulePoint(
            phases,
            time=self.time(schedule),
            flops=schedule_flops(self.graph, schedule),
            schedule=schedule,
            needs=self.needs_of(phases),
            decisions=decisions,
            host=self.host_bytes(schedule),
        )

    @property
    def saved_counts(self) -> bool:
        """Whether schedules that save less are worth more time at the same peak."""
        return self.with_saved or self.outside.forwards > 1

    def pool(self, points: Iterable[SchedulePoint], base: Iterable[SchedulePoint] | None = None) -> Pool:
        """What of some points no other beats."""
        return Pool.of(points, base, with_saved=self.with_saved)

    def time(self, schedule: Schedule) -> int:
        """Nanoseconds of all executions, with what they wait for moves."""
        if not schedule.moves:
            return schedule_time(self.graph, schedule)
        from hybridremat.sequence.offload.clocks import timed  # not where nothing moves

        assert self.link is not None, "values move by a link"
        times = [self.graph.op_times[op] for op in schedule.steps]
        return timed(times, schedule.moves, self._moved(schedule), self.link)[0].total

    @property
    def host_room(self) -> int | None:
        """Bytes of host memory for one forward's moves: each that waits for its backward has its own."""
        return None if self.host_limit is None else self.host_limit // self.outside.forwards

    def host_bytes(self, schedule: Schedule) -> int:
        """Bytes of host memory that its moves take in one forward."""
        return host_bytes(self._moved(schedule))

    def _moved(self, schedule: Schedule) -> list[int]:
        return [self.graph.values[move.value].bytes for move in schedule.moves]

    def allows(self, schedule: Schedule) -> bool:
        """Whether a schedule does as the pins ask, in the host memory that there is."""
        fits = self.host_room is None or self.host_bytes(schedule) <= self.host_room
        return fits and obeys(self.graph, schedule, self.pins)

    def phases(self, schedule: Schedule, memory: StepMemory | None = None) -> PhasePeaks:
        """Bytes of the step itself, phase by phase; ``memory``: its own, where it is known."""
        memory, split = memory or self.simulate(schedule), schedule.num_forward
        return PhasePeaks(
            forward=max(memory.profile[:split], default=0),
            backward=max(memory.profile[split:], default=0),
            between=memory.saved + memory.released,
        )

    def needs(self, schedule: Schedule, memory: StepMemory | None = None) -> int:
        """Bytes that have to be there for a schedule; ``memory``: its own, where it is known."""
        return self.needs_of(self.phases(schedule, memory))

    def needs_of(self, phases: PhasePeaks) -> int:
        """Bytes that have to be there for a step of these phases."""
        if self.moments:
            return max(each.needs(phases) for each in self.moments)
        return phases.peak if self.outside.none else needed_bytes(self.graph, phases, self.outside)

    def profile(self, schedule: Schedule, memory: StepMemory | None = None) -> NDArray[np.int64]:
        """Bytes at every execution, with what is alive around the step."""
        memory = memory or self.simulate(schedule)
        beside = self._beside(memory.saved + memory.released)
        profile = np.array(memory.profile, np.int64)
        profile[: schedule.num_forward] += beside.forward
        profile[schedule.num_forward :] += beside.backward
        return profile

    def beyond(self, schedule: Schedule, limit: int) -> tuple[int, int]:
        """Bytes that a schedule is beyond a limit (0 or less: it fits), and the execution where most is."""
        memory = self.simulate(schedule)
        if self.outside.none and not self.moments:
            return memory.peak - limit, memory.peak_at
        needs, profile = self.needs(schedule, memory), self.profile(schedule, memory)
        saved_too_much = self.moments and profile.max() < needs
        top = min(schedule.num_forward, len(profile) - 1) if saved_too_much else int(np.argmax(profile))
        return needs - limit, top

    @property
    def copies(self) -> int:
        """How many times what a schedule saves is there at most."""
        return max(self.outside.forwards, *(1 + each.saved for each in self.moments), 1)

    def saved_limit(self, limit: int) -> int | None:
        """Most bytes that a schedule may save for what others take while it waits; None for any."""
        others = (each for each in self.moments if each.phase == "other" and each.saved)
        return min(((limit - each.bytes) // each.saved for each in others), default=None)

    def phase_limits(self, limit: int) -> tuple[int, int]:
        """Bytes that are the step's own in the forward and in the backward, whatever it saves."""
        beside = self._beside(0)
        return limit - beside.forward, limit - beside.backward

    def _beside(self, between: int) -> PhasePeaks:
        """Bytes beside each phase of the graph that saves so many."""
        if not self.moments:
            return outside_phases(self.graph, between, self.outside)
        forward, backward = (
            max(each.beside(between) for each in self.moments if each.phase == phase)
            for phase in ("forward", "backward")
        )
        return PhasePeaks(forward, backward, 0)
