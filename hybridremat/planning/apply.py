"""Apply a plan from a file to a step with the same graph; nothing is solved.

On the device that the plan was made on, its figures are kept, if ops in place and by parts are proven there.
On another device, kernels may have other names (:mod:`hybridremat.planning.port`); their memory is measured,
and the schedule is counted again and compared with the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hybridremat.errors import InfeasibleLimitError, PlanMismatchError
from hybridremat.graph.joint import JointGraph, Op, ops_by_parts
from hybridremat.graph.memory import ScheduleError, step_memory
from hybridremat.graph.pins import obeys
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.plan import Plan
from hybridremat.planning.port import (
    first_difference,
    not_run_once,
    port_obstacle,
    ported_chain,
    with_local_names,
)
from hybridremat.plans.origin import Origin, origin_differences
from hybridremat.plans.policy import resolve_policy
from hybridremat.plans.records import PlanDetails
from hybridremat.plans.recount import recounted
from hybridremat.units import format_bytes


def applied(plan: Plan, step: TracedStep, here: Origin, measured: Callable[[], TracedStep]) -> Plan:
    """``plan`` with its memory on this device; times are still those of where it was made.

    Parameters
    ----------
    here
        Model, inputs and device of the step.
    measured
        Returns the step with workspaces and real sizes on this device.

    Raises
    ------
    PlanMismatchError
        If the plan is for another graph.
    InfeasibleLimitError
        If its schedule takes more than its limit on this device.
    """
    details = applicable(plan)
    elsewhere = plan.origin.device_name != here.device_name
    if elsewhere and plan.compiler != "eager":
        raise mismatch(
            "a compiled plan is for the device, and the release of torch, that it was made on",
            [f"it was made on {plan.origin.device_name or 'another device'}, and this is {here.device_name}"],
        )
    if plan.fingerprint != step.graph.fingerprint:
        if not elsewhere:
            known = plan.coverage
            found = (known.differences if known is not None else origin_differences)(plan.origin, here)
            found = found or [_difference(plan, details.graph, step.graph)]
            raise mismatch("the plan was not made for this step", found)
        if found := _obstacles(plan, details.graph, step.graph, here):
            made_for = plan.origin.device_name or "another device"
            raise mismatch(
                f"the plan was made for {made_for}, and its schedule does not fit this step on {here.device}",
                found,
            )
    if not elsewhere and not _rewritten(details.graph):
        return with_local_names(plan, step.graph, here)
    local = measured().graph
    if not elsewhere and _is_proven(details.graph, local):
        return with_local_names(plan, step.graph, here)
    return _recounted(plan, details, _with_times(local, details.graph), here)


def _rewritten(graph: JointGraph) -> bool:
    """Whether ops may write over their inputs, or run by parts."""
    return any(op.overwrites or op.variant for op in graph.ops)


def _is_proven(planned: JointGraph, local: JointGraph) -> bool:
    """Whether all ops may do here what they are planned to, by trials that are kept or made now.

    Devices of one name are not of one kind: libraries and threads differ.
    """
    return all(
        set(op.overwrites) <= set(ours.overwrites) and op.runs.kernel == ours.runs.kernel
        for op, ours in zip(planned.ops, _with_times(local, planned).ops, strict=True)
    )


def _with_times(graph: JointGraph, planned: JointGraph) -> JointGraph:
    """The graph with the planned times, and the ops run by parts that the plan runs so, where they can be."""
    graph = ops_by_parts(graph, {op.id for op in planned.ops if op.variant})
    return replace(graph, ops=tuple(map(_timed, graph.ops, planned.ops)))


def _timed(op: Op, planned: Op) -> Op:
    """An op with the planned times, of its variants as well."""
    times = {each.kernel: each.time for each in planned.variants}
    ways = tuple(replace(each, time=times.get(each.kernel, planned.time)) for each in op.variants)
    return replace(op, time=planned.time, variants=ways)


def _recounted(plan: Plan, details: PlanDetails, graph: JointGraph, here: Origin) -> Plan:
    """The plan for the graph of this device, with its memory counted again."""
    local = replace(details, chain=ported_chain(details.chain, graph))
    counted = recounted(replace(plan, fingerprint=graph.fingerprint, origin=here, details=local))
    if plan.memory_limit is not None and counted.needed > plan.memory_limit:
        raise _too_much(plan, counted.needed)
    return counted


def _obstacles(plan: Plan, planned: JointGraph, graph: JointGraph, here: Origin) -> list[str]:
    """Why the schedule of a plan from another device cannot run on ``graph``; empty if it can."""
    there = replace(plan.origin, device=here.device, torch=here.torch, hybridremat=here.hybridremat)
    if found := origin_differences(there, here):
        return found
    if (difference := port_obstacle(planned, graph)) is not None:
        return [difference]
    if (once := not_run_once(graph, plan.schedule)) is not None:
        return [f"{once.name} must run exactly once on {here.device}"]
    try:
        step_memory(graph, plan.schedule)
    except ScheduleError as error:
        return [str(error)]
    if not obeys(graph, plan.schedule, resolve_policy(graph, plan.request.policy).pins):
        return ["its policy pins other ops here: modules are named otherwise"]
    return []


def mismatch(what: str, reasons: list[str]) -> PlanMismatchError:
    """The error for a plan that is not for a step, with reasons."""
    return PlanMismatchError(
        f"{what}: {'; '.join(reasons)}. Nothing has changed. Make a plan for this model and these inputs, or "
        "pass memory_limit= instead of plan=."
    )


def applicable(plan: Plan) -> PlanDetails:
    """The details of a plan, without which it cannot be applied.

    Raises
    ------
    PlanMismatchError
        If it is for a step of several graphs, or for one without a backward.
    """
    if plan.details is None:
        if plan.parts:
            found = [f"it is for a step of {_graphs_of(plan)}, and this one is one graph"]
            raise mismatch("the plan was not made for this step", found)
        raise PlanMismatchError(
            "this plan is for a graph without a backward, and such a plan cannot be applied from a file: "
            "pass memory_limit= instead of plan="
        )
    return plan.details


def parts_by_graph(plan: Plan, order: Sequence[str]) -> dict[str, dict[int, Plan]]:
    """The parts of a plan by number for each graph of a step, given in the order of the forward.

    Raises
    ------
    PlanMismatchError
        If it is not for a step of so many graphs, of which the same are equal.
    """
    graphs = list(dict.fromkeys(order))
    places = plan.places or tuple(map(graphs.index, order))
    taken: dict[str, dict[int, None]] = {key: {} for key in graphs}
    for key, place in zip(order, places, strict=False):
        taken[key][place] = None
    used = [place for group in taken.values() for place in group]
    if len(places) != len(order) or sorted(used) != list(range(len(plan.parts))):
        found, made = _counted(len(order), len(graphs)), _graphs_of(plan)
        other = f", and this one has {found}" if made != found else ", of which others are equal here"
        raise mismatch("the plan was not made for this step", [f"it is for a step of {made}{other}"])
    return {key: {place: plan.parts[place] for place in group} for key, group in taken.items()}


def _graphs_of(plan: Plan) -> str:
    """The number of graphs of the step that a plan was made for."""
    if not plan.parts:
        return "one graph"
    return _counted(len(plan.places or plan.parts), len({part.fingerprint for part in plan.parts}))


def _counted(graphs: int, distinct: int) -> str:
    return f"{graphs} graphs" if distinct == graphs else f"{graphs} graphs, {distinct} of them distinct"


def _difference(plan: Plan, planned: JointGraph, graph: JointGraph) -> str:
    """How two graphs differ that belong to equal origins; module names matter under a policy."""
    if (difference := first_difference(planned, graph, kernels=True)) is not None:
        return difference
    for ours, theirs in zip(graph.ops, planned.ops, strict=True):
        if plan.pins and ours.module != theirs.module:
            names = f"{ours.module!r}, and was in {theirs.module!r}"
            return f"its policy goes by modules, and op {ours.id} ({ours.target}) is in {names}"
    return "its graph connects the same ops differently (layouts, edges or outputs differ)"


def _too_much(plan: Plan, needed: int) -> InfeasibleLimitError:
    assert plan.memory_limit is not None
    return InfeasibleLimitError(
        f"on this device the plan takes {format_bytes(needed)} ({needed} bytes), beyond its limit of "
        f"{format_bytes(plan.memory_limit)}: kernels need other memory here than where it was made "
        f"({plan.origin.device_name or 'unknown'}). Make a plan here, with memory_limit={plan.memory_limit}.",
        limit=plan.memory_limit,
        least=needed,
    )
