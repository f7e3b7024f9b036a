"""What a step has to keep to run: the policy before it is planned, the planned memory once it is emitted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.errors import PlanError
from hybridremat.graph.joint import JointGraph
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.context import PlanContext
from hybridremat.planning.plan import Plan
from hybridremat.plans.policy import require_matches, resolve_policy, under_policy
from hybridremat.sequence.outside_memory import OutsideMemory, PhasePeaks, needed_bytes

logger = logging.getLogger(__name__)


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


def require_as_planned(plan: Plan, graph: JointGraph, memory: EmittedMemory) -> None:
    """Compare the plan's figures with those counted on the emitted graphs."""
    if memory.peak != plan.predicted_peak:
        raise PlanError(
            f"the emitted plan has not been run: its peak is {memory.peak} bytes, where "
            f"{plan.predicted_peak} were planned"
        )
    if memory.host != plan.host_bytes:
        raise PlanError(
            f"the emitted plan has not been run: it takes {memory.host} bytes of host memory, where "
            f"{plan.host_bytes} were planned"
        )
    _require_within_limit(plan, graph, memory)


def require_code_within_limit(plan: Plan, graph: JointGraph, memory: EmittedMemory) -> None:
    """Compare the memory of the code that has been built with the plan's limit."""
    if memory.peak != plan.predicted_peak:
        logger.info("the code takes %s bytes, and %s were planned", memory.peak, plan.predicted_peak)
    _require_within_limit(plan, graph, memory)


def _require_within_limit(plan: Plan, graph: JointGraph, memory: EmittedMemory) -> None:
    needed = code_needs(graph, memory, plan.request.outside_memory())
    if plan.memory_limit is not None and needed > plan.memory_limit:
        raise PlanError(
            f"the emitted plan has not been run: with the caller's code it takes {needed} bytes, "
            f"beyond the limit of {plan.memory_limit}"
        )


def code_needs(graph: JointGraph, memory: EmittedMemory, outside: OutsideMemory) -> int:
    """Bytes of a step with its code and the caller's."""
    peaks = PhasePeaks(memory.forward_peak, memory.backward_peak, memory.saved)
    return needed_bytes(graph, peaks, outside)
