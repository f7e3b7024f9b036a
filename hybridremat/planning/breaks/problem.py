"""What is to be chosen for a step of several graphs: its parts, and the points that each may take."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hybridremat.graph.joint import as_plain
from hybridremat.graph.memory import inputs_in_backward
from hybridremat.planning.breaks.sharding import Entry, Sharding, with_sharding
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.sequence.joined_graphs import Beside, MultiGraphStep, PartPoint, StepPart
from hybridremat.sequence.pool import SchedulePoint


@dataclass(frozen=True)
class PathProblem:
    """The parts of a step with the points that each may take.

    A part is a graph wherever it runs, or where it takes one of several points.

    Attributes
    ----------
    keys
        Fingerprints of the graphs of the parts.
    order
        Indices into ``keys``, in the order of the forward.
    frontiers
        Of the graph of each part.
    offered
        The points that each part may take: the frontier of its graph, or those that this has already.
    eager_code
        Memory of the eager code before each graph of ``order`` and after the last one.
    joined_bytes
        As in :class:`~hybridremat.sequence.joined_graphs.MultiGraphStep`.
    passing
        The gradients of each part that are gone after the next backward, as values of its graph.
    staying
        Bytes of outputs of each part that are held after its backward.
    dropped
        The outputs of each part that are gone when the forward has returned, where its backward reads none.
    fading
        The inputs of each part that are gone when the forward has returned, where its backward reads none.
    forwards
        How many forwards of the step wait for their backward at a time.
    fixed
        Fingerprints of the graphs that are compiled already: they have no other points.
    units
        The module that each graph of ``order`` is of; empty where none was named.
    host_limit
        Bytes of host memory for the moves of all graphs; None for any.
    sharding
        What FSDP2 gathers and reduces; None where parameters are whole.
    is_begun
        Whether some graphs run already: what is offered for them is how they run.
    """

    keys: tuple[str, ...]
    order: tuple[int, ...]
    frontiers: tuple[GraphFrontier, ...]
    offered: tuple[Sequence[SchedulePoint], ...]
    eager_code: tuple[StepPart | None, ...]
    joined_bytes: int
    passing: tuple[frozenset[int], ...] = ()
    staying: tuple[int, ...] = ()
    dropped: tuple[frozenset[int], ...] = ()
    fading: tuple[frozenset[int], ...] = ()
    forwards: int = 1
    fixed: frozenset[str] = frozenset()
    units: tuple[str, ...] = ()
    host_limit: int | None = None
    sharding: Sharding | None = None
    is_begun: bool = False

    @property
    def graphs(self) -> tuple[GraphFrontier, ...]:
        """The frontiers of the distinct graphs."""
        return tuple(dict(zip(self.keys, self.frontiers, strict=True)).values())

    @property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The parts of each graph that has several."""
        groups: dict[str, list[int]] = {}
        for part, key in enumerate(self.keys):
            groups.setdefault(key, []).append(part)
        return tuple(tuple(group) for group in groups.values() if group[1:])

    def apart(self) -> PathProblem:
        """The same with each run of a graph as a part of its own."""
        return self._with_parts(self.order, tuple(range(len(self.order))))

    def begun(self, points: Sequence[SchedulePoint]) -> PathProblem:
        """The same where the first graphs of ``order`` run already, at these points."""
        if not points:
            return self
        ran = [(part, point) for part, point in zip(self.order, points, strict=False)]
        left = [(part, None) for part in self.order[len(points) :]]
        groups = list(dict.fromkeys((*ran, *left)))
        parts = tuple(part for part, _ in groups)
        made = self._with_parts(parts, tuple(groups.index(each) for each in (*ran, *left)))
        offered = tuple(self.offered[part] if point is None else (point,) for part, point in groups)
        return replace(made, offered=offered, is_begun=True)

    def joined(self, points: Sequence[int]) -> tuple[PathProblem, tuple[int, ...]]:
        """Parts of the same graph with the same point as one, and these points."""
        groups = list(dict.fromkeys((self.keys[part], points[part]) for part in self.order))
        places = tuple(groups.index((self.keys[part], points[part])) for part in self.order)
        parts = tuple(self.order[places.index(number)] for number in range(len(groups)))
        left = points[len(self.keys) :]  # of the eager code
        return self._with_parts(parts, places), (*(points[part] for part in parts), *left)

    def united(self) -> PathProblem:
        """Each graph as one part, with the points of all its parts."""
        keys = list(dict.fromkeys(self.keys))
        parts = tuple(self.keys.index(key) for key in keys)
        every: dict[str, dict[SchedulePoint, None]] = {key: {} for key in keys}
        for key, points in zip(self.keys, self.offered, strict=True):
            every[key].update(dict.fromkeys(points))
        together = self._with_parts(parts, tuple(keys.index(self.keys[part]) for part in self.order))
        return replace(together, offered=tuple(tuple(every[key]) for key in keys))

    def _with_parts(self, parts: tuple[int, ...], order: tuple[int, ...]) -> PathProblem:
        """Other parts, each as one of these."""
        return replace(
            self,
            keys=tuple(self.keys[part] for part in parts),
            order=order,
            frontiers=tuple(self.frontiers[part] for part in parts),
            offered=tuple(self.offered[part] for part in parts),
            passing=tuple(self.passing[part] for part in parts),
            staying=tuple(self.staying[part] for part in parts),
            dropped=tuple(self.dropped[part] for part in parts),
            fading=tuple(self.fading[part] for part in parts),
        )

    def step(self, offered: Sequence[Sequence[SchedulePoint]], *, plain: bool = False) -> MultiGraphStep:
        """The problem as integers, for some points of each part; these are its first parts.

        ``plain``: all gradients are there at the end of the step.
        """
        parts = [
            StepPart(
                tuple(self._figures(part, point) for point in points),
                self._left(part, plain=plain),
                self._bytes(part, self.dropped[part]),
            )
            for part, points in enumerate(offered)
        ]
        entries = [self._entry(place, part) for place, part in enumerate(self.order)]
        for place, code in reversed(list(enumerate(self.eager_code[: len(self.order) + 1]))):
            if code is not None:
                entries.insert(place, Entry(len(parts), is_code=True, gradients=code.gradient_bytes))
                parts.append(code)
        made, order = tuple(parts), tuple(each.part for each in entries)
        others: tuple[Beside, ...] = ()
        if self.sharding is not None:
            made, order, others = with_sharding(made, entries, self.sharding)
        largest = max(map(largest_gradient, self.frontiers), default=0)  # no graph: no unit was called
        return MultiGraphStep(
            made, order, self.joined_bytes, self.forwards, largest, self.host_limit, others
        )

    def _entry(self, place: int, part: int) -> Entry:
        """A graph where it runs; the unit that it is of, if it has parameters that are sharded."""
        if self.sharding is None:
            return Entry(part)
        graph, trained = self.frontiers[part].graph, self.sharding.trained
        unit = self.sharding.heads.get(self.units[place], "") if self.units else ""
        gathers = bool(unit) and self.sharding.units[unit].gathered > 0
        return Entry(
            part,
            unit if gathers else "",
            trained.calls[place] if gathers else 0,
            breaks=trained.breaks[place],
            hands_on=not trained.late[place],
            completes=trained.completes[place],
            gradients=trained.gradients[self.keys[part]],
            passes=self._bytes(part, self.passing[part]),
            takes=self._bytes(part, graph.held_outputs | graph.released_outputs),
        )

    def _left(self, part: int, *, plain: bool) -> int:
        """Bytes that the backward of a part leaves to the end of the step."""
        left = gradient_bytes(self.frontiers[part], plain=plain) + self.staying[part]
        return left - self._bytes(part, self.passing[part])

    def _bytes(self, part: int, values: Iterable[int]) -> int:
        return sum(self.frontiers[part].graph.values[value].bytes for value in values)

    def _figures(self, part: int, point: SchedulePoint) -> PartPoint:
        phases, retained = point.phases, 0
        if dropped := self.dropped[part]:
            judge = self.frontiers[part].counted.judge
            retained = judge.simulate.read_in_backward(point.schedule, dropped)
        inputs = inputs_in_backward(self.frontiers[part].graph, point.schedule, self.fading[part])
        return PartPoint(
            phases.forward,
            phases.backward + inputs,
            phases.between + inputs,
            point.time,
            retained,
            point.host,
            inputs,
        )

    def plain(self) -> MultiGraphStep:
        """One step, as it is with each graph plain: all gradients are there at its end."""
        points = [[each.plain] for each in self.frontiers]
        return replace(self, forwards=1).step(points, plain=True)

    def fingerprint(self) -> str:
        """Identifies the step: its graphs in order."""
        text = ",".join(self.keys[index] for index in self.order)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def gradient_bytes(frontier: GraphFrontier, *, plain: bool) -> int:
    """Bytes of the gradients that a graph's backward leaves, or would leave in the plain step."""
    graph = as_plain(frontier.graph) if plain else frontier.graph
    return sum(graph.values[value].bytes for value in graph.gradients)


def largest_gradient(frontier: GraphFrontier) -> int:
    """Bytes of the largest gradient that a graph makes."""
    graph = frontier.graph
    return max((graph.values[value].bytes for value in graph.gradients), default=0)
