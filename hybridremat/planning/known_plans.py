"""Plans that need not be made: of an earlier step, the caller's own, and those kept on disk."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.context import PlanContext
from hybridremat.planning.plan import Plan
from hybridremat.planning.plan_cache import plan_key
from hybridremat.planning.step_costs import with_memory


def known_plan(step: TracedStep, context: PlanContext) -> Plan | None:
    """An existing plan: from the store, the caller or the disk."""
    known = context.store.get(step.graph.fingerprint)
    if known is not None:
        return known
    if context.given is not None and not len(context.store):
        from hybridremat.planning.apply import applied

        measured = partial(with_memory, step, context.settings, context.agreement)
        return applied(context.given, step, context.origin, measured)
    if context.disk is None or not context.agreement.alone:
        return None
    started = time.perf_counter()
    for reused in (False, True) if len(context.store) else (False,):
        found = context.disk.read(_disk_key(step.graph.fingerprint, context, reused=reused))
        if found is not None and found.fingerprint == step.graph.fingerprint:
            from hybridremat.planning.port import with_local_names

            timings = {"read the kept plan": time.perf_counter() - started}
            return replace(with_local_names(found, step.graph, context.origin), timings=timings)
    return None


def keep_plan(plan: Plan, context: PlanContext) -> None:
    """Write a plan to disk, unless ranks made it together: it depends on all of them."""
    if context.disk is not None and context.agreement.alone and plan.details is not None:
        context.disk.write(_disk_key(plan.fingerprint, context, reused=plan.reused_options), plan)


def _disk_key(fingerprint: str, context: PlanContext, *, reused: bool) -> str:
    return plan_key(fingerprint, context.settings, context.origin.device or "cpu", reused=reused)
