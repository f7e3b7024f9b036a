"""Outside memory: what the caller's code and further forwards take on top of the step.

The caller's code (a loss outside the model) takes nothing during the model's forward. Between the phases it
takes up to ``reserve`` bytes, which include the gradients of the outputs. The graph counts these during the
backward; the rest may still be held.

With ``forwards`` = k, up to k forwards wait for their backward: k − 1 sets of saved values and outputs are
alive in addition. So are the parameter gradients of earlier backwards, and accumulating takes the largest
gradient once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.graph.memory import StepMemory, step_memory
from hybridremat.plans.plan_data import PlanData


@dataclass(frozen=True)
class OutsideMemory:
    """``reserve`` bytes between the phases, and the number of ``forwards`` that wait at one time."""

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
    extra = outside_phases(graph, peaks.between, outside)
    return max(peaks.forward + extra.forward, peaks.between + extra.between, peaks.backward + extra.backward)


def outside_phases(graph: JointGraph, between: int, outside: OutsideMemory) -> PhasePeaks:
    """Outside memory during each phase of a step with ``between`` bytes alive between its phases."""
    waiting = (outside.forwards - 1) * between
    tangents = sum(value.bytes for value in graph.values if value.tangent)
    held = max(0, outside.reserve - tangents)
    sizes = [graph.values[value].bytes for value in graph.gradients]
    earlier = sum(sizes) + max(sizes, default=0) if outside.forwards > 1 else 0
    return PhasePeaks(forward=waiting, between=waiting + outside.reserve, backward=waiting + held + earlier)


def schedule_needs(graph: JointGraph, schedule: Schedule, outside: OutsideMemory) -> int:
    """:func:`needed_bytes` of a schedule, with outputs alive between the phases."""
    return memory_needs(graph, outside, schedule, step_memory(graph, schedule))


def memory_needs(graph: JointGraph, outside: OutsideMemory, schedule: Schedule, memory: StepMemory) -> int:
    """:func:`schedule_needs` of a schedule whose memory is known."""
    released = sum(graph.values[value].bytes for value in graph.released_outputs)
    split = schedule.num_forward
    peaks = PhasePeaks(
        forward=max(memory.profile[:split], default=0),
        backward=max(memory.profile[split:], default=0),
        between=memory.saved + released,
    )
    return needed_bytes(graph, peaks, outside)


def profile_with_outside(
    graph: JointGraph, outside: OutsideMemory, schedule: Schedule, memory: StepMemory
) -> NDArray[np.int64]:
    """Bytes at every execution of a schedule whose memory is known, with what is alive around the step."""
    released = sum(graph.values[value].bytes for value in graph.released_outputs)
    beside = outside_phases(graph, memory.saved + released, outside)
    profile = np.array(memory.profile, np.int64)
    profile[: schedule.num_forward] += beside.forward
    profile[schedule.num_forward :] += beside.backward
    return profile


def forward_peak(plan: PlanData) -> int:
    """Most bytes of a plan's forward; where they are not known, of its whole step."""
    if plan.details is None or plan.compiler != "eager":
        return plan.predicted_peak
    profile = step_memory(plan.details.graph, plan.schedule).profile
    return max(profile[: plan.schedule.num_forward], default=0)
