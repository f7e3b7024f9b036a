"""When each storage of two emitted graphs is alive: the same at every size, and how many bytes at one.

Shares no code with :mod:`hybridremat.graph.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hybridremat.graph.joint import PAGE, JointGraph

STATE: Final = -1
"""In place of a value: a state of the generator."""
TANGENTS: Final = -2
"""In place of a value: all tangents."""


@dataclass(frozen=True)
class EmittedMemory:
    """Bytes: peak of each phase, and what is alive between them.

    ``overwritten`` are the places of the backward's inputs that it writes over; ``host``: what moves takes.
    """

    forward_peak: int
    backward_peak: int
    saved: int
    overwritten: tuple[int, ...] = ()
    host: int = 0

    @property
    def peak(self) -> int:
        """Peak of the step."""
        return max(self.forward_peak, self.backward_peak)


@dataclass(frozen=True)
class GraphLifetimes:
    """What is alive while a graph runs.

    Attributes
    ----------
    start
        Storages that are alive at first.
    calls
        For each call: storages that it makes, which workspace it takes (None: none), storages that die with
        it. Workspaces are numbered: those of ops, of ops that replay a draw, of what takes a gradient.
    """

    start: tuple[int, ...]
    calls: tuple[tuple[tuple[int, ...], int | None, tuple[int, ...]], ...]

    def peak(self, sizes: Sequence[int], workspaces: Sequence[int]) -> int:
        """Most bytes, for the bytes of each storage and workspace."""
        highest = level = sum(map(sizes.__getitem__, self.start))
        for new, takes, gone in self.calls:
            for storage in new:
                level += sizes[storage]
            highest = max(highest, level if takes is None else level + workspaces[takes])
            for storage in gone:
                level -= sizes[storage]
        return highest


@dataclass(frozen=True)
class StepLifetimes:
    """What is alive while both graphs run.

    Attributes
    ----------
    holds
        What each storage is made for: a value of the joint graph, or :data:`STATE`, or :data:`TANGENTS`.
    forward, backward
        Each graph.
    between
        Storages that are alive between them.
    overwritten
        The places of the backward's inputs that it writes over.
    moved
        By move to host memory, the values that it is of.
    """

    holds: tuple[int, ...]
    forward: GraphLifetimes
    backward: GraphLifetimes
    between: tuple[int, ...]
    overwritten: tuple[int, ...]
    moved: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def _host(self, graph: JointGraph) -> int:
        """Bytes of host memory: of each move its values', in whole pages."""
        sizes = (sum(graph.values[value].bytes for value in moved) for moved in self.moved.values())
        return sum((size + PAGE - 1) // PAGE * PAGE for size in sizes)

    def memory(self, graph: JointGraph) -> EmittedMemory:
        """The bytes that this is with the values and workspaces of a joint graph."""
        tangents = sum(value.bytes for value in graph.values if value.tangent)
        of = [*(value.bytes for value in graph.values), tangents, graph.rng_state_bytes]  # of -2, and -1
        sizes = list(map(of.__getitem__, self.holds))
        plain = [op.temp for op in graph.ops]
        replayed = [each + graph.rng_state_bytes for each in plain]  # the current state is held aside
        workspaces = [*plain, *replayed, *(each.workspace for each in graph.deliveries)]
        return EmittedMemory(
            self.forward.peak(sizes, workspaces),
            self.backward.peak(sizes, workspaces),
            sum(map(sizes.__getitem__, self.between)),
            self.overwritten,
            self._host(graph),
        )
