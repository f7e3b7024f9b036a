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
    """The distinct graphs of a step with the points that each may take.

    Attributes
    ----------
    keys
        Fingerprints of the distinct graphs.
    order
        Indices into ``keys``, in the order of the forward.
    frontiers
        Of each distinct graph.
    offered
        The points that each distinct graph may take: its frontier, or the one that it has already.
    eager_code
        Memory of the eager code before each graph of ``order`` and after the last one.
    joined_bytes
        As in :class:`~hybridremat.sequence.joined_graphs.MultiGraphStep`.
    passing
        Bytes of the gradients of each distinct graph that are gone after the next backward.
    forwards
        How many forwards of the step wait for their backward at a time.
    """

    keys: tuple[str, ...]
    order: tuple[int, ...]
    frontiers: tuple[GraphFrontier, ...]
    offered: tuple[Sequence[SchedulePoint], ...]
    eager_code: tuple[StepPart | None, ...]
    joined_bytes: int
    passing: tuple[int, ...] = ()
    forwards: int = 1

    def step(self, offered: Sequence[Sequence[SchedulePoint]], *, plain: bool = False) -> MultiGraphStep:
        """The problem as integers, for some points of each graph; the distinct graphs are its first parts.

        ``plain``: all gradients are there at the end of the step.
        """
        parts = [
            StepPart(tuple(map(_figures, points)), gradient_bytes(frontier, plain=plain) - passing)
            for frontier, points, passing in zip(self.frontiers, offered, self.passing, strict=True)
        ]
        order = list(self.order)
        for place, code in reversed(list(enumerate(self.eager_code[: len(order) + 1]))):
            if code is not None:
                order.insert(place, len(parts))
                parts.append(code)
        largest = max(map(largest_gradient, self.frontiers))
        return MultiGraphStep(tuple(parts), tuple(order), self.joined_bytes, self.forwards, largest)

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
    """Points of the distinct graphs; the limit they keep, the one asked for, and the least, in bytes."""

    points: tuple[int, ...]
    limit: int | None
    asked: int | None
    least: int


def choose_path(problem: PathProblem, settings: Settings) -> tuple[dict[str, SchedulePoint], Plan]:
    """A point for each distinct graph, and the plan of the whole step (without parts, blocks and breaks).

    Raises
    ------
    InfeasibleLimitError
        If nothing fits, unless ``on_infeasible="least"``.
    """
    asked = StepLimits.of(problem.plain(), settings)
    problem, choice = _choose(problem, asked, settings)
    step = problem.step(problem.offered)
    taken = zip(problem.keys, problem.offered, choice.points[: len(problem.keys)], strict=True)
    chosen = {key: group[point] for key, group, point in taken}
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
        saved_bytes=sum(step.parts[g].points[choice.points[g]].saved for g in step.order),
        blocks=(),
        cost_model=settings.costs().name,
        fingerprint=problem.fingerprint(),
        request=settings.request(),
        schedule=Schedule((), 0),
        pins=total_records(r for g in problem.order for r in problem.frontiers[g].counted.pins),
        reused_options=any(frontier.counted.reused_options for frontier in problem.frontiers),
        untried=tuple(dict.fromkeys(text for each in problem.frontiers for text in each.graph.untried)),
        timings=_summed(frontier.counted.timings for frontier in problem.frontiers),
    )
    return chosen, whole


def _choose(problem: PathProblem, asked: StepLimits, settings: Settings) -> tuple[PathProblem, _Choice]:
    """The choice, and the problem with what searches found for it."""
    step = problem.step(problem.offered)
    leanest = choose_points(step)
    assert leanest is not None, "every graph can run in some way"
    least = step.peak(leanest) + asked.reserve
    points = choose_points(step, limit=asked.memory, most_time=asked.most_time)
    if points is not None:
        choice = _Choice(points, asked.limit, asked.limit, least)
        return (problem, choice) if asked.limit is None else _searched(problem, choice, asked, settings)
    if asked.limit is not None and asked.limit < least:  # searches at the least may need a little less
        problem, choice = _searched(problem, _Choice(leanest, least, asked.limit, least), asked, settings)
        least = problem.step(problem.offered).peak(choice.points) + asked.reserve
        if least <= asked.limit:
            return problem, replace(choice, limit=asked.limit, least=least)
        leanest, step = choice.points, problem.step(problem.offered)
    error = infeasible_error(step, asked, least)
    too_slow = asked.limit is None or least <= asked.limit
    if settings.on_infeasible == "error" or too_slow:
        raise error
    warnings.warn(f"{error} The plan of least memory runs.", InfeasibleLimitWarning, stacklevel=2)
    return problem, _Choice(leanest, least, asked.limit, least)


ROUNDS: Final = 2
"""How often each graph is searched in, as the others are by then."""


def _searched(
    problem: PathProblem, choice: _Choice, asked: StepLimits, settings: Settings
) -> tuple[PathProblem, _Choice]:
    """What searches find in each graph under what the others leave it, and the best choice with that."""
    assert choice.limit is not None
    limit = choice.limit - asked.reserve
    for _ in range(ROUNDS):
        found, before = _searched_once(problem, choice.points, limit, asked, settings)
        if found is None:
            break
        step = found.step(found.offered)
        points = choose_points(step, limit=limit, most_time=asked.most_time)
        if points is None or step.time(points) >= before:
            break
        problem, choice = found, replace(choice, points=points)
    return problem, choice


def _searched_once(
    problem: PathProblem, points: Sequence[int], limit: int, asked: StepLimits, settings: Settings
) -> tuple[PathProblem | None, int]:
    """The problem with what is found once in each graph, None if nothing is; and the time of the points."""
    step, runs = problem.step(problem.offered), Counter(problem.order)
    gaps = [
        runs[g] * max(0, problem.offered[g][points[g]].time - time_once(frontier.graph))
        for g, frontier in enumerate(problem.frontiers)
    ]
    ops = sum(len(each.graph.ops) for each in problem.frontiers)
    effort = PlanningEffort.of_ops(ops, asked.plain_time).seconds(sum(gaps) / max(1, asked.plain_time))
    offered = list(problem.offered)
    for g, frontier in enumerate(problem.frontiers):
        if len(offered[g]) == 1 or not gaps[g]:  # it runs as it does already, or nothing is to be gained
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


def _figures(point: SchedulePoint) -> PartPoint:
    return PartPoint(point.phases.forward, point.phases.backward, point.phases.between, point.time)


def _extra_flops(problem: PathProblem, chosen: Mapping[str, SchedulePoint]) -> float:
    flops = sum(chosen[problem.keys[g]].flops for g in problem.order)
    plain = sum(problem.frontiers[g].plain.flops for g in problem.order)
    return flops / plain - 1.0 if plain else 0.0


def _summed(timings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for stages in timings:
        total.update(stages)
    return dict(total)
