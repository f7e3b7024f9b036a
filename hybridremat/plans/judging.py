"""The judge of a plan's schedules, as it was planned with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import PlanDetails
from hybridremat.sequence.judge import Judge

if TYPE_CHECKING:
    from hybridremat.sequence.offload.clocks import Timed


def plan_judge(plan: PlanData, details: PlanDetails) -> Judge:
    """The judge of schedules of the graph of a plan, which has ``details``; its pins are not among them."""
    host = None if details.link is None else plan.request.host_bytes()
    return Judge(details.graph, outside=plan.request.outside_memory(), link=details.link, host_limit=host)


def timed_moves(plan: PlanData, details: PlanDetails) -> Timed:
    """What the moves of a plan take by its cost model: the link, and those who wait for it."""
    from hybridremat.sequence.offload.clocks import timed  # not where nothing moves

    assert details.link is not None
    graph, schedule = details.graph, plan.schedule
    sizes = [graph.values[move.value].bytes for move in schedule.moves]
    return timed([graph.op_times[op] for op in schedule.steps], schedule.moves, sizes, details.link)[0]
