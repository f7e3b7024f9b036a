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
from typing import Literal

from hybridremat.graph.joint import JointGraph


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

    @property
    def peak(self) -> int:
        """The higher of the peaks."""
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class Moment:
    """A moment of a step of several graphs, as one of them sees it.

    Attributes
    ----------
    phase
        Which phase of this graph runs then; ``"other"``: another graph or the code between them.
    saved
        How many times what this graph saves is there besides.
    bytes
        What others take.
    """

    phase: Literal["forward", "backward", "other"]
    saved: int
    bytes: int

    def needs(self, phases: PhasePeaks) -> int:
        """Bytes of the step, for what the graph itself takes."""
        own = {"forward": phases.forward, "backward": phases.backward, "other": 0}[self.phase]
        return own + self.beside(phases.between)

    def beside(self, between: int) -> int:
        """Bytes beside what runs, if the graph saves so many."""
        return self.saved * between + self.bytes


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
