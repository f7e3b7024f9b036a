"""From a frontier to one plan, by what the settings ask for."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

from hybridremat.errors import InfeasibleLimitError, InfeasibleLimitWarning
from hybridremat.graph.memory import step_memory
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.block_summary import planned_blocks
from hybridremat.plans.origin import Origin
from hybridremat.plans.records import PlanDetails, PlannedBlock
from hybridremat.plans.request import Request
from hybridremat.sequence.pool import SchedulePoint


def choose_plan(
    frontier: StepFrontier, settings: Settings, origin: Origin, *, on_infeasible: OnInfeasible
) -> Plan:
    """The plan of the point that ``settings`` ask for; nothing is solved.

    Raises
    ------
    InfeasibleLimitError
        If no point satisfies them and ``on_infeasible`` is ``"error"``, or the limit alone is feasible.
    """
    started = time.perf_counter()
    asked = limit = settings.limit_bytes(frontier.plain.peak)
    try:
        chosen = frontier.choose(limit, settings.overhead_limit())
    except InfeasibleLimitError as error:
        chosen = frontier.least()
        too_slow = limit is not None and chosen.needs <= limit
        if on_infeasible == "error" or too_slow:
            raise
        limit, chosen = chosen.needs, frontier.polished(chosen, chosen.needs)
        warnings.warn(f"{error} The plan of least memory runs.", InfeasibleLimitWarning, stacklevel=3)
    plan = plan_of_point(
        frontier,
        chosen,
        limit=limit,
        asked=asked,
        cost_model=settings.costs().name,
        origin=origin,
        request=settings.request(),
    )
    return plan.with_timings({"improve": time.perf_counter() - started}) if frontier.exchanges else plan


def plan_of_point(
    frontier: StepFrontier,
    chosen: SchedulePoint,
    *,
    limit: int | None,
    asked: int | None,
    cost_model: str,
    origin: Origin | None = None,
    request: Request | None = None,
) -> Plan:
    """The plan of a point of the frontier."""
    graph, outside = frontier.graph_of(chosen), frontier.judge.outside
    within = Request(reserve=outside.reserve, forwards=outside.forwards)
    return Plan(
        memory_limit=limit,
        asked_limit=asked,
        predicted_peak=chosen.peak,
        needed=chosen.needs,
        plain_peak=frontier.plain.peak,
        least_peak=min(chosen.needs, frontier.least_composed_needs),
        overhead=frontier.overhead(chosen),
        composed_overhead=_composed_overhead(frontier, chosen),
        strategy_gap=_strategy_gap(chosen),
        extra_flops=frontier.extra_flops(chosen),
        saved_bytes=step_memory(graph, chosen.schedule).saved,
        blocks=_blocks(frontier, chosen),
        cost_model=cost_model,
        fingerprint=graph.fingerprint,
        schedule=chosen.schedule,
        origin=origin or Origin(),
        request=request or within,
        details=_details(frontier, chosen),
        reused_options=frontier.reused_options,
        pins=frontier.pins,
        timings=dict(frontier.timings),
        search=frontier.search_effort,
        untried=tuple(dict.fromkeys(graph.untried)),
    )


def _strategy_gap(point: SchedulePoint) -> float | None:
    if point.least_time is None:
        return None
    return max(0.0, 1.0 - point.least_time / max(1, point.time))


def _composed_overhead(frontier: StepFrontier, point: SchedulePoint) -> float | None:
    if point.composed_time is None:
        return None
    return frontier.overhead(replace(point, time=point.composed_time))


def _details(frontier: StepFrontier, chosen: SchedulePoint) -> PlanDetails | None:
    if chosen.chain is None:
        return None
    plan = frontier.chains[chosen.chain]
    distinct = tuple(dict.fromkeys(plan.option_sets))
    number = {options: index for index, options in enumerate(distinct)}
    return PlanDetails(
        chain=replace(plan.chain, graph=frontier.graph_of(chosen)),
        option_sets=distinct,
        option_set_of=tuple(number[options] for options in plan.option_sets),
        decisions=chosen.decisions,
        frontier=frontier.points_with(chosen),
        checkpointed=frontier.checkpointed(),
    )


def _blocks(frontier: StepFrontier, chosen: SchedulePoint) -> tuple[PlannedBlock, ...]:
    if chosen.chain is None:
        return ()
    plan = frontier.chains[chosen.chain]
    chain = replace(plan.chain, graph=frontier.graph_of(chosen))
    return planned_blocks(chain, plan.option_sets, chosen.schedule, chosen.decisions)
