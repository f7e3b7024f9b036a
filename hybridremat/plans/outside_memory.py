"""What the step needs beyond its own peak: the caller's code between the phases, and further forwards.

The caller's code (a loss outside the model) has nothing while the model's forward runs. Between the phases
it has up to ``reserve`` bytes beside what the forward left. When the model's backward starts, the gradients
of the outputs are part of what it had, and they are counted in the graph; the rest may still be held.

With ``forwards`` = k, up to k forwards wait for their backward: k − 1 sets of saved values and outputs lie
beside the phase that runs. The parameter gradients of the backwards that are over lie there too, and adding
the next ones to them takes the largest once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.graph.memory import step_memory


@dataclass(frozen=True)
class Demands:
    """What the caller does beyond one forward and its backward; ``reserve`` in bytes."""

    reserve: int = 0
    forwards: int = 1

    @property
    def none(self) -> bool:
        """Whether the step's own peak is all that is needed."""
        return not self.reserve and self.forwards == 1


NOTHING = Demands()


@dataclass(frozen=True)
class PhasePeaks:
    """Bytes of one step: the peak of each phase, and what lies between them, outputs included."""

    forward: int
    backward: int
    between: int


def needed_bytes(graph: JointGraph, peaks: PhasePeaks, demands: Demands) -> int:
    """Most step memory in bytes, with what the caller does."""
    beside = beside_phases(graph, peaks.between, demands)
    return max(
        peaks.forward + beside.forward, peaks.between + beside.between, peaks.backward + beside.backward
    )


def beside_phases(graph: JointGraph, between: int, demands: Demands) -> PhasePeaks:
    """Bytes that lie beside each phase of a step, and beside what is alive ``between`` them (bytes)."""
    waiting = (demands.forwards - 1) * between
    held = max(0, demands.reserve - tangent_bytes(graph))
    earlier = _accumulated_bytes(graph) if demands.forwards > 1 else 0
    return PhasePeaks(forward=waiting, between=waiting + demands.reserve, backward=waiting + held + earlier)


def tangent_bytes(graph: JointGraph) -> int:
    """Bytes of the gradients that the backward is given."""
    return sum(value.bytes for value in graph.values if value.tangent)


def _accumulated_bytes(graph: JointGraph) -> int:
    sizes = [graph.values[value].bytes for value in graph.gradients]
    return sum(sizes) + max(sizes, default=0)


def schedule_needs(graph: JointGraph, schedule: Schedule, demands: Demands) -> int:
    """:func:`needed_bytes` of a schedule, outputs taken to be alive between the phases."""
    memory = step_memory(graph, schedule)
    released = sum(graph.values[value].bytes for value in graph.released_outputs)
    split = schedule.num_forward
    peaks = PhasePeaks(
        forward=max(memory.profile[:split], default=0),
        backward=max(memory.profile[split:], default=0),
        between=memory.saved + released,
    )
    return needed_bytes(graph, peaks, demands)
