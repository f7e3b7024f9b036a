"""From a frontier to one plan: what the settings ask for decides on the point."""

from __future__ import annotations

import warnings

from hybridremat.errors import InfeasibleLimitError, InfeasibleLimitWarning
from hybridremat.graph.memory import step_memory
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.planning.step_frontier import Candidate, StepFrontier, checkpointed, frontier_points
from hybridremat.plans.block_summary import planned_blocks
from hybridremat.plans.origin import Origin
from hybridremat.plans.outside_memory import Demands
from hybridremat.plans.records import PlanDetails, PlannedBlock, Request


def chosen_plan(
    planning: StepFrontier, settings: Settings, origin: Origin, *, on_infeasible: OnInfeasible
) -> Plan:
    """The plan of the point that ``settings`` ask for; nothing is solved.

    Raises
    ------
    InfeasibleLimitError
        If no point satisfies what was asked and ``on_infeasible`` is ``"error"``, or ``max_overhead`` alone
        cannot be kept.
    """
    demands = settings.demands()
    asked = limit = settings.limit_bytes(planning.plain.peak)
    try:
        chosen = planning.choose(limit, settings.overhead_limit(), demands)
    except InfeasibleLimitError as error:
        chosen = planning.least(demands)
        needed = planning.needs(chosen, demands)
        too_slow = limit is not None and needed <= limit  # max_overhead alone cannot be kept
        if on_infeasible == "error" or too_slow:
            raise
        limit = needed
        warnings.warn(f"{error} The plan of least memory runs.", InfeasibleLimitWarning, stacklevel=3)
    return make_plan(
        planning,
        chosen,
        limit=limit,
        asked=asked,
        demands=demands,
        cost_model=settings.costs().name,
        origin=origin,
        request=settings.request(),
    )


def make_plan(
    planning: StepFrontier,
    chosen: Candidate,
    *,
    limit: int | None,
    asked: int | None,
    demands: Demands,
    cost_model: str,
    origin: Origin | None = None,
    request: Request | None = None,
) -> Plan:
    """The plan that a point of the frontier stands for."""
    graph, point = planning.graph, chosen.point
    memory = step_memory(graph, point.schedule)
    return Plan(
        memory_limit=limit,
        asked_limit=asked,
        reserve=demands.reserve,
        forwards=demands.forwards,
        predicted_peak=point.peak,
        needed=planning.needs(chosen, demands),
        plain_peak=planning.plain.peak,
        least_peak=planning.needs(planning.least(demands), demands),
        overhead=planning.overhead(point),
        extra_flops=planning.extra_flops(point),
        saved_bytes=memory.saved,
        blocks=_blocks(planning, chosen),
        cost_model=cost_model,
        fingerprint=graph.fingerprint,
        schedule=point.schedule,
        origin=origin or Origin(),
        request=request or Request(),
        details=_details(planning, chosen),
        reused_options=planning.reused_options,
        pins=planning.pins,
        timings=dict(planning.timings),
    )


def _details(planning: StepFrontier, chosen: Candidate) -> PlanDetails | None:
    if chosen.chain_index is None:
        return None
    plan = planning.chains[chosen.chain_index]
    distinct = tuple(dict.fromkeys(plan.option_sets))
    number = {options: index for index, options in enumerate(distinct)}
    return PlanDetails(
        chain=plan.chain,
        option_sets=distinct,
        option_set_of=tuple(number[options] for options in plan.option_sets),
        decisions=chosen.point.decisions,
        frontier=frontier_points(planning),
        checkpointed=checkpointed(planning),
    )


def _blocks(planning: StepFrontier, chosen: Candidate) -> tuple[PlannedBlock, ...]:
    if chosen.chain_index is None:
        return ()
    plan = planning.chains[chosen.chain_index]
    return planned_blocks(plan.chain, plan.option_sets, chosen.point.schedule, chosen.point.decisions)
