"""From a frontier to one plan: what the settings ask for decides on the point."""

from __future__ import annotations

import warnings

from hybridremat.errors import InfeasibleLimitError, InfeasibleLimitWarning
from hybridremat.plan_making import make_plan
from hybridremat.plan_records import Origin
from hybridremat.planner import Planning
from hybridremat.plans import Plan
from hybridremat.settings import OnInfeasible, Settings


def chosen_plan(
    planning: Planning, settings: Settings, origin: Origin, *, on_infeasible: OnInfeasible
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
