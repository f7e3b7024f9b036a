"""A planned step: check, capture, trace, cost, segment, solve, compose, choose, emit, check, run.

PyTorch hands over the joint graph in the middle of its own compilation, so the stages nest:
:func:`captured_call` captures, which calls :meth:`PlannedPartition.split` with the joint graph; that asks
``choose`` for a schedule, which comes from :func:`make_plan` unless there is a plan, and so from
:func:`plan_graph`. None of them runs the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from hybridremat.compiler.backend import Backend, Partition
from hybridremat.compiler.capture import capture, compile_step
from hybridremat.compiler.check import check
from hybridremat.compiler.cuda_attention import cuda_attention
from hybridremat.compiler.emit import emit
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.inner import run_op_by_op
from hybridremat.compiler.layout_trials import LayoutTrials
from hybridremat.compiler.model_checks import require_capturable
from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.costs.slice_trials import slices_tried
from hybridremat.graph.deadline import Deadline
from hybridremat.graph.joint import JointGraph, Schedule, plain_schedule
from hybridremat.graph.tracing.fx_nodes import joint_outputs
from hybridremat.graph.tracing.rewrites import Rewrites
from hybridremat.graph.tracing.trace import TracedStep, trace_joint
from hybridremat.planning.choose_lowered import choose_from
from hybridremat.planning.context import PlanContext
from hybridremat.planning.improvement import search_ranges
from hybridremat.planning.kept_options import KeptOptions
from hybridremat.planning.lowered_frontier import LoweredFrontier
from hybridremat.planning.option_cache import OPTIONS
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import plan_graph
from hybridremat.planning.progress import Stopwatch, Timings
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.planning.stages import plain_point
from hybridremat.planning.step_costs import with_costs
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.certify import certificate_of
from hybridremat.plans.policy import resolve_policy
from hybridremat.sequence.bounds.certificate import QUICK
from hybridremat.sequence.outside_memory import NO_OUTSIDE_MEMORY
from hybridremat.sequence.strategies import STRATEGIES
from hybridremat.version import __version__

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from hybridremat.compiler.inductor import Inductor


@dataclass(frozen=True)
class Chosen:
    """The schedule of a traced step.

    Attributes
    ----------
    step
        The step with costs.
    schedule
        Every execution of its ops.
    limit
        Most bytes of the emitted graphs.
    accept
        Raises :class:`~hybridremat.PlanError` if their memory is not what was planned.
    started
        Called when the forward starts.
    accept_code
        As ``accept``, for the code that a compiler generates of the graphs; None if they run op by op.
    lean
        Whether the compiler keeps the order of the schedule and frees every buffer at once.
    plain
        Whether it lays out what is saved as in a step without a plan.
    """

    step: TracedStep
    schedule: Schedule
    limit: int | None = None
    accept: Callable[[EmittedMemory], None] = lambda _: None
    started: Callable[[], None] = lambda: None
    accept_code: Callable[[EmittedMemory], None] | None = None
    lean: bool = False
    plain: bool = False


Choose = Callable[[TracedStep], Chosen]


def backend_for(settings: Settings, choose: Choose, *, build: bool = True) -> Backend:
    """The backend of steps of one graph; without ``build`` they are planned and never run."""
    inductor = inductor_for(settings)
    return Backend(
        PlannedPartition(choose, inductor, rewrites_of(settings)),
        hold_outputs=settings.hold_outputs,
        all_outputs=settings.grad_outputs == "all",
        loss_only=settings.outputs == "loss",
        early_gradients=settings.gradients == "in_backward",
        inner=inductor or run_op_by_op,
        build=build,
    )


def rewrites_of(settings: Settings) -> Rewrites | None:
    """How joint graphs may be rewritten; None if they may not."""
    if settings.rewrites == "none" or settings.compiler != "eager":
        return None
    proven = slices_tried(settings.cache) if settings.spec is None else lambda _: False
    return Rewrites(proven, chunked=settings.rewrites == "chunked")


def inductor_for(settings: Settings) -> Inductor | None:
    """Inductor, if these settings ask for it."""
    if settings.compiler != "inductor":
        return None
    from hybridremat.compiler.inductor import Inductor  # takes a second

    return Inductor(f"hybridremat {__version__} {settings.deciding()}")


def captured_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    backend: Backend,
    capability: int | None = None,
) -> Callable[..., Any]:
    """The model's call, with the step for these sample inputs planned; none is run.

    ``capability``: see :func:`~hybridremat.compiler.cuda_attention.cuda_attention`.
    """
    require_capturable(model)  # check
    run = compile_step(model, backend)
    with cuda_attention(capability):
        capture(model, run, backend, args, kwargs)  # capture, which calls split
    return run  # run: a call is a planned forward; autograd runs its backward


class PlannedPartition:
    """A partitioner (``compiler/backend.py``) that emits the schedule that ``choose`` returns.

    ``inductor`` compiles the two graphs; None: they run op by op. ``rewrites``: see
    :func:`~hybridremat.graph.tracing.trace.trace_joint`.
    """

    def __init__(
        self, choose: Choose, inductor: Inductor | None = None, rewrites: Rewrites | None = None
    ) -> None:
        self.choose, self.inductor, self.rewrites = choose, inductor, rewrites

    def split(
        self, joint: fx.GraphModule, num_outputs: int, *, hold_outputs: bool, leaving: Mapping[int, int]
    ) -> Partition:
        """See :class:`~hybridremat.compiler.backend.Partitioner`."""
        rules = self.inductor.rules if self.inductor is not None else None
        traced = trace_joint(  # trace
            joint,
            num_outputs,
            hold_outputs=hold_outputs,
            rules=rules,
            leaving=leaving,
            rewrites=self.rewrites,
            real=LayoutTrials() if self.inductor is None else None,
        )
        chosen = self.choose(traced)  # an existing plan, or make_plan
        forward, backward = emit(chosen.step, chosen.schedule, save_views=self.inductor is None)  # emit
        memory = check(chosen.step, forward, backward, limit=chosen.limit)  # check
        chosen.accept(memory)
        if self.inductor is None or (accept := chosen.accept_code) is None:
            delivered = tuple(each.index for each in chosen.step.graph.deliveries)
            return Partition(
                forward,
                backward,
                chosen.started,
                delivered=delivered,
                overwritten=memory.overwritten,
            )
        memory_of = self.inductor.code_memory(chosen.step, forward, backward)
        return Partition(
            forward,
            backward,
            chosen.started,
            lambda *codes: accept(memory_of(*codes)),
            chosen.lean,
            chosen.plain,
        )

    def forward_only(self, graph: fx.GraphModule) -> Callable[[], None]:
        """See :class:`~hybridremat.compiler.backend.Partitioner`."""
        return self.choose(trace_joint(graph, len(joint_outputs(graph)), hold_outputs=True)).started


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


def graph_frontier(
    graph: JointGraph,
    timings: Timings,
    context: PlanContext,
    *,
    reuse: bool = False,
    for_one_plan: bool = False,
    bounded: bool = False,
    alone: bool = True,
) -> StepFrontier:
    """The frontier of a graph with costs, under the context's policy; ``timings`` of earlier stages.

    ``for_one_plan``: nobody will ask it for anything but the plan of the context's limit, so it is thin
    elsewhere; unless the overhead is bounded too, which may lead anywhere. ``bounded``: searches go as far
    as the plan can win back, unless the caller says for how long. ``alone``: whether it is the whole step;
    what is alive around a step of several graphs is added to all of them together.
    """
    plain_peak = plain_point(graph).peak
    limit = context.settings.limit_bytes(plain_peak, least=0)  # one of several graphs may take nothing
    ranges = None
    if for_one_plan and limit is not None and context.settings.overhead_limit() is None:
        ranges = search_ranges(limit, plain_peak)
    return plan_graph(
        graph,
        cache=OPTIONS.kept_in(KeptOptions.for_settings(context.settings)),
        workers=context.settings.workers,
        progress=context.progress,
        reuse=reuse,
        pinned=resolve_policy(graph, context.settings.policy),
        timings=timings,
        outside=context.settings.outside_memory() if alone else NO_OUTSIDE_MEMORY,
        strategy=STRATEGIES[context.settings.strategy],
        limit=limit,
        ranges=ranges,
        solver=context.settings.block_solver,
        deadline=Deadline(context.settings.budget_seconds()),
        bounded=bounded and context.settings.planning_budget is None,
    )


def step_frontier(
    step: TracedStep,
    timings: Timings,
    context: PlanContext,
    *,
    reuse: bool = False,
    for_one_plan: bool = False,
    bounded: bool = False,
) -> StepFrontier | LoweredFrontier:
    """The frontier of a step with costs; of one that is to be compiled, by the memory of its code.

    ``for_one_plan``, ``bounded``: see :func:`graph_frontier`. Of a compiled step all points are looked at:
    which of them keep the limit, is not known before they are lowered.
    """
    inductor = inductor_for(context.settings)
    if inductor is None:
        return graph_frontier(
            step.graph, timings, context, reuse=reuse, for_one_plan=for_one_plan, bounded=bounded
        )
    timed, plain = Stopwatch(timings), plain_schedule(step.graph)
    with timed("lowering"):
        context.progress("lowering", 0, 1)
        code = inductor.lowered(step, plain, plain=True)
    step = code.laid_out(step)
    counted = graph_frontier(step.graph, timed.timings, context, reuse=reuse, bounded=bounded)
    return LoweredFrontier(step, counted, inductor.lowered, code.memory, context.progress)


def make_plan(
    step: TracedStep, timings: Timings, context: PlanContext, *, reuse: bool, on_infeasible: OnInfeasible
) -> Plan:
    """A plan for a step with costs.

    Raises
    ------
    InfeasibleLimitError, PolicyError
        If no plan satisfies the request.
    """
    plan = _chosen(step, timings, context, reuse=reuse, on_infeasible=on_infeasible)
    if context.settings.budget_seconds() is None or plan.details is None or inductor_for(context.settings):
        return plan
    context.progress("bounding", 0, 1)
    return replace(plan, certificate=certificate_of(plan, QUICK))


def _chosen(
    step: TracedStep, timings: Timings, context: PlanContext, *, reuse: bool, on_infeasible: OnInfeasible
) -> Plan:
    """The plan that a bounded search finds; if nothing fits there, but may, that of the whole one."""
    for bounded in (True, False):
        frontier = step_frontier(step, timings, context, reuse=reuse, for_one_plan=True, bounded=bounded)
        context.progress("improving", 0, 1)
        more = bounded and frontier.curtailed
        try:
            return choose_from(  # choose
                frontier, context.settings, context.origin, on_infeasible="error" if more else on_infeasible
            )
        except InfeasibleLimitError:
            if not more or (on_infeasible == "error" and _nothing_can_fit(frontier, context)):
                raise
            logger.info("nothing fits among the first options of blocks; these are solved whole")
    raise AssertionError("the whole search chooses or raises")


def _nothing_can_fit(frontier: StepFrontier | LoweredFrontier, context: PlanContext) -> bool:
    """Whether a bound proves what a search did not find: generated code has none."""
    limit = context.settings.limit_bytes(frontier.plain_peak, least=0)
    if limit is None or not isinstance(frontier, StepFrontier):
        return False
    context.progress("bounding", 0, 1)
    return frontier.proves_infeasible(limit)
