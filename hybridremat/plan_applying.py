"""A plan from a file for the step at hand: the same graph runs its schedule, another one is refused.

Nothing is solved. On the device that the plan was made on its figures stand as they are; on another one the
memory of every kernel is measured here, and the schedule is counted anew and held against the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hybridremat.demands import Demands, schedule_needs
from hybridremat.errors import InfeasibleLimitError, PlanMismatchError
from hybridremat.graph.joint import JointGraph, Op, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.trace import TracedStep
from hybridremat.limits import format_bytes
from hybridremat.origin import differences
from hybridremat.plan_records import Origin, PlanDetails
from hybridremat.plans import Plan

_AGAIN = "Make a plan for this model and these inputs, or pass memory_limit= instead of plan=."


def applied(plan: Plan, step: TracedStep, here: Origin, measured: Callable[[], TracedStep]) -> Plan:
    """``plan`` with the figures that hold on this device.

    Parameters
    ----------
    here
        What the step belongs to.
    measured
        Gives the step with temporaries and real sizes, as they are on this device.

    Raises
    ------
    PlanMismatchError
        If it belongs to another graph.
    InfeasibleLimitError
        If its schedule takes more than its limit on this device.
    """
    details = applicable(plan)
    if plan.fingerprint != step.graph.fingerprint:
        raise PlanMismatchError(_mismatch(details.graph, step.graph, plan.origin, here))
    if plan.origin.device_name == here.device_name:
        return plan
    graph = measured().graph
    times = [op.time for op in details.graph.ops]
    graph = replace(
        graph, ops=tuple(replace(op, time=time) for op, time in zip(graph.ops, times, strict=True))
    )
    memory, demands = step_memory(graph, plan.schedule), Demands(plan.reserve, plan.forwards)
    needed = schedule_needs(graph, plan.schedule, demands)
    if plan.memory_limit is not None and needed > plan.memory_limit:
        raise _too_much(plan, needed)
    return replace(
        plan,
        predicted_peak=memory.peak,
        needed=needed,
        plain_peak=step_memory(graph, plain_schedule(graph)).peak,
        saved_bytes=memory.saved,
        details=replace(details, chain=replace(details.chain, graph=graph)),
    )


def applicable(plan: Plan) -> PlanDetails:
    """The details of a plan that can be applied.

    Raises
    ------
    PlanMismatchError
        If it has none: it is for a step of several graphs, or for one without a backward.
    """
    if plan.details is None:
        what = "a step of several graphs" if plan.parts else "a graph without a backward"
        raise PlanMismatchError(
            f"this plan is for {what}, and such a plan cannot be applied from a file: pass memory_limit= "
            "instead of plan=; its blocks are solved again"
        )
    return plan.details


def _mismatch(planned: JointGraph, graph: JointGraph, origin: Origin, here: Origin) -> str:
    found = differences(origin, here) or _first_difference(planned, graph)
    return f"the plan was not made for this step: {'; '.join(found)}. Nothing has changed. {_AGAIN}"


def _first_difference(planned: JointGraph, graph: JointGraph) -> list[str]:
    """Where two graphs of models that look alike part."""
    for ours, theirs in zip(graph.ops, planned.ops, strict=False):
        is_now, was = _described(graph, ours), _described(planned, theirs)
        if is_now != was:
            place = f" in {ours.module}" if ours.module else ""
            return [f"op {ours.id}{place} is {is_now}, and was {was}"]
    if len(graph.ops) != len(planned.ops):
        return [f"its graph has {len(planned.ops)} ops, and this one {len(graph.ops)}"]
    return ["its graph joins the same ops otherwise (layouts, edges or outputs differ)"]


def _described(graph: JointGraph, op: Op) -> str:
    made = [graph.values[value] for value in op.writes]
    return " ".join([op.target, *(f"{'×'.join(map(str, v.shape)) or 'scalar'} {v.dtype}" for v in made)])


def _too_much(plan: Plan, needed: int) -> InfeasibleLimitError:
    assert plan.memory_limit is not None
    return InfeasibleLimitError(
        f"on this device the plan takes {format_bytes(needed)} ({needed} bytes), beyond its limit of "
        f"{format_bytes(plan.memory_limit)}: kernels need other memory here than where it was made "
        f"({plan.origin.device_name or 'unknown'}). Make a plan here, with memory_limit={plan.memory_limit}.",
        limit=plan.memory_limit,
        least=needed,
    )
