"""Certificates of plans: the time that no schedule beats under a limit, the bytes that none goes below."""

from __future__ import annotations

from dataclasses import replace

from hybridremat.errors import LimitError
from hybridremat.graph.joint import JointGraph, Phase, Schedule
from hybridremat.plans.certify_joined import joined_certificate
from hybridremat.plans.judging import plan_judge
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import Certificate
from hybridremat.sequence.bounds.certificate import (
    THOROUGH,
    BoundEffort,
    bound_under,
    heaviest_op,
    least_peak_bound,
)
from hybridremat.sequence.judge import Judge


def certificate_of(plan: PlanData, effort: BoundEffort = THOROUGH) -> Certificate:
    """The certificate of a plan; nothing is planned again.

    Raises
    ------
    LimitError
        If the step is compiled or has no backward, or its file does not say how several graphs are joined.
    """
    if plan.compiler != "eager":
        raise LimitError(
            f"a plan for {plan.compiler} cannot be certified: its memory is that of generated code, and "
            "bounds are those of a graph. Certify the plan that runs op by op (leave compiler= out)"
        )
    limit = plan.needed if plan.memory_limit is None else plan.memory_limit
    if plan.parts:
        return joined_certificate(plan, limit)
    if plan.details is None:
        raise LimitError("only a step with a backward can be certified")
    graph = plan.details.graph
    require_backward(graph)
    judge = plan_judge(plan, plan.details)
    return Certificate(
        limit=limit,
        time=judge.time(plan.schedule),
        lower_bound=time_bound(judge, limit, plan.schedule, effort),
        least_bound=least_bound(judge, plan.schedule, effort),
    )


def time_bound(judge: Judge, limit: int, schedule: Schedule, effort: BoundEffort) -> int:
    """Nanoseconds that no schedule beats under a limit (bytes), also with moves, where they are allowed.

    ``schedule`` is a good one of about this memory.
    """
    bare = replace(schedule, moves=())
    if judge.link is None:
        return bound_under(judge, limit, bare, effort)
    from hybridremat.sequence.offload.bound import offload_bound

    return offload_bound(judge, limit, bare, effort)


def least_bound(judge: Judge, schedule: Schedule, effort: BoundEffort = THOROUGH) -> int:
    """Bytes that no schedule goes below; with moves, those of the op alone that takes most."""
    if judge.link is not None:
        return heaviest_op(judge.graph)[1]
    return least_peak_bound(judge.graph, schedule, effort)


def require_backward(graph: JointGraph) -> None:
    """Raise LimitError if a graph has no backward."""
    if not any(op.phase is Phase.BACKWARD for op in graph.ops):
        raise LimitError("a forward alone cannot be certified: nothing in it is computed again")
