"""A planned step: capture → trace → cost → judge → search → combine → emit → check → run.

:func:`plan_step` captures the step: one graph, or several where the model's graph breaks. Each is planned
then (:meth:`PlannedPartition.split`): traced, given costs and a schedule (``planner.py``: judge, search; of
several graphs ``breaks/`` combines the choices), emitted and checked. Nothing of the step runs but the
forward of one with breaks, on copies: what follows a break can depend on values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from hybridremat.compiler.backend import Backend, Partition, Partitioner
from hybridremat.compiler.capture import attention_of, capture, compile_step, model_device, translated_errors
from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.compiler.final_gradients import mark_final_gradients
from hybridremat.compiler.frame_room import with_room
from hybridremat.compiler.inner import InnerCompiler, op_by_op
from hybridremat.compiler.layout_trials import LayoutTrials
from hybridremat.compiler.library_workspaces import keep_workspaces
from hybridremat.compiler.model_checks import require_capturable
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.rewrites import JointRewrites
from hybridremat.graph.tracing.fx_nodes import joint_outputs
from hybridremat.graph.tracing.trace import Rewriting, TracedStep, trace_joint
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.chosen import Choose, Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.input_keys import shape_text
from hybridremat.planning.origin import origin_of
from hybridremat.planning.planner import choose_schedule
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.settings import Settings

if TYPE_CHECKING:
    from hybridremat.compiler.emitted_memory import EmittedMemory
    from hybridremat.compiler.inductor import Inductor
    from hybridremat.planning.breaks.planner import PathPlanner


@dataclass(frozen=True)
class Step:
    """The compiled step of one input shape; Dynamo's guards decide whether it fits a call.

    ``fingerprint`` is that of its plan; ``breaks`` plans a step of several graphs.
    """

    backend: Backend
    compiled: Callable[..., Any]
    fingerprint: str | None = None
    breaks: PathPlanner | None = None


@prompt_interrupts()
@with_room
def plan_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    context: PlanContext,
    *,
    choose: Choose | None = None,
    show: bool = False,
) -> Step:
    """The step for these inputs, planned and not run.

    ``choose`` gives the schedule; None: what the context asks for. ``show``: whether to show how far planning
    is.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.wrap`.
    """
    require_capturable(model)  # check
    started, store = time.perf_counter(), context.store
    with at_step(model, args, kwargs, context, show=show) as context:
        step = None
        if choose is None and context.settings.several_graphs:
            from hybridremat.planning.breaks.step import plan_path

            # once for the survey and for the step, so that a capture in training runs no kernels beside it
            several = partial(backend_for, context.settings, several=True, trials=LayoutTrials())
            if (path := plan_path(model, args, kwargs, context, several)) is not None:  # several graphs
                step = Step(path[0], path[1], breaks=path[2])
        if step is None:
            choose = choose or _choice(context)
            backend = backend_for(context.settings, choose, build=context.build)
            step = Step(backend, compile_step(model, backend))
            with attention_of(context.settings.capability()):
                graph = capture(model, step.compiled, backend, args, kwargs)  # capture
                if graph is not None:
                    with translated_errors(model, backend):
                        graph.plan()  # which calls split
    keep_workspaces(model_device(model))
    store.note_total(time.perf_counter() - started, step.backend.compile_seconds)
    return replace(step, fingerprint=store.current.fingerprint if store.current is not None else None)


def _choice(context: PlanContext) -> Choose:
    """What gives the schedule: a plan of the caller that is for many sizes may have it."""
    if context.given is None or context.given.coverage is None:
        return partial(choose_schedule, context=context)
    from hybridremat.planning.size_choice import SizeChoice

    return SizeChoice(context)


class PlannedPartition:
    """A partitioner (``compiler/backend.py``) that emits the schedule that ``choose`` returns.

    ``inductor`` compiles the two graphs; None: they run op by op. ``rewriting``, ``regather``: see
    :func:`~hybridremat.graph.tracing.trace.trace_joint`. ``alone``: whether the step is one graph, so that
    other schedules may take turns with the one that is chosen. ``trials``: kernels that have been tried.
    """

    def __init__(
        self,
        choose: Choose,
        inductor: Inductor | None = None,
        rewriting: Rewriting | None = None,
        *,
        alone: bool = False,
        regather: bool = False,
        trials: LayoutTrials | None = None,
    ) -> None:
        self.choose, self.inductor, self.rewriting, self.alone = choose, inductor, rewriting, alone
        self._regather = regather
        # kept, as a capture in the first step must not run kernels beside it
        self._trials = trials or LayoutTrials()

    def split(
        self, joint: fx.GraphModule, num_outputs: int, *, hold_outputs: bool, leaving: Mapping[int, int]
    ) -> Partition:
        """See :class:`~hybridremat.compiler.backend.Partitioner`."""
        traced = self._traced(joint, num_outputs, hold_outputs=hold_outputs, leaving=leaving)
        chosen = self.choose(traced)  # an existing plan, or make_plan
        del joint.meta[_TRACED]  # they would keep each other alive
        forward, backward, memory = emitted(chosen, save_views=self.inductor is None)
        delivered = tuple(chosen.step.deliveries)
        if self.inductor is None:
            mark_final_gradients(chosen.step, chosen.schedule, backward)
        if self.inductor is None or (accept := chosen.accept_code) is None:
            return Partition(
                forward,
                backward,
                chosen.started,
                delivered=delivered,
                overwritten=memory.overwritten,
                step=chosen.step if self.alone else None,
            )
        memory_of = self.inductor.code_memory(chosen.step, forward, backward)
        return Partition(
            forward,
            backward,
            chosen.started,
            lambda *codes: accept(memory_of(*codes)),
            chosen.lean,
            chosen.plain,
            delivered,
        )

    def forward_only(self, graph: fx.GraphModule) -> Callable[[], None]:
        """See :class:`~hybridremat.compiler.backend.Partitioner`."""
        if graph.meta.get(_TRACED) is None:
            graph.meta[_TRACED] = trace_joint(graph, len(joint_outputs(graph)), hold_outputs=True)
        chosen = self.choose(graph.meta[_TRACED])
        del graph.meta[_TRACED]
        return chosen.started

    def _traced(
        self, joint: fx.GraphModule, num_outputs: int, *, hold_outputs: bool, leaving: Mapping[int, int]
    ) -> TracedStep:
        """The traced step: once for each joint graph, which tracing rewrites."""
        if joint.meta.get(_TRACED) is None:
            joint.meta[_TRACED] = trace_joint(  # trace
                joint,
                num_outputs,
                hold_outputs=hold_outputs,
                rules=self.inductor.rules if self.inductor is not None else None,
                leaving=leaving,
                rewriting=self.rewriting,
                real=self._trials if self.inductor is None else None,
                regather=self._regather,
            )
        step: TracedStep = joint.meta[_TRACED]
        return step


def emitted(
    chosen: Chosen, *, save_views: bool = True
) -> tuple[fx.GraphModule, fx.GraphModule, EmittedMemory]:
    """The two graphs of a schedule, checked, and what they need.

    Raises
    ------
    PlanError
        If they do not pass.
    """
    forward, backward = emit(chosen.step, chosen.schedule, save_views=save_views)  # emit
    if chosen.stores is not None:
        from hybridremat.compiler.offload.write import write_moves  # not where nothing moves

        write_moves(chosen.step, (forward, backward), chosen.schedule, chosen.stores)
    memory = check(chosen.step, forward, backward, limit=chosen.limit)  # check
    chosen.accept(memory)
    return forward, backward, memory


_TRACED = "hybridremat"  # in the metadata of a joint graph: its traced step


@contextmanager
def at_step(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], context: PlanContext, *, show: bool
) -> Iterator[PlanContext]:
    """The context of the step for these inputs, and a bar that shows how far it is."""
    origin = origin_of(model, args, kwargs, context.settings.spec)
    first = f"capturing the step of {type(model).__name__}, {shape_text(args, kwargs)}"
    with planning_progress(show=show, first=first) as progress:
        yield context.at(origin, progress)


def backend_for(
    settings: Settings,
    choose: Choose,
    *,
    build: bool = True,
    several: bool = False,
    trials: LayoutTrials | None = None,
) -> Backend:
    """The backend of steps of one graph or ``several``; without ``build`` they are planned and never run.

    ``trials``: see :class:`PlannedPartition`.
    """
    partition = partition_for(settings, choose, several=several, trials=trials)
    inner = partition.inductor or op_by_op
    return backend_of(settings, partition, inner, build=build, several=several)


def backend_of(
    settings: Settings,
    partition: Partitioner,
    inner: InnerCompiler = op_by_op,
    *,
    build: bool = True,
    several: bool = False,
    dynamic: bool = False,
) -> Backend:
    """The backend of steps that ``partition`` splits; ``dynamic``: with symbols for sizes."""
    return Backend(
        partition,
        hold_outputs=settings.hold_outputs,
        all_outputs=settings.grad_outputs == "all",
        several_graphs=several,
        loss_only=settings.outputs == "loss" and not several,  # outputs of one of several graphs are read
        early_gradients=settings.gradients == "in_backward",
        inner=inner,
        build=build,
        dynamic=dynamic,
    )


def partition_for(
    settings: Settings, choose: Choose, *, several: bool = False, trials: LayoutTrials | None = None
) -> PlannedPartition:
    """What splits the graph of a step, or its ``several`` graphs, by its settings."""
    inductor = None
    if settings.compiler == "inductor":
        from hybridremat.planning.lowered_judge import inductor_for

        inductor = inductor_for(settings)
    rewriting, regather = rewriting_of(settings, several=several), settings.gathers == "plan"
    return PlannedPartition(
        choose, inductor, rewriting, alone=not several, regather=regather, trials=trials
    )


def rewriting_of(settings: Settings, *, several: bool = False) -> JointRewrites | None:
    """How joint graphs are rewritten; None if they may not be."""
    chunked, exact = settings.rewrites == "chunked", settings.compiler == "eager"
    if settings.rewrites == "none" or not (exact or chunked):
        return None
    store_for = KernelStore.for_device if settings.cache else lambda _: KernelStore()
    known = None if settings.spec is not None else store_for  # with a spec nothing is run
    return JointRewrites(known, exact=exact, chunked=chunked, several=several)
