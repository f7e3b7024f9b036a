"""Outside memory: what the caller's code and further forwards take beyond the step's own peak.

The caller's code (a loss outside the model) takes nothing while the model's forward runs. Between the phases
it takes up to ``reserve`` bytes on top of what the forward left. When the model's backward starts, the
gradients of the outputs are part of that, and they are counted in the graph; the rest may still be held.

With ``forwards`` = k, up to k forwards wait for their backward: k − 1 sets of saved values and outputs are
alive beside the phase that runs. So are the parameter gradients of the backwards that are over, and adding
the next ones to them takes the largest once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.graph.memory import step_memory


@dataclass(frozen=True)
class OutsideMemory:
    """The caller's part: ``reserve`` bytes between the phases, and ``forwards`` that wait at one time."""

    reserve: int = 0
    forwards: int = 1

    @property
    def none(self) -> bool:
        """Whether the step's own peak is all that is needed."""
        return not self.reserve and self.forwards == 1


NO_OUTSIDE_MEMORY = OutsideMemory()


@dataclass(frozen=True)
class PhasePeaks:
    """Bytes of one step: the peak of each phase, and what is alive between them, outputs included."""

    forward: int
    backward: int
    between: int


def needed_bytes(graph: JointGraph, peaks: PhasePeaks, outside: OutsideMemory) -> int:
    """Most step memory in bytes, outside memory included."""
    beside = outside_phases(graph, peaks.between, outside)
    return max(
        peaks.forward + beside.forward, peaks.between + beside.between, peaks.backward + beside.backward
    )


def outside_phases(graph: JointGraph, between: int, outside: OutsideMemory) -> PhasePeaks:
    """Outside memory during each phase of a step with ``between`` bytes alive between its phases."""
    waiting = (outside.forwards - 1) * between
    held = max(0, outside.reserve - tangent_bytes(graph))
    earlier = _accumulated_bytes(graph) if outside.forwards > 1 else 0
    return PhasePeaks(forward=waiting, between=waiting + outside.reserve, backward=waiting + held + earlier)


def tangent_bytes(graph: JointGraph) -> int:
    """Bytes of the gradients that the backward is given."""
    return sum(value.bytes for value in graph.values if value.tangent)


def _accumulated_bytes(graph: JointGraph) -> int:
    sizes = [graph.values[value].bytes for value in graph.gradients]
    return sum(sizes) + max(sizes, default=0)


def schedule_needs(graph: JointGraph, schedule: Schedule, outside: OutsideMemory) -> int:
    """:func:`needed_bytes` of a schedule, outputs taken to be alive between the phases."""
    memory = step_memory(graph, schedule)
    released = sum(graph.values[value].bytes for value in graph.released_outputs)
    split = schedule.num_forward
    peaks = PhasePeaks(
        forward=max(memory.profile[:split], default=0),
        backward=max(memory.profile[split:], default=0),
        between=memory.saved + released,
    )
    return needed_bytes(graph, peaks, outside)
