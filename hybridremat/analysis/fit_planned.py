"""The plan for what a device has left, or what is missing for one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from hybridremat.analysis.fit_data import FitData
from hybridremat.errors import InfeasibleLimitError
from hybridremat.planning.planner import choose_from
from hybridremat.planning.settings import Settings
from hybridremat.plans.origin import Origin

if TYPE_CHECKING:
    from hybridremat.planning.breaks.frontier import AnyFrontier

F = TypeVar("F", bound=FitData)


def planned(found: F, frontier: AnyFrontier, asked: Settings, origin: Origin) -> F:
    """With the least step, the limit, and the plan for it."""
    settings = replace(asked, memory_limit=max(1, found.room))
    try:
        plan = choose_from(frontier, settings, origin)
    except InfeasibleLimitError as error:
        return replace(found, least_step=error.least)
    found = replace(found, least_step=min(plan.least_peak, found.plain_step))
    if found.gradients + found.optimizer_step > found.room and not found.early_gradients:
        return found  # no plan makes the optimizer's own step smaller
    return replace(found, memory_limit=found.room, plan=plan if found.plain_step > found.room else None)
