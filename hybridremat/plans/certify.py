"""Certificates of plans: the time that no schedule beats under a limit, the bytes that none goes below."""

from __future__ import annotations

from hybridremat.errors import LimitError
from hybridremat.graph.joint import JointGraph, Phase
from hybridremat.graph.memory import schedule_time
from hybridremat.plans.certify_joined import joined_certificate
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import Certificate
from hybridremat.sequence.bounds.certificate import THOROUGH, BoundEffort, bound_under, least_peak_bound
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
    judge = Judge(graph, outside=plan.request.outside_memory())
    return Certificate(
        limit=limit,
        time=schedule_time(graph, plan.schedule),
        lower_bound=bound_under(judge, limit, plan.schedule, effort),
        least_bound=least_peak_bound(graph, plan.schedule, effort),
    )


def require_backward(graph: JointGraph) -> None:
    """Raise LimitError if a graph has no backward."""
    if not any(op.phase is Phase.BACKWARD for op in graph.ops):
        raise LimitError("a forward alone cannot be certified: nothing in it is computed again")
