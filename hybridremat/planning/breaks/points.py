"""Choose a frontier point for each graph of a step of several graphs, and add up the whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hybridremat.errors import InfeasibleLimitWarning, warn_caller
from hybridremat.graph.joint import Schedule
from hybridremat.planning.breaks.composition import composed
from hybridremat.planning.breaks.limits import StepLimits, infeasible_error
from hybridremat.planning.breaks.problem import PathProblem
from hybridremat.planning.breaks.searches import PathChoice, best, searched
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import Settings
from hybridremat.plans.policy import total_records
from hybridremat.sequence.joined_graphs import choose_points
from hybridremat.sequence.pool import SchedulePoint


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
        composition=composed(step, choice.points, problem),
        saved_bytes=sum(step.parts[g].points[choice.points[g]].saved for g in step.order),
        blocks=(),
        cost_model=settings.costs().name,
        fingerprint=problem.fingerprint(),
        request=settings.request(),
        schedule=Schedule((), 0),
        pins=total_records(r for g in problem.order for r in problem.frontiers[g].counted.pins),
        reused_options=any(frontier.counted.reused_options for frontier in problem.frontiers),
        host_bytes=step.host(choice.points),
        untried=tuple(dict.fromkeys(text for each in problem.frontiers for text in each.graph.untried)),
        timings=_summed(frontier.counted.timings for frontier in problem.graphs),
    )
    return chosen, whole


def _choose(problem: PathProblem, asked: StepLimits, settings: Settings) -> PathChoice:
    """The choice, with what searches found for it."""
    step = problem.step(problem.offered)
    leanest = choose_points(step)
    assert leanest is not None, "every graph can run in some way"
    least = step.peak(leanest) + asked.reserve
    found = best(problem, asked.memory, asked.most_time)
    if found is not None:
        choice = PathChoice(*found, asked.limit, asked.limit, least)
        return choice if asked.limit is None else searched(choice, asked, settings)
    lean = PathChoice(problem, leanest, least, asked.limit, least)
    if asked.limit is not None and asked.limit < least:  # the plan of the least may need a little less
        within = best(problem, asked.with_limit(least).memory, asked.most_time)
        if within is not None:
            lean = searched(replace(lean, problem=within[0], points=within[1]), asked, settings)
        least = lean.step.peak(lean.points) + asked.reserve
        if least <= asked.limit:
            return replace(lean, limit=asked.limit, least=least)
    too_slow = asked.limit is None or least <= asked.limit
    refuse = partial(infeasible_error, lean.step, asked, least, len(problem.order))
    if settings.on_infeasible == "error" or too_slow:
        raise refuse()  # no variable holds it: that would be a cycle, which holds what a forward has made
    warn_caller(f"{refuse()} The plan of least memory runs.", InfeasibleLimitWarning)
    return replace(lean, limit=least, least=least)


def _extra_flops(problem: PathProblem, chosen: Sequence[SchedulePoint]) -> float:
    flops = sum(point.flops for point in chosen)
    plain = sum(problem.frontiers[g].plain.flops for g in problem.order)
    return flops / plain - 1.0 if plain else 0.0


def _summed(timings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for stages in timings:
        total.update(stages)
    return dict(total)
