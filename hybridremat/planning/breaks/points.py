"""Choose a frontier point for each graph of a step of several graphs, and add up the whole step."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hybridremat.errors import InfeasibleLimitWarning
from hybridremat.graph.joint import Schedule, as_plain
from hybridremat.planning.breaks.composition import composed
from hybridremat.planning.breaks.limits import StepLimits, infeasible_error
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import UNLIMITED, Settings
from hybridremat.plans.policy import total_records
from hybridremat.sequence.bounds.certificate import time_once
from hybridremat.sequence.effort import Budget, PlanningEffort
from hybridremat.sequence.joined_graphs import MultiGraphStep, PartPoint, StepPart, choose_points
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
    forwards
        How many forwards of the step wait for their backward at a time.
    fixed
        Fingerprints of the graphs that are compiled already: they have no other points.
    units
        The module that each graph of ``order`` is of; empty where none was named.
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
    forwards: int = 1
    fixed: frozenset[str] = frozenset()
    units: tuple[str, ...] = ()

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
        order = list(self.order)
        for place, code in reversed(list(enumerate(self.eager_code[: len(order) + 1]))):
            if code is not None:
                order.insert(place, len(parts))
                parts.append(code)
        largest = max(map(largest_gradient, self.frontiers))
        return MultiGraphStep(tuple(parts), tuple(order), self.joined_bytes, self.forwards, largest)

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
        return PartPoint(phases.forward, phases.backward, phases.between, point.time, retained)

    def plain(self) -> MultiGraphStep:
        """One step, as it is with each graph plain: all gradients are there at its end."""
        points = [[each.plain] for each in self.frontiers]
        return replace(self, forwards=1).step(points, plain=True)

    def fingerprint(self) -> str:
        """Identifies the step: its graphs in order."""
        text = ",".join(self.keys[index] for index in self.order)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class _Choice:
    """Points of the parts of a problem; the limit they keep, the one asked for, and the least, in bytes."""

    problem: PathProblem
    points: tuple[int, ...]
    limit: int | None
    asked: int | None
    least: int

    @property
    def step(self) -> MultiGraphStep:
        """The problem as integers."""
        return self.problem.step(self.problem.offered)


def choose_path(problem: PathProblem, settings: Settings) -> tuple[tuple[SchedulePoint, ...], Plan]:
    """A point for each graph in the order of the forward, and the plan of the whole step.

    The plan is without parts, blocks and breaks.

    Raises
    ------
    InfeasibleLimitError
        If nothing fits, unless ``on_infeasible="least"``.
    """
    asked = StepLimits.of(problem.plain(), settings)
    choice = _choose(problem, asked, settings)
    step, problem = choice.step, choice.problem
    chosen = tuple(problem.offered[part][choice.points[part]] for part in problem.order)
    peak = replace(step, forwards=1).peak(choice.points)
    whole = Plan(
        memory_limit=choice.limit,
        asked_limit=choice.asked,
        predicted_peak=peak,
        needed=step.peak(choice.points) + asked.reserve,
        plain_peak=asked.plain_peak,
        least_peak=min(choice.least, step.peak(choice.points) + asked.reserve),
        overhead=asked.overhead_of(step, choice.points),
        extra_flops=_extra_flops(problem, chosen),
        composition=composed(step, choice.points, problem.passing, problem.units),
        saved_bytes=sum(step.parts[g].points[choice.points[g]].saved for g in step.order),
        blocks=(),
        cost_model=settings.costs().name,
        fingerprint=problem.fingerprint(),
        request=settings.request(),
        schedule=Schedule((), 0),
        pins=total_records(r for g in problem.order for r in problem.frontiers[g].counted.pins),
        reused_options=any(frontier.counted.reused_options for frontier in problem.frontiers),
        untried=tuple(dict.fromkeys(text for each in problem.frontiers for text in each.graph.untried)),
        timings=_summed(frontier.counted.timings for frontier in problem.graphs),
    )
    return chosen, whole


def _choose(problem: PathProblem, asked: StepLimits, settings: Settings) -> _Choice:
    """The choice, with what searches found for it."""
    step = problem.step(problem.offered)
    leanest = choose_points(step)
    assert leanest is not None, "every graph can run in some way"
    least = step.peak(leanest) + asked.reserve
    found = _best(problem, asked.memory, asked.most_time)
    if found is not None:
        choice = _Choice(*found, asked.limit, asked.limit, least)
        return choice if asked.limit is None else _searched(choice, asked, settings)
    lean = _Choice(problem, leanest, least, asked.limit, least)
    if asked.limit is not None and asked.limit < least:  # the plan of the least may need a little less
        within = _best(problem, asked.with_limit(least).memory, asked.most_time)
        if within is not None:
            lean = _searched(replace(lean, problem=within[0], points=within[1]), asked, settings)
        least = lean.step.peak(lean.points) + asked.reserve
        if least <= asked.limit:
            return replace(lean, limit=asked.limit, least=least)
    error = infeasible_error(lean.step, asked, least)
    too_slow = asked.limit is None or least <= asked.limit
    if settings.on_infeasible == "error" or too_slow:
        raise error
    warnings.warn(f"{error} The plan of least memory runs.", InfeasibleLimitWarning, stacklevel=2)
    return replace(lean, limit=least, least=least)


EFFORT_APART: Final = 1.0
"""CP-SAT's deterministic time for choosing points of graphs that are alike, each its own."""

