"""The call of a wrapped model: planned steps, one for each input shape."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache, cached_property, partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybridremat.compiler.backend import Backend, CapturedGraph, SurveyNeededError
from hybridremat.compiler.capture import SLOT, model_device, no_backward, translated_errors
from hybridremat.compiler.forgetting import DynamoBackend
from hybridremat.compiler.model_state import preserve_state_and_parameters
from hybridremat.compiler.output_hooks import HeldOutputs, returned_outputs
from hybridremat.compiler.sample_inputs import copied, input_leaves
from hybridremat.errors import (
    CaptureError,
    HybridRematError,
    InfeasibleLimitError,
    InputError,
    LimitError,
    ModelError,
    UntriedKernelError,
)
from hybridremat.graph.garbage import free_frames
from hybridremat.graph.memory import step_memory
from hybridremat.graph.private_dynamo import replace_call
from hybridremat.graph.private_torch import inside_transform, not_traced
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.auto_breaks import with_breaks
from hybridremat.planning.context import PlanContext
from hybridremat.planning.input_keys import shape_text, unlike
from hybridremat.planning.pipeline import Step, at_step, backend_for, plan_step
from hybridremat.planning.plan import Plan
from hybridremat.planning.progress import say
from hybridremat.planning.rank_agreement import (
    needs_one_plan,
    require_planned_together,
    require_same_step,
)
from hybridremat.planning.settings import Settings
from hybridremat.plans.sizes import require_several
from hybridremat.runtime.in_flight import ForwardsInFlight, counts_retained
from hybridremat.runtime.known_steps import KnownSteps
from hybridremat.runtime.laid_aside import laid_aside, without
from hybridremat.units import format_bytes

if TYPE_CHECKING:
    from hybridremat.planning.breaks.survey import Survey
    from hybridremat.reports.size_curve import SizeCurve
    from hybridremat.runtime.all_sizes import AllSizes
    from hybridremat.runtime.first_steps import FirstSteps, SeenLoss
    from hybridremat.runtime.tuning import Tuning

logger = logging.getLogger(__name__)

NOT_TRACED = "its model is wrapped by hybridremat, and a planned step is a graph of its own"
MANY_CAPTURES = 8  # of one input shape; switching modes, frozen layers and autocast takes fewer


class PlannedCall:
    """Replaces a module's call: planned in training, plain otherwise.

    Steps are kept by input shape (``known_steps.py``). With ``Settings.dynamic``, shapes that differ in sizes
    alone share theirs (``all_sizes.py``).

    Attributes
    ----------
    around_forward
        Makes a context manager that is entered around each planned forward, once its step is planned.
    sizes
        The steps that are captured with symbols for sizes; None without ``Settings.dynamic``.
    first_steps
        Runs the first step of each shape where the loop computes the loss outside of the model
        (``loss_outside``); else None.
    tuning
        The schedules that take turns, or have (:func:`hybridremat.tune`).
    """

    def __init__(
        self, model: nn.Module, context: PlanContext, *, show: bool = False, loss_outside: bool = False
    ) -> None:
        self.model, self.context = model, context
        self._asked = context.settings
        self._show = show
        self.in_flight = ForwardsInFlight(context)
        self._steps = KnownSteps(model)
        self._one_path = threading.RLock()  # of planning, and of a forward that takes a path through graphs
        self.sizes: AllSizes | None = None
        if context.settings.dynamic is not False:
            from hybridremat.runtime.all_sizes import AllSizes

            self.sizes = AllSizes(model, show=show)
        self._laid_aside = laid_aside(model)
        self._warned_of_captures = self._sharded_as_planned = False
        self.around_forward: Callable[[], AbstractContextManager[None]] = nullcontext
        self._held = HeldOutputs(expected=context.settings.hold_outputs)
        self.tuning: Tuning | None = None
        self.first_steps: FirstSteps | None = None
        if loss_outside:
            from hybridremat.runtime.first_steps import FirstSteps

            self.first_steps = FirstSteps(model, self._plan_for, self._planned_call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the planned step in training, the plain model in eval mode or without gradients."""
        if self.model.training and torch.is_grad_enabled():
            return self._in_training(args, kwargs)
        output = self.model._call_impl(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.in_flight.after_plain(output, type(self.model).__name__)
        return output

    @partial(not_traced, reason=NOT_TRACED)
    def _in_training(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if inside_transform():
            raise ModelError(
                f"this {type(self.model).__name__} is wrapped, and was called inside a transform of "
                "torch.func (grad, vmap, jvp), which a plan knows nothing of. Call model.forward(…) "
                "there instead of model(…), which runs the plain model, or hybridremat.unwrap(model)."
            )
        if self.first_steps is not None:
            with without(self._laid_aside):
                return self.first_steps.forward(args, kwargs)
        return self._planned_call(args, kwargs)

    def _planned_call(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, held: int = 0) -> Any:
        handled = sys.exception()
        with without(self._laid_aside):
            try:
                return self._planned_forward(args, kwargs, held)
            except InfeasibleLimitError as error:
                free_frames(error, until=handled)  # the loop may go on with another batch
                if not self.in_flight.retained:
                    raise
                raise self.in_flight.for_retained(error) from error.__cause__
            except (CaptureError, InputError, UntriedKernelError):
                self._raise_as_plain(args, kwargs)
                raise

    def install(self) -> None:
        """Replace the model's own call, also for functions that were compiled with it before."""
        _refuse_to_compile()
        replace_call(self.model, self, except_by=DynamoBackend)

    def remove(self) -> None:
        """Give the model its own call back."""
        delattr(self.model, SLOT)

    @property
    def plan(self) -> Plan | None:
        """The plan of the step that ran or was compiled last."""
        return self.context.store.current

    @property
    def captures(self) -> int:
        """The number of graphs compiled for the steps that are kept; it changes when a step is planned."""
        sized = self.sizes.captures if self.sizes is not None else 0
        return sized + sum(step.backend.graphs for step in self._steps.values())

    def graph_of(self, fingerprint: str) -> CapturedGraph | None:
        """The graph of a kept step with this fingerprint whose schedules may take turns."""
        found = (step.backend.graph_of(fingerprint) for step in self._steps.values())
        return next((graph for graph in found if graph is not None), None)

    def _plan_for(self, loss: SeenLoss) -> None:
        """Plan the next step for a loss that the loop computes."""
        asked = self._asked
        reserve = max(asked.reserve_bytes(), loss.outside or 0)
        settings = replace(
            asked, reserve=reserve, grad_outputs="all" if loss.beyond_scalars else asked.grad_outputs
        ).validated(need_limit=True)
        self.context = replace(PlanContext.of(settings), store=self.context.store)
        self.in_flight.context = self.context
        self._steps.refusals.clear()
        logger.info(
            "the loss of %s is computed outside of it: %s, and %s are reserved for what that allocates",
            type(self.model).__name__,
            "all outputs take part in it" if loss.beyond_scalars else "it is made of its scalar outputs",
            format_bytes(reserve),
        )

    @cached_property
    def _units(self) -> dict[str, nn.Module]:
        if not self.context.settings.units:
            return {}
        from hybridremat.compiler.units import find_units

        return find_units(self.model, self.context.settings.units)

    @property
    def _may_be_sharded(self) -> bool:
        """Whether parameters were planned to be sharded by FSDP2, or are in a module that it has taken."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(fsdp, "FSDPModule", type(None))
        taken = (self.model,) if self._sharded_as_planned else self.model.modules()
        return self.context.settings.sharding is not None or any(isinstance(each, kind) for each in taken)

    def _planned_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], held: int) -> Any:
        if self._may_be_sharded:
            from hybridremat.runtime.sharded import require_sharded_as_planned

            planned, again = self.context.settings.sharding, self._sharded_as_planned
            require_sharded_as_planned(self.model, self._units, planned, again=again)
        self._sharded_as_planned = True
        with self._one_path:
            tuned = self.tuning is None or self.tuning.done
            if tuned and self.in_flight.retained and self.context.settings.forwards == 1:
                self._count_retained()
            if len(self._steps) > 1 and needs_one_plan(self.context.settings):
                key, known = self._key(args, kwargs), list(self._steps)
                require_same_step(known.index(key) if key in known else -1, model_device(self.model))
            step = self._step(args, kwargs)
            if held:
                step = self._with_room(step, args, kwargs, held)
            if step.breaks is not None:
                step.breaks.begin()
                return self._run_planned(step, args, kwargs)
        return self._run_planned(step, args, kwargs)

    def _count_retained(self) -> None:
        """Plan all steps anew, for what a backward with ``retain_graph`` leaves there."""
        if not counts_retained(self.context):
            return
        granted = self.context.store.granted
        self.context = self.in_flight.context = PlanContext.of(replace(self.context.settings, forwards=2))
        self.context.store.granted = granted
        self._asked = replace(self._asked, forwards=2)
        self._steps = KnownSteps(self.model)
        if self.sizes is not None:
            self.sizes = self.sizes.forgetting()

    def _run_planned(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.in_flight.before_forward()
        with self.around_forward():
            step, output = self._run(step, args, kwargs)
        self.in_flight.after_forward(output, several_graphs=step.breaks is not None)
        self._notice_captures(step.backend)
        return output

    def _with_room(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any], held: int) -> Step:
        """A step, or another one for this call alone, whose forward leaves the loop so many bytes.

        Plans count nothing of the loop's in a forward; this one has gradients of its outputs beside it.
        """
        plan = self.plan
        if plan is None or plan.memory_limit is None or _forward_peak(plan) + held <= plan.memory_limit:
            return step
        narrow = replace(
            self.context.settings,
            memory_limit=max(1, plan.memory_limit - held),
            max_overhead=None,
            on_infeasible="least",
        )
        context = PlanContext.of(narrow)
        made = plan_step(self.model, args, kwargs, context)
        least = context.store.current
        if least is not None and _forward_peak(least) + held > plan.memory_limit:
            logger.warning(
                "the first step of %s for these shapes may take %s more than the limit: gradients of its "
                "outputs are there while its forward runs, this once.",
                type(self.model).__name__,
                format_bytes(_forward_peak(least) + held - plan.memory_limit),
            )
        return made

    def _notice_captures(self, backend: Backend) -> None:
        """Warn, once, if steps are captured again and again for inputs of one shape."""
        if backend.graphs >= MANY_CAPTURES and not backend.several_graphs and not self._warned_of_captures:
            self._warned_of_captures = True
            logger.warning(
                "%s has been captured %d times for inputs of one shape: something that its forward reads "
                "keeps changing (a Python number on a module, self.calls += 1?), and each change is captured "
                'and planned anew, which takes seconds. TORCH_LOGS="recompiles" names it.',
                type(self.model).__name__,
                backend.graphs,
            )

    def _run(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Step, Any]:
        """Run a step, or another one if its graphs have changed: which, and what it returns."""
        needed, start = SurveyNeededError(), None
        if step.breaks is not None:
            from hybridremat.compiler.forward_start import ForwardStart

            inputs = [leaf for leaf in input_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            start = ForwardStart.now(self.model, inputs)
            step.breaks.enter(start, counting=not self._may_be_sharded)  # FSDP2's hooks make nodes
        try:
            return step, self._compiled(step, args, kwargs)
        except SurveyNeededError as error:
            assert start is not None, "a step of one graph is never surveyed"
            start.draw_again()
            needed = error.fresh()
        except CaptureError as error:
            settings = self.context.settings
            breaks_now = bool(error.place) and settings.graph_breaks == "auto"
            if step.breaks is not None or not (settings.several_graphs or breaks_now):
                raise
        finally:
            if start is not None:
                start.let_go()
        with self._one_path:
            step = self._surveyed_again(step, args, kwargs, needed)
            return step, self._compiled(step, args, kwargs)

    def _compiled(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            with translated_errors(self.model, step.backend):
                output = step.compiled(*args, **kwargs)
            if step.breaks is not None:
                step.breaks.ended()
        finally:
            if step.breaks is not None:
                step.breaks.let_go()
        if step.breaks is not None:
            output = returned_outputs(output, self.context.settings)
            self._held.watch(output, input_leaves((args, kwargs)), self.context.settings)
        return output

    def _surveyed_again(
        self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any], needed: SurveyNeededError
    ) -> Step:
        """The step with the path of these inputs added, or a new one if that does not fit.

        As it was, if it can run so and nothing can be surveyed now.
        """
        try:
            return self._with_path(step, args, kwargs)
        except InfeasibleLimitError:
            raise
        except (HybridRematError, torch.OutOfMemoryError) as error:
            if needed.needed and needed.refused is None:
                raise
            logger.info("the path of a step was not surveyed: %s", error)
        if needed.refused is not None:
            raise needed.refused
        assert step.breaks is not None, "only a step with graph breaks can run as it was"
        step.breaks.begin_unmeasured()
        return step

    def _with_path(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        self._require_whole(args, kwargs)
        if step.breaks is None:
            return self._anew(args, kwargs)
        with suppress(InfeasibleLimitError):
            self._add_path(step, args, kwargs)
            return step
        with step.breaks.unless_refused_alone():
            return self._anew(args, kwargs)

    def _with_prepared_path(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """The step with the path of sample inputs added, or a new one if that does not fit."""
        try:
            self._add_path(step, args, kwargs, compiled=False)
        except InfeasibleLimitError:
            if self.context.settings.sharding is not None:
                raise  # once parameters are sharded, the paths before this one cannot be planned again
        else:
            return step
        return self._anew(args, kwargs)

    def _add_path(
        self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any], *, compiled: bool = True
    ) -> None:
        """Survey the path of these inputs, if the step has graph breaks, and plan it beside the others.

        ``compiled``: a path of one graph is that of the graph that was compiled last, not nothing new.

        Raises
        ------
        InfeasibleLimitError
            If it does not fit so.
        """
        if step.breaks is None:
            return
        survey = self._path(step, args, kwargs)
        step.backend.shared |= survey.shared if survey is not None else set()
        if compiled or survey is not None:
            step.breaks.add_path(survey, on_infeasible="error")

    def _anew(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """A step that is planned for these inputs alone."""
        several = self.context.settings.several_graphs
        anew = with_breaks(self.model, self.context.settings, partial(self._planned, args, kwargs))
        if self.context.settings.several_graphs != several:
            self._steps.clear()
        self._keep(args, kwargs, anew)
        if anew.breaks is not None:
            anew.breaks.begin()  # planning it ran its graphs
        return anew

    @prompt_interrupts()
    def _path(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Survey | None:
        """A survey of the path on which a step takes these inputs; None if it has no graph breaks."""
        from hybridremat.planning.breaks.step import survey_step

        with at_step(self.model, args, kwargs, self.context, show=self._show) as context:
            several = partial(backend_for, context.settings, several=True)
            surveyed = survey_step(self.model, args, kwargs, context, several, known=step.backend)
        return None if surveyed is None else surveyed[0]

    def _raise_as_plain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise what the plain model raises on these inputs, if it does: callers may catch it."""
        with preserve_state_and_parameters(self.model), torch.no_grad():
            given, named = copied((args, kwargs), self.model)
            self.model._call_impl(*given, **named)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """Capture and plan for sample inputs; no step is run.

        Raises
        ------
        CaptureError
            If no output depends on a trainable parameter.
        """
        with self._one_path, without(self._laid_aside):
            known = self._key(args, kwargs) in self._steps
            step = self._step(args, kwargs)
            if known:
                step = self._with_prepared_path(step, args, kwargs)
        if not step.backend.captured:
            raise no_backward(self.model)
        if step.breaks is None:
            self.context.store.use(step.fingerprint)
        return self.plan

    def curve(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sequence[Mapping[str, int]]
    ) -> SizeCurve:
        """Capture for sizes by name and plan at each of them; no step is run. Raises as :func:`prepare`."""
        if self.sizes is None or (why := self.context.settings.one_capture_refused()):
            given = "dynamic=False" if self.sizes is None else why
            raise LimitError(f"sizes= need one capture for all of them, and {given} makes one for each shape")
        require_several(sizes)
        with self._one_path, without(self._laid_aside):
            return self.sizes.curve(args, kwargs, sizes, self.context)

    def _step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        key = self._key(args, kwargs)
        if (step := self._steps.get(key)) is not None:
            return step
        if self.sizes is not None and (known := self.sizes.known(args, kwargs)) is not None:
            return known
        started = time.perf_counter()
        self._require_whole(args, kwargs)
        with self._steps.unless_refused(args, kwargs, self.context):
            sized = None if self.sizes is None else self.sizes.step(args, kwargs, self.context)
        if sized is not None:
            taken = time.perf_counter() - started
            logger.info("new shape %s: planned in %.1f s", shape_text(args, kwargs), taken)
            return sized
        step = with_breaks(self.model, self.context.settings, partial(self._planned, args, kwargs))
        if self.sizes is not None:
            self.sizes.planned_alone(args, kwargs)
            if step.fingerprint is not None:  # plans of other sizes may take its place in the store
                self.context.store.keep_figures(step.fingerprint)
        self._keep(args, kwargs, step)
        if len(self._steps) > 1:
            self._say_new_shape(args, kwargs, time.perf_counter() - started)
        return step

    def _require_whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse to plan a step whose parameters are sharded by now: ranks would wait for one another."""
        if self.context.build:
            require_planned_together(self.context.settings, self.context.agreement)
        if not self._may_be_sharded:
            return
        from hybridremat.graph.private_fsdp import is_sharded

        if any(map(is_sharded, self.model.modules())):
            known: list[Any] = list(self._steps)
            others = " and ".join(unlike(args, kwargs, (inputs for inputs, _ in known)))
            what = f"{others}: shape, dtype or value" if others else "its shape, or the graphs that it takes"
            raise ModelError(
                f"a step on {shape_text(args, kwargs)} has not been planned ({what}), and the parameters of "
                f"this {type(self.model).__name__} are sharded by now; it has not run. Call "
                "hybridremat.prepare(model, …) with inputs of each shape before fully_shard, or pad inputs "
                "to the shapes that are planned"
            )

    def _planned(self, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings) -> Step:
        """The step with these settings, which are those of the model from then on."""
        context = replace(self.context, settings=settings)
        with self._steps.unless_refused(args, kwargs, context):
            step = plan_step(self.model, args, kwargs, context, show=self._show)
        if settings is not self.context.settings:
            self._asked = replace(
                self._asked, graph_breaks=settings.graph_breaks, units=settings.units
            )
            self.context = self.in_flight.context = context
        return step

    def _keep(self, args: Sequence[Any], kwargs: Mapping[str, Any], step: Step) -> None:
        """Keep a step once it is planned: a shape that cannot be must not cost another its plan."""
        self._steps.keep(self._key(args, kwargs), step, most=self.context.settings.max_plans)

    def _say_new_shape(self, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float) -> None:
        plans = f"{len(self._steps)} of {self.context.settings.max_plans}"
        say(f"new shape {shape_text(args, kwargs)}: planned in {seconds:.1f} s, {plans}", show=self._show)

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        return self._steps.key(args, kwargs, self.context.settings)


def planned_call(model: nn.Module) -> PlannedCall | None:
    """The planned call of a wrapped module; None if it is not wrapped."""
    call = getattr(model, SLOT, None)
    return call if isinstance(call, PlannedCall) else None


@cache
def _refuse_to_compile() -> None:
    """Make ``nn.Module.compile`` of a wrapped model an error: it would take the plan off without a word."""
    usual = nn.Module.compile

    @wraps(usual)
    def compile_unless_planned(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if planned_call(module) is not None:
            raise ModelError(
                f"this {type(module).__name__} is wrapped, and a call is either planned or compiled: call "
                "hybridremat.unwrap(model) before model.compile(), or leave that out. "
                'wrap(…, compiler="inductor") compiles what is planned.'
            )
        usual(module, *args, **kwargs)

    nn.Module.compile = compile_unless_planned  # type: ignore[method-assign, assignment]


def _forward_peak(plan: Plan) -> int:
    """Most bytes of a plan's forward; where they are not known, of its whole step."""
    if plan.details is None or plan.compiler != "eager":
        return plan.predicted_peak
    profile = step_memory(plan.details.graph, plan.schedule).profile
    return max(profile[: plan.schedule.num_forward], default=0)
