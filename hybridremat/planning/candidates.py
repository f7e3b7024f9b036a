"""The schedules near the best of a plan, which real steps may choose among.

They are searched once more under the plan's limit, on its graph and with its times, so that plans from files
and from other ranks have the same. A pool keeps what no other schedule beats: what is near the best there
mostly does the same and more. So further ones are searched by times that are wrong on purpose: those of
kernels by up to 30 %, those of the link by more. They are the best where such times are the right ones, and
by the plan's own times not far from it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hybridremat.graph.deadline import Deadline
from hybridremat.graph.joint import JointGraph, Op, Schedule, Variant, ops_by_parts
from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.context import PlanContext
from hybridremat.planning.moving import Moving
from hybridremat.planning.option_cache import OPTIONS, options_on_disk
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import plan_graph
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.policy import resolve_policy
from hybridremat.sequence.exchange.improve import search_ranges
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.link import Link
from hybridremat.sequence.parts import judge_of
from hybridremat.sequence.pool import SchedulePoint
from hybridremat.sequence.strategies import STRATEGIES

WINDOW: Final = 0.05
"""How much slower than the plan a schedule may be that takes turns, by the cost model."""

WRONG: Final = 0.3
"""By how much the time of a kernel is wrong at most, where schedules are searched by wrong times."""

LINKS: Final = (0.5, 2.0, 0.0, 1.0)
"""How fast the link is taken to be in each search by wrong times; 0: nothing moves."""


def candidates(plan: Plan, context: PlanContext, most: int) -> list[Plan]:
    """The plan, and at most ``most - 1`` others that keep its limit: the fastest that differ from it.

    A schedule that runs and moves all that the plan does and more comes behind the others.
    """
    assert plan.details is not None
    limit = plan.memory_limit if plan.memory_limit is not None else plan.needed
    frontier = _searched_again(plan, limit, context)
    own, planned = Counter(plan.schedule.steps), plan.details.graph
    slowest = (1.0 + plan.overhead) * frontier.plain.time * (1.0 + WINDOW)

    def does_more(schedule: Schedule) -> bool:
        return Counter(schedule.steps) >= own and {*schedule.moves} >= {*plan.schedule.moves}

    found: dict[object, SchedulePoint] = {}
    every = [*frontier.found_under(limit), *_by_wrong_times(frontier, limit, context)]
    for point in sorted(every, key=lambda each: (does_more(each.schedule), each.time, each.needs)):
        same = point.schedule == plan.schedule and frontier.graph_of(point) == planned
        fits = point.time <= slowest and frontier.is_within(point, context.settings.overhead_limit())
        if fits and not same and frontier.judge.allows(point.schedule):
            found.setdefault((point.schedule, point.parted), point)
    return [plan, *(_plan_of(point, frontier, plan) for point in list(found.values())[: most - 1])]


def _searched_again(plan: Plan, limit: int, context: PlanContext) -> StepFrontier:
    assert plan.details is not None
    graph, settings = ops_by_parts(plan.details.graph, ()), context.settings
    moving = None
    if settings.offload is not None and plan.details.link is not None:
        from hybridremat.compiler.offload.targets import Target

        moving = Moving(Target.of(settings.offload), plan.details.link, settings.host_bytes())
    return plan_graph(
        graph,
        cache=OPTIONS.with_disk(options_on_disk(settings)),
        workers=settings.workers,
        progress=context.progress,
        reuse=plan.reused_options,
        pinned=resolve_policy(graph, settings.policy),
        outside=plan.request.outside_memory(),
        strategy=STRATEGIES[settings.strategy],
        limit=limit,
        ranges=search_ranges(limit, plan.plain_peak),
        solver=settings.block_solver,
        deadline=Deadline(settings.budget_seconds()),
        bounded=settings.planning_budget is None,
        moving=moving,
    )


def _by_wrong_times(frontier: StepFrontier, limit: int, context: PlanContext) -> Iterator[SchedulePoint]:
    """The best schedules under a limit by wrong times, with their right ones."""
    judge = frontier.judge
    for seed, rate in enumerate(LINKS):
        context.progress("improving", seed, len(LINKS))
        wrong = judge.with_ops_of(with_wrong_times(judge.graph, seed))
        if judge.link is not None:
            wrong = replace(wrong, link=_scaled(judge.link, rate)) if rate else _without_moves(wrong)
        if (point := frontier.found_by(wrong, limit)) is None:
            continue
        time = judge_of(judge, point).time(point.schedule)
        yield replace(point, time=time, composed_time=None if point.composed_time is None else time)


def _scaled(link: Link, rate: float) -> Link:
    return replace(link, out=link.out * rate, back=link.back * rate)


def _without_moves(judge: Judge) -> Judge:
    return replace(judge, link=None, host_limit=None)


def with_wrong_times(graph: JointGraph, seed: int, most: float = WRONG) -> JointGraph:
    """The graph with times that are wrong by up to ``most``, in the same way for equal kernels."""

    def factor(op: Op, kernel: str) -> float:
        sizes = [graph.values[value].bytes for value in (*op.reads, *op.writes)]
        return random.Random(f"{seed} {op.target} {kernel} {sizes}").uniform(1 - most, 1 + most)

    def way(op: Op, each: Variant) -> Variant:
        return replace(each, time=round(each.time * factor(op, each.kernel)))

    def made(op: Op) -> Op:
        ways = tuple(way(op, each) for each in op.variants)
        return replace(op, time=round(op.time * factor(op, op.runs.kernel)), variants=ways)

    return replace(graph, ops=tuple(map(made, graph.ops)))


def _plan_of(point: SchedulePoint, frontier: StepFrontier, plan: Plan) -> Plan:
    """The plan of another schedule; what was asked, and took time, is as in the given one."""
    made = plan_of_point(
        frontier,
        point,
        limit=plan.memory_limit,
        asked=plan.asked_limit,
        cost_model=plan.cost_model,
        origin=plan.origin,
        request=plan.request,
    )
    proof = None if plan.certificate is None else replace(plan.certificate, time=point.time)
    return replace(
        made,
        fingerprint=plan.fingerprint,
        least_peak=min(plan.least_peak, made.needed),
        certificate=proof,
        reused_options=plan.reused_options,
        search=plan.search,
        timings=plan.timings,
        pins=plan.pins,
    )
