"""From the frontier of a compiled step to one plan, by what the settings ask for."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

from hybridremat.errors import InfeasibleLimitError, InfeasibleLimitWarning
from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.lowered_frontier import LoweredFrontier, LoweredPoint
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.plans.origin import Origin
from hybridremat.plans.request import Request


def choose_lowered(
    frontier: LoweredFrontier, settings: Settings, origin: Origin, *, on_infeasible: OnInfeasible
) -> Plan:
    """The fastest plan whose generated code keeps the limit; of an overhead alone, the one of least memory.

    Raises
    ------
    InfeasibleLimitError, PolicyError
        As :func:`~hybridremat.planning.choose.choose_plan`.
    """
    started = time.perf_counter()
    limit = asked = settings.limit_bytes(frontier.plain_peak)
    overhead = settings.overhead_limit()
    if limit is None:
        chosen = frontier.least(overhead)
    else:
        chosen, limit = _within(frontier, limit, overhead, on_infeasible)
    plan = plan_of_lowered(
        frontier,
        chosen,
        limit=limit,
        asked=asked,
        cost_model=settings.costs().name,
        origin=origin,
        request=settings.request(),
    )
    lowering = plan.timings.get("lowering", 0.0) + time.perf_counter() - started
    return replace(plan, timings={**plan.timings, "lowering": lowering})


def _within(
    frontier: LoweredFrontier, limit: int, overhead: float | None, on_infeasible: OnInfeasible
) -> tuple[LoweredPoint, int]:
    """The point for a limit, and the limit that it keeps."""
    try:
        return frontier.fastest(limit, overhead), limit
    except InfeasibleLimitError as error:
        least = min(frontier.lowered, key=lambda point: (point.needs, point.candidate.time))
        if on_infeasible == "error" or least.needs <= limit:
            raise
        warnings.warn(f"{error} The plan of least memory runs.", InfeasibleLimitWarning, stacklevel=3)
        return least, least.needs


def plan_of_lowered(
    frontier: LoweredFrontier,
    chosen: LoweredPoint,
    *,
    limit: int | None,
    asked: int | None,
    cost_model: str,
    origin: Origin | None = None,
    request: Request | None = None,
) -> Plan:
    """The plan of a point, with the figures of its code in place of those that were counted."""
    plan = plan_of_point(
        frontier.counted,
        chosen.candidate,
        limit=limit,
        asked=asked,
        cost_model=cost_model,
        origin=origin,
        request=request,
    )
    return replace(
        plan,
        schedule=chosen.schedule,
        predicted_peak=chosen.memory.peak,
        needed=chosen.needs,
        plain_peak=frontier.plain_peak,
        least_peak=min([frontier.counted_needs(0), *(point.needs for point in frontier.lowered)]),
        saved_bytes=chosen.memory.saved,
        request=replace(plan.request, compiler="inductor"),
        lean=chosen.lean,
        plain_code=chosen.plain,
    )