GAP_APART: Final = 1e-4
"""The fraction of the step's time at which that choice is good enough."""


def _best(
    problem: PathProblem, limit: int | None, most_time: int | None
) -> tuple[PathProblem, tuple[int, ...]] | None:
    """Points within what is asked: first one for each graph, then graphs that are alike each their own."""
    together = choose_points(problem.step(problem.offered), limit=limit, most_time=most_time)
    apart = problem.apart()
    if problem.alike or not apart.alike:
        return None if together is None else (problem, together)
    step, hint = apart.step(apart.offered), None
    if together is not None:
        hint = (*(together[part] for part in problem.order), *together[len(problem.keys) :])
    own = choose_points(
        step,
        limit=limit,
        most_time=most_time,
        effort=EFFORT_APART,
        alike=apart.alike,
        hint=hint,
        gap=GAP_APART,
    )
    if own is None:
        return None if together is None else (problem, together)
    figure = step.peak if limit is None else step.time
    if together is not None and hint is not None and figure(own) >= figure(hint):
        return problem, together
    return apart.joined(own)


ROUNDS: Final = 2
"""How often each graph is searched in, as the others are by then."""


def _searched(choice: _Choice, asked: StepLimits, settings: Settings) -> _Choice:
    """What searches find in each graph under what the others leave it, and the best choice with that."""
    assert choice.limit is not None
    limit = choice.limit - asked.reserve
    for _ in range(ROUNDS):
        found, before = _searched_once(choice.problem, choice.points, limit, asked, settings)
        best = None if found is None else _best(found.united(), limit, asked.most_time)
        if best is None:
            break
        better = replace(choice, problem=best[0], points=best[1])
        if better.step.time(better.points) >= before:
            break
        choice = better
    return choice


def _searched_once(
    problem: PathProblem, points: Sequence[int], limit: int, asked: StepLimits, settings: Settings
) -> tuple[PathProblem | None, int]:
    """The problem with what is found once in each part, None if nothing is; and the time of the points."""
    step, runs = problem.step(problem.offered), Counter(problem.order)
    gaps = [
        runs[g] * max(0, problem.offered[g][points[g]].time - time_once(frontier.graph))
        for g, frontier in enumerate(problem.frontiers)
    ]
    ops = sum(len(each.graph.ops) for each in problem.graphs)
    effort = PlanningEffort.of_ops(ops, asked.plain_time).seconds(sum(gaps) / max(1, asked.plain_time))
    offered = list(problem.offered)
    for g, frontier in enumerate(problem.frontiers):
        if problem.keys[g] in problem.fixed or not gaps[g]:  # nothing is to be gained
            continue
        bound = None if settings.planning_budget == UNLIMITED else Budget(effort * gaps[g] / sum(gaps))
        found = frontier.searched(step.moments_of(g, points), limit, bound)
        if found is not None and found.time < offered[g][points[g]].time:
            offered[g] = (*offered[g], found)
    changed = any(len(new) > len(old) for new, old in zip(offered, problem.offered, strict=True))
    return (replace(problem, offered=tuple(offered)) if changed else None), step.time(points)


def gradient_bytes(frontier: GraphFrontier, *, plain: bool) -> int:
    """Bytes of the gradients that a graph's backward leaves, or would leave in the plain step."""
    graph = as_plain(frontier.graph) if plain else frontier.graph
    return sum(graph.values[value].bytes for value in graph.gradients)


def largest_gradient(frontier: GraphFrontier) -> int:
    """Bytes of the largest gradient that a graph makes."""
    graph = frontier.graph
    return max((graph.values[value].bytes for value in graph.gradients), default=0)


def _extra_flops(problem: PathProblem, chosen: Sequence[SchedulePoint]) -> float:
    flops = sum(point.flops for point in chosen)
    plain = sum(problem.frontiers[g].plain.flops for g in problem.order)
    return flops / plain - 1.0 if plain else 0.0


def _summed(timings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for stages in timings:
        total.update(stages)
    return dict(total)
