"""The best choice of points for the graphs of a step, and what searches in each graph add to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from hybridremat.planning.breaks.limits import StepLimits
from hybridremat.planning.breaks.problem import PathProblem
from hybridremat.planning.settings import UNLIMITED, Settings
from hybridremat.sequence.bounds.certificate import time_once
from hybridremat.sequence.effort import Budget, PlanningEffort
from hybridremat.sequence.joined_graphs import MultiGraphStep, choose_points
from hybridremat.sequence.outside_memory import Moment
from hybridremat.sequence.pool import SchedulePoint


@dataclass(frozen=True)
class PathChoice:
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


EFFORT_APART: Final = 1.0
"""CP-SAT's deterministic time for choosing points of graphs that are alike, each its own."""

GAP_APART: Final = 1e-4
"""The fraction of the step's time at which that choice is good enough."""


def best(
    problem: PathProblem, limit: int | None, most_time: int | None
) -> tuple[PathProblem, tuple[int, ...]] | None:
    """Points within what is asked: first one for each graph, then graphs that are alike each their own."""
    together = choose_points(problem.step(problem.offered), limit=limit, most_time=most_time)
    apart = problem.apart()
    if problem.is_begun or problem.alike or not apart.alike:
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


BETWEEN: Final = 4
"""Parts into which searches cut what two neighbouring points of a graph save."""

ROUNDS: Final = 2
"""How often each graph is searched in, as the others are by then."""


def searched(choice: PathChoice, asked: StepLimits, settings: Settings) -> PathChoice:
    """What searches find in each graph under what the others leave it, and the best choice with that."""
    assert choice.limit is not None
    if choice.problem.is_begun:
        return choice
    limit = choice.limit - asked.reserve
    for _ in range(ROUNDS):
        problem, points = choice.problem, choice.points
        before = choice.step.time(points)
        bounds = _bounds(problem, points, asked, settings)
        found = _with_found(problem, _under_others(problem, points, bounds), limit)
        found = _with_found(found, _between_points(problem, points, limit, bounds), limit)
        best_now = None if found == problem else best(found.united(), limit, asked.most_time)
        if best_now is None:
            break
        better = replace(choice, problem=best_now[0], points=best_now[1])
        if better.step.time(better.points) >= before:
            break
        choice = better
    return choice


@dataclass(frozen=True)
class _Search:
    """A search in the graph of one part, under what it sees of the step, for less than so much time."""

    part: int
    moments: tuple[Moment, ...]
    seconds: float | None
    below: int


def _bounds(
    problem: PathProblem, points: Sequence[int], asked: StepLimits, settings: Settings
) -> dict[int, float | None]:
    """What searches may spend on each part in which there is something to gain; None: caps of their own."""
    runs = Counter(problem.order)
    gaps = {
        g: runs[g] * max(0, problem.offered[g][points[g]].time - time_once(frontier.graph))
        for g, frontier in enumerate(problem.frontiers)
    }
    ops = sum(len(each.graph.ops) for each in problem.graphs)
    effort = PlanningEffort.of_ops(ops, asked.plain_time).seconds(
        sum(gaps.values()) / max(1, asked.plain_time)
    )
    unlimited = settings.planning_budget == UNLIMITED
    return {
        g: None if unlimited else effort * gap / sum(gaps.values())
        for g, gap in gaps.items()
        if gap and problem.keys[g] not in problem.fixed
    }


def _under_others(
    problem: PathProblem, points: Sequence[int], bounds: dict[int, float | None]
) -> Iterator[_Search]:
    """Search in each part for a faster point, all others as they are."""
    step = problem.step(problem.offered)
    for g, bound in bounds.items():
        yield _Search(g, step.moments_of(g, points), bound, problem.offered[g][points[g]].time)


def _between_points(
    problem: PathProblem, points: Sequence[int], limit: int, bounds: dict[int, float | None]
) -> Iterator[_Search]:
    """Search in each graph that runs several times for points that save less than one and more than another.

    Where one of its runs has more room only if another has less, no search under what the others leave finds
    anything: a graph's frontier is that of its own peak, and thin in what it saves.
    """
    apart = problem.apart()
    step = apart.step(apart.offered)
    own = (*(points[part] for part in problem.order), *points[len(problem.keys) :])
    for parts in apart.alike:
        mine = [part for part in parts if problem.order[part] in bounds]
        if not mine:
            continue
        taken = [apart.offered[part][own[part]] for part in mine]
        roomy = min(mine, key=lambda part: max(m.bytes for m in step.moments_of(part, own)))
        room = tuple(m for m in step.moments_of(roomy, own) if m.phase != "other")
        targets = list(targets_between(apart.offered[roomy], taken))
        seconds = bounds[problem.order[roomy]]
        for saved, time in targets:
            moments = (*room, Moment("other", 1, limit - saved))
            spent = None if seconds is None else seconds / len(targets)
            yield _Search(problem.order[roomy], moments, spent, time)


def targets_between(
    points: Sequence[SchedulePoint], taken: Sequence[SchedulePoint]
) -> Iterator[tuple[int, int]]:
    """Saved bytes between points that are taken and their neighbours on the hull; the slower one's time."""
    corners = hull(sorted((each.phases.between, each.time) for each in points))
    near = {(each.phases.between, each.time) for each in taken}
    for less, more in pairwise(corners):
        if less in near or more in near:
            for part in range(1, BETWEEN):
                yield less[0] + part * (more[0] - less[0]) // BETWEEN, less[1]


def hull(figures: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The lower convex hull of sorted saved bytes and times, from the least bytes to the least time."""
    corners: list[tuple[int, int]] = []
    for x, y in figures:
        if corners and y >= corners[-1][1]:
            continue
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            corners.pop()
        corners.append((x, y))
    return corners


def _with_found(problem: PathProblem, searches: Iterator[_Search], limit: int) -> PathProblem:
    """The problem with the points that searches find."""
    offered = list(problem.offered)
    for each in searches:
        bound = None if each.seconds is None else Budget(each.seconds)
        found = problem.frontiers[each.part].searched(each.moments, limit, bound)
        if found is not None and found.time < each.below:
            offered[each.part] = (*offered[each.part], found)
    return replace(problem, offered=tuple(offered))
