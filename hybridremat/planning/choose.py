"""From a frontier to one plan, by what the settings ask for."""

from __future__ import annotations

import time
from dataclasses import replace

from hybridremat.errors import InfeasibleLimitError, InfeasibleLimitWarning, warn_caller
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.plans.block_summary import planned_blocks
from hybridremat.plans.origin import Origin
from hybridremat.plans.records import PlanDetails, PlannedBlock
from hybridremat.plans.request import Request
from hybridremat.sequence.pool import SchedulePoint


def choose_plan(
    frontier: GraphFrontier, settings: Settings, origin: Origin, *, on_infeasible: OnInfeasible
) -> Plan:
    """The plan of the point that ``settings`` ask for; nothing is solved.

    Raises
    ------
    InfeasibleLimitError
        If no point satisfies them and ``on_infeasible`` is ``"error"``, or the limit alone is feasible.
    """
    return choose_with_point(frontier, settings, origin, on_infeasible=on_infeasible)[0]


def choose_with_point(
    frontier: GraphFrontier, settings: Settings, origin: Origin, *, on_infeasible: OnInfeasible
) -> tuple[Plan, SchedulePoint]:
    """:func:`choose_plan`, and the point that it is the plan of."""
    started = time.perf_counter()
    asked = limit = settings.limit_bytes(frontier.plain_peak)
    try:
        chosen = frontier.choose(limit, settings.overhead_limit())
    except InfeasibleLimitError as error:
        chosen = frontier.least()
        too_slow = limit is not None and chosen.needs <= limit
        if on_infeasible == "error" or too_slow:
            raise
        limit, chosen = chosen.needs, frontier.finished(chosen, chosen.needs)
        warn_caller(f"{error} The plan of least memory runs.", InfeasibleLimitWarning)
    plan = plan_of_point(
        frontier,
        chosen,
        limit=limit,
        asked=asked,
        cost_model=settings.costs().name,
        origin=origin,
        request=settings.request(),
    )
    if not (stage := frontier.choosing):
        return plan, chosen
    taken = plan.timings.get(stage, 0.0) + time.perf_counter() - started
    return plan.with_timings({stage: taken}), chosen


def plan_of_point(
    frontier: GraphFrontier,
    chosen: SchedulePoint,
    *,
    limit: int | None,
    asked: int | None,
    cost_model: str,
    origin: Origin | None = None,
    request: Request | None = None,
) -> Plan:
    """The plan of a point of the frontier."""
    graph, counted, outside = frontier.graph_of(chosen), frontier.counted, frontier.outside
    released = 0 if chosen.code != "none" else counted.judge.simulate(chosen.schedule).released
    asked_for = request or Request(reserve=outside.reserve, forwards=outside.forwards)
    return Plan(
        memory_limit=limit,
        asked_limit=asked,
        predicted_peak=chosen.peak,
        needed=chosen.needs,
        plain_peak=frontier.plain_peak,
        least_peak=frontier.least_known(chosen),
        overhead=frontier.overhead(chosen),
        composed_overhead=_composed_overhead(frontier, chosen),
        strategy_gap=_strategy_gap(chosen),
        extra_flops=frontier.extra_flops(chosen),
        saved_bytes=chosen.phases.between - released,
        blocks=_blocks(frontier, chosen),
        cost_model=cost_model,
        fingerprint=graph.fingerprint,
        schedule=chosen.schedule,
        origin=origin or Origin(),
        request=replace(asked_for, compiler="eager" if chosen.code == "none" else "inductor"),
        details=_details(frontier, chosen),
        lean=chosen.code == "lean",
        plain_code=chosen.code == "plain",
        reused_options=counted.reused_options,
        pins=counted.pins,
        timings=dict(counted.timings),
        search=counted.search_effort,
        untried=tuple(dict.fromkeys(graph.untried)),
        host_bytes=chosen.host,
    )


def _strategy_gap(point: SchedulePoint) -> float | None:
    if point.least_time is None:
        return None
    return max(0.0, 1.0 - point.least_time / max(1, point.time))


def _composed_overhead(frontier: GraphFrontier, point: SchedulePoint) -> float | None:
    if point.composed_time is None:
        return None
    return frontier.overhead(replace(point, time=point.composed_time))


def _details(frontier: GraphFrontier, chosen: SchedulePoint) -> PlanDetails | None:
    if chosen.chain is None:
        return None
    plan = frontier.counted.chains[chosen.chain]
    distinct = tuple(dict.fromkeys(plan.option_sets))
    number = {options: index for index, options in enumerate(distinct)}
    return PlanDetails(
        chain=replace(plan.chain, graph=frontier.graph_of(chosen)),
        option_sets=distinct,
        option_set_of=tuple(number[options] for options in plan.option_sets),
        decisions=chosen.decisions,
        frontier=frontier.points_beside(chosen),
        checkpointed=frontier.checkpointed(),
        link=frontier.counted.judge.link,
    )


def _blocks(frontier: GraphFrontier, chosen: SchedulePoint) -> tuple[PlannedBlock, ...]:
    if chosen.chain is None:
        return ()
    plan = frontier.counted.chains[chosen.chain]
    chain = replace(plan.chain, graph=frontier.graph_of(chosen))
    return planned_blocks(chain, plan.option_sets, chosen.schedule, chosen.decisions)
