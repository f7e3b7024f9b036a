"""Costs of a traced step: memory and times of its kernels, measured or computed from a device spec."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

from hybridremat.errors import DeviceMemoryWarning, warn_caller
from hybridremat.graph.costs.collectives import GatherRate, with_gather_times
from hybridremat.graph.costs.cost_models import ProfileCost, device_rates, with_footprints, with_times
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import device_of
from hybridremat.graph.joint import JointGraph, Op
from hybridremat.graph.rewrites import with_rewrite_times, with_rewrites
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.context import PlanContext
from hybridremat.planning.progress import Progress, Timings, no_progress
from hybridremat.planning.rank_agreement import RankAgreement
from hybridremat.planning.settings import Settings
from hybridremat.units import format_bytes

logger = logging.getLogger(__name__)


def with_costs(
    step: TracedStep, settings: Settings, agreement: RankAgreement, progress: Progress
) -> tuple[TracedStep, Timings]:
    """The step with times, workspaces and real sizes, and the seconds spent. Ranks with equal steps agree."""
    started = time.perf_counter()
    model, spec = settings.costs(), settings.spec
    if spec is not None:  # nothing is run or stored
        from hybridremat.graph.costs.spec_costs import sized_for

        step = with_times(sized_for(step, spec), model, KernelStore(), lambda *_: None)
        if settings.gathers == "plan":
            step = with_gather_times(step, {}, GatherRate.of(spec.call_ns, spec.host_in))
        return step, {"costs": time.perf_counter() - started}
    store = kernel_store(step, settings)
    step = agreement.on_memory(step, _with_memory(step, settings, store, progress))

    def timed() -> TracedStep:
        made = with_times(step, model, store, lambda done, total: progress("timing kernels", done, total))
        if model.name != "profile":
            return made
        if settings.gathers == "plan":
            here = device_rates(device_of(step.op_nodes))
            made = with_gather_times(made, agreement.gathers, GatherRate.of(here.call_ns, here.bytes))
        return with_rewrite_times(made, store)

    step = agreement.on_times(step, timed)
    store.save()
    return step, {"costs": time.perf_counter() - started}


def with_memory(step: TracedStep, settings: Settings, agreement: RankAgreement) -> TracedStep:
    """The step with workspaces, real sizes and rewrites on this device, and no times. Ranks agree."""
    store = kernel_store(step, settings)
    step = agreement.on_memory(step, _with_memory(step, settings, store))
    store.save()
    return step


def kernel_store(step: TracedStep, settings: Settings) -> KernelStore:
    """What is known of kernels on the device of a step."""
    return KernelStore.for_device(device_of(step.op_nodes)) if settings.cache else KernelStore()


def _with_memory(
    step: TracedStep, settings: Settings, store: KernelStore, progress: Progress = no_progress
) -> TracedStep:
    report = partial(progress, "trying kernels")
    measured = with_footprints(step, store, settings.untried, report)
    if settings.rewrites != "none" and settings.compiler == "eager":
        measured = with_rewrites(measured, store)
    return measured


def warn_beyond(spec: DeviceSpec, limit: int | None) -> None:
    """Warn if a limit (bytes) exceeds the memory of the device of ``spec``."""
    if limit is not None and limit > spec.memory:
        warn_caller(
            f"the limit of {format_bytes(limit)} is more than {spec.name} has, {format_bytes(spec.memory)}; "
            "parameters and optimizer state come on top of it",
            DeviceMemoryWarning,
        )


def note_checkpointing(step: TracedStep, context: PlanContext) -> None:
    """Say in the log, once, that the model's own checkpointing decides nothing, if its graph has some."""
    if step.graph.checkpointed and not context.store.told_of_checkpoints:
        context.store.told_of_checkpoints = True
        logger.warning(
            "the model checkpoints %d ops itself (torch.utils.checkpoint, gradient_checkpointing_enable()): "
            "the plan decides itself what is recomputed, but for what a selective policy says must be saved, "
            "and they add no time to it; print(plan) shows what they would take. Leave it out, unless the "
            "model also trains without hybridremat.",
            len(step.graph.checkpointed),
        )


def costed(traced: TracedStep, context: PlanContext) -> tuple[TracedStep, Timings]:
    """The step with costs, and the seconds that measuring them took."""
    note_checkpointing(traced, context)
    return with_costs(traced, context.settings, context.agreement, context.progress)  # cost


def costs_like(traced: TracedStep, known: JointGraph, context: PlanContext) -> TracedStep:
    """The step with costs, where it is known at other sizes: its memory is measured, and its times are not.

    Each op takes the time that it takes there, by the ratio of its flops, or else of the bytes it moves; by a
    cost model that measures nothing, what that says.
    """
    return times_like(with_memory(traced, context.settings, context.agreement), known, context)


def times_like(step: TracedStep, known: JointGraph, context: PlanContext) -> TracedStep:
    """The step with times as in :func:`costs_like`."""
    model = context.settings.costs()
    if not isinstance(model, ProfileCost):
        return with_times(step, model, KernelStore(), lambda *_: None)
    if len(step.graph.ops) != len(known.ops):
        return step
    ops = tuple(map(_timed_like, step.graph.ops, known.ops))
    return replace(step, graph=replace(step.graph, ops=ops))


def _timed_like(op: Op, known: Op) -> Op:
    work, its = (op.flops, known.flops) if op.flops and known.flops else (op.io_bytes, known.io_bytes)
    times = {way.kernel: round(way.time * work / max(1, its)) for way in known.ways}
    own = times[""]
    ways = tuple(replace(way, time=times.get(way.kernel, own)) for way in op.variants)
    return replace(op, time=times.get(op.runs.kernel, own), variants=ways)
