"""The memory of a plan, counted from its graph and schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hybridremat.graph.joint import as_plain, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.plans.block_summary import planned_blocks
from hybridremat.plans.judging import plan_judge
from hybridremat.plans.plan_data import PlanData

P = TypeVar("P", bound=PlanData)


def recounted(plan: P) -> P:
    """The plan with bytes as counted now, for its step and its blocks, and those of its parts.

    What is known of generated code alone stays as it is.
    """
    plan = replace(plan, parts=tuple(map(recounted, plan.parts)))
    if (details := plan.details) is None:
        return plan
    blocks = planned_blocks(details.chain, details.block_options, plan.schedule, details.decisions)
    if plan.compiler != "eager":
        return replace(plan, blocks=blocks)
    memory = step_memory(details.graph, plan.schedule)
    return replace(
        plan,
        predicted_peak=memory.peak,
        needed=plan_judge(plan, details).needs(plan.schedule, memory),
        plain_peak=step_memory(as_plain(details.graph), plain_schedule(details.graph)).peak,
        saved_bytes=memory.saved,
        blocks=blocks,
    )
