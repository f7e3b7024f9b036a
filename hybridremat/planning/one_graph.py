"""Steps of one graph: find or make the plan of each."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.errors import InfeasibleLimitError, PlanError
from hybridremat.graph.joint import JointGraph
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.apply import applied
from hybridremat.planning.context import PlanContext
from hybridremat.planning.lowered_frontier import code_needs
from hybridremat.planning.pipeline import Chosen, costed, make_plan, note_checkpointing
from hybridremat.planning.plan import Plan
from hybridremat.planning.plan_cache import plan_key
from hybridremat.planning.port import with_local_names
from hybridremat.planning.progress import Timings
from hybridremat.planning.step_costs import with_memory
from hybridremat.plans.policy import require_matches, resolve_policy, under_policy
from hybridremat.sequence.outside_memory import OutsideMemory

logger = logging.getLogger(__name__)


def choose_schedule(traced: TracedStep, context: PlanContext) -> Chosen:
    """The schedule of a traced step's plan, which becomes the current plan of the store.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.wrap`.
    """
    note_checkpointing(traced, context)
    step = under_checked_policy(traced, context)
    ready = _ready(step, context)
    is_new = ready is None or ready.details is None
    if ready is not None and ready.details is not None:
        plan, step = ready, replace(step, graph=ready.details.graph)
    else:
        step, timings = costed(step, context)
        plan = context.agreement.on_plan(lambda: ready or _made(step, timings, context))
    context.store.add(plan)
    context.progress("emitting", 0, 1)
    started = partial(context.store.use, plan.fingerprint)
    if plan.details is not None:  # with the workspaces of its code, and what runs by parts
        step = replace(step, graph=plan.details.graph)
    if plan.compiler == "inductor":
        if is_new:
            _keep(plan, context)
        accept_code = partial(_require_code_within_limit, plan, step.graph)
        return Chosen(
            step,
            plan.schedule,
            started=started,
            accept_code=accept_code,
            lean=plan.lean,
            plain=plan.plain_code,
        )
    return Chosen(
        step,
        plan.schedule,
        plan.memory_limit,
        accept=partial(_accept, plan, step.graph, context if is_new else None),
        started=started,
    )


def _accept(plan: Plan, graph: JointGraph, keep_in: PlanContext | None, memory: EmittedMemory) -> None:
    """Keep a new plan for other processes once the checker has let its graphs pass."""
    _require_as_planned(plan, graph, memory)
    if keep_in is not None:
        _keep(plan, keep_in)


def under_checked_policy(traced: TracedStep, context: PlanContext) -> TracedStep:
    """:func:`with_policy_fingerprint` of a step of one graph, after :func:`require_policy`."""
    step = with_policy_fingerprint(traced, context)
    require_policy([step.graph], context)
    return step


def with_policy_fingerprint(traced: TracedStep, context: PlanContext) -> TracedStep:
    """The step with a fingerprint that depends on what the context's policy pins."""
    return replace(traced, graph=under_policy(traced.graph, context.settings.policy))


def require_policy(graphs: Sequence[JointGraph], context: PlanContext) -> None:
    """Raise PolicyError, before anything is measured, if the policy cannot be kept in the graphs of a step.

    Each pattern has to match in the first input shape; in later ones it need not.
    """
    if not len(context.store):
        require_matches(graphs, context.settings.policy)
    for graph in graphs:
        resolve_policy(graph, context.settings.policy)


def _ready(step: TracedStep, context: PlanContext) -> Plan | None:
    """An existing plan: from the store, the caller or the disk."""
    known = context.store.get(step.graph.fingerprint)
    if known is not None:
        return known
    if context.given is not None and not len(context.store):
        measured = partial(with_memory, step, context.settings, context.agreement)
        return applied(context.given, step, context.origin, measured)
    if context.disk is None or not context.agreement.alone:
        return None
    started = time.perf_counter()
    for reused in (False, True) if len(context.store) else (False,):
        found = context.disk.read(_disk_key(step.graph.fingerprint, context, reused=reused))
        if found is not None and found.fingerprint == step.graph.fingerprint:
            timings = {"read the kept plan": time.perf_counter() - started}
            return replace(with_local_names(found, step.graph, context.origin), timings=timings)
    return None


def _made(step: TracedStep, timings: Timings, context: PlanContext) -> Plan:
    """A new plan. The first of a model solves every block.

    Later ones are made in the middle of training, and reuse options of blocks that differ in sizes alone,
    unless nothing fits that way.
    """
    if len(context.store):
        try:
            return make_plan(step, timings, context, reuse=True, on_infeasible="error")
        except InfeasibleLimitError:
            logger.info("the options of other shapes do not fit this one; its blocks are solved anew")
    return make_plan(step, timings, context, reuse=False, on_infeasible=context.settings.on_infeasible)


def _keep(plan: Plan, context: PlanContext) -> None:
    """Write a plan to disk, unless ranks made it together: it depends on all of them."""
    if context.disk is not None and context.agreement.alone and plan.details is not None:
        context.disk.write(_disk_key(plan.fingerprint, context, reused=plan.reused_options), plan)


def _disk_key(fingerprint: str, context: PlanContext, *, reused: bool) -> str:
    return plan_key(fingerprint, context.settings, context.origin.device or "cpu", reused=reused)


def _require_as_planned(plan: Plan, graph: JointGraph, memory: EmittedMemory) -> None:
    """Compare the plan's figures with those counted on the emitted graphs."""
    if memory.peak != plan.predicted_peak:
        raise PlanError(
            f"the emitted plan has not been run: its peak is {memory.peak} bytes, where "
            f"{plan.predicted_peak} were planned"
        )
    _require_within_limit(plan, graph, memory)


def _require_code_within_limit(plan: Plan, graph: JointGraph, memory: EmittedMemory) -> None:
    """Compare the memory of the code that has been built with the plan's limit."""
    if memory.peak != plan.predicted_peak:
        logger.info("the code takes %s bytes, and %s were planned", memory.peak, plan.predicted_peak)
    _require_within_limit(plan, graph, memory)


def _require_within_limit(plan: Plan, graph: JointGraph, memory: EmittedMemory) -> None:
    needed = code_needs(graph, memory, OutsideMemory(plan.reserve, plan.forwards))
    if plan.memory_limit is not None and needed > plan.memory_limit:
        raise PlanError(
            f"the emitted plan has not been run: with the caller's code it takes {needed} bytes, "
            f"beyond the limit of {plan.memory_limit}"
        )
