"""Wrap and plan models, and compute frontiers: checks first, then the planned call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hybridremat.compiler.capture import SLOT, no_backward
from hybridremat.compiler.model_checks import require_capturable, require_matching_inputs, require_trainable
from hybridremat.compiler.unread_memory import on_unread_memory, require_memory
from hybridremat.errors import CaptureError, LimitError, ModelError, PolicyError
from hybridremat.graph.costs.collectives import measured_gathers
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.accept import under_checked_policy
from hybridremat.planning.auto_breaks import with_breaks
from hybridremat.planning.chosen import Choose, Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.origin import origin_of
from hybridremat.planning.pipeline import backend_for, plan_step
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import step_frontier
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.rank_agreement import needs_one_plan, plan_digest
from hybridremat.planning.ranks import rendezvous
from hybridremat.planning.settings import Settings
from hybridremat.planning.step_costs import costed
from hybridremat.plans.origin import Origin
from hybridremat.plans.request import Request
from hybridremat.runtime.laid_aside import laid_aside, without
from hybridremat.runtime.planned_call import PlannedCall, planned_call

if TYPE_CHECKING:
    from hybridremat.planning.breaks.frontier import AnyFrontier, PathFrontier
    from hybridremat.planning.sized_frontier import SizedFrontier


def require_planned_call(model: nn.Module) -> PlannedCall:
    """The planned call of a wrapped model.

    Raises
    ------
    ModelError
        If the model is not wrapped.
    """
    call = planned_call(model)
    if call is None:
        raise ModelError(
            f"this {type(model).__name__} is not wrapped by hybridremat; call hybridremat.wrap first"
        )
    return call


@prompt_interrupts()
def make_planned_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    settings: Settings,
    *,
    plan: Plan | str | Path | None = None,
    progress: bool = False,
    across_ranks: bool = False,
    build: bool = True,
) -> PlannedCall:
    """A planned call with the plan for these inputs; the model is unchanged. Without ``build`` it cannot run.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.wrap`.
    """
    with rendezvous(across_ranks) as ranks:
        given = None if plan is None else given_plan(plan, settings)
        settings = settings if given is None else settings.following(given)
        if settings.memory_limit == "auto":
            from hybridremat.runtime.auto_limit import with_auto_limit

            settings = with_auto_limit(settings, model)
        settings = settings.validated(need_limit=True)
        model, args, kwargs = with_memory(model, args, {} if kwargs is None else kwargs, settings)
        rates = None
        if settings.gathers == "plan" and settings.costs().name == "profile" and not ranks.alone:
            rates = measured_gathers(model)
        context = PlanContext.of(settings, given=given, ranks=ranks, build=build, gathers=rates)
        call = _new_call(model, context, (args, kwargs), progress=progress)
        require_matching_inputs(model, args, kwargs)
        made = call.prepare(args, kwargs)
        one_plan = needs_one_plan(settings)
        ranks.finish(lambda: plan_digest(made) if made is not None else "", one_plan=one_plan)
    return call


def prepare_shape(call: PlannedCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
    """Plan a wrapped model for one more input shape: on all ranks together where they need one plan.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.prepare`.
    """
    agreement, one_plan = call.context.agreement, needs_one_plan(call.context.settings)
    with rendezvous(one_plan, "prepare") as ranks, agreement.among(ranks):
        made = call.prepare(args, kwargs)
        assert made is not None
        ranks.finish(partial(plan_digest, made), one_plan=one_plan)
    return made


@prompt_interrupts()
def model_frontier(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    settings: Settings,
    *,
    progress: bool,
) -> tuple[AnyFrontier, Settings, Origin, SizedFrontier | None]:
    """The frontier of a step, the validated settings, its origin, and the capture for all sizes, if any.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.frontier`.
    """
    settings = settings.validated(need_limit=False)
    model, args, kwargs = with_memory(model, args, {} if kwargs is None else kwargs, settings)
    return with_breaks(model, settings, partial(_frontier, model, args, kwargs, progress))


def _frontier(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], progress: bool, settings: Settings
) -> tuple[AnyFrontier, Settings, Origin, SizedFrontier | None]:
    found: list[AnyFrontier] = []
    sized: SizedFrontier | None = None
    with planning_progress(show=progress) as shown:
        origin = origin_of(model, args, kwargs, settings.spec)
        context = PlanContext.of(settings, build=not settings.dynamic).at(origin, shown)

        def choose(traced: TracedStep) -> Chosen:
            step, timings = costed(under_checked_policy(traced, context), context)
            found.append(step_frontier(step, timings, context))
            return Chosen(step, plain_schedule(step.graph))

        several = path_frontier(model, args, kwargs, context) if _in_several(settings) else None
        if several is not None:
            found.append(several)
        elif settings.dynamic:
            from hybridremat.planning.sized_frontier import capture_frontier

            whole, sized = capture_frontier(model, args, kwargs, context)
            found.append(whole)
        else:
            capture_only(model, args, kwargs, settings, choose)
        found[-1].points()  # a compiled step's are lowered here
    return found[-1], settings, origin, sized


def _in_several(settings: Settings) -> bool:
    """Whether a step may come in several graphs; what has to be one, with symbols for sizes, is refused."""
    if settings.several_graphs and settings.dynamic:
        raise CaptureError("steps of several graphs are captured for each input shape by itself")
    return settings.several_graphs


def path_frontier(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], context: PlanContext
) -> PathFrontier | None:
    """The frontier of a step with graph breaks; None if it is one graph."""
    from hybridremat.planning.breaks.frontier import PathFrontier
    from hybridremat.planning.breaks.step import survey_step

    _require_plannable(model, (args, kwargs))
    require_matching_inputs(model, args, kwargs)
    several = partial(backend_for, context.settings, several=True)
    with without(laid_aside(model)):
        surveyed = survey_step(model, args, kwargs, context, several)
    return None if surveyed is None else PathFrontier(surveyed[0])


def capture_only(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings, choose: Choose
) -> None:
    """Call ``choose`` with the traced step of a model; nothing is run or wrapped.

    Raises
    ------
    ModelError, CaptureError, InputError
        If the step cannot be captured.
    """
    _require_plannable(model, (args, kwargs))
    require_matching_inputs(model, args, kwargs)
    with without(laid_aside(model)):
        step = plan_step(model, args, kwargs, PlanContext.of(settings, build=False), choose=choose)
    if not step.backend.captured:
        raise no_backward(model)


def with_memory(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings
) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """The model and its inputs as they are captured.

    Raises
    ------
    ModelError
        If the model cannot be planned, or has no memory to run in here.
    """
    _require_plannable(model, (args, kwargs))
    if settings.spec is not None:
        return on_unread_memory(model, args, kwargs)
    require_memory(model)
    return model, args, kwargs


def _new_call(
    model: nn.Module,
    context: PlanContext,
    inputs: object = (),
    *,
    progress: bool,
    loss_outside: bool = False,
) -> PlannedCall:
    """A planned call without plans, for a model that can be planned."""
    _require_plannable(model, inputs)
    return PlannedCall(model, context, show=progress, loss_outside=loss_outside)


def _require_plannable(model: nn.Module, inputs: object) -> None:
    require_trainable(model, inputs)
    if planned_call(model) is not None:
        raise ModelError(
            f"this {type(model).__name__} is already wrapped; call hybridremat.unwrap(model) first"
        )
    inner = next((name for name, part in model.named_modules() if planned_call(part) is not None), None)
    if inner is not None:
        raise ModelError(
            f"the part {inner!r} of this {type(model).__name__} is already wrapped, and a step is planned "
            f"once: call hybridremat.unwrap(model.get_submodule({inner!r})) first, and wrap the whole model, "
            "or leave that as it is"
        )
    if getattr(model, SLOT, None) is not None:
        raise ModelError(
            f"this {type(model).__name__} is already compiled (model.compile(), or torch_compile=True of a "
            "training loop), and a call is either compiled or planned: leave that out"
        )
    require_capturable(model)


def given_plan(plan: Plan | str | Path, settings: Settings) -> Plan:
    """The plan of ``plan=``, read if it is a file.

    Raises
    ------
    LimitError, PolicyError
        If the settings have a limit or a policy too, or something else that the plan was not made for.
    PlanFormatError, PlanMismatchError
        If the file cannot be read, or the plan cannot be applied.
    TypeError
        If it is neither.
    """
    if settings.memory_limit is not None or settings.max_overhead is not None:
        raise LimitError(
            "plan= brings the limit that it was made for: pass plan=, or memory_limit= and max_overhead=, "
            "not both"
        )
    if settings.policy is not None:
        raise PolicyError("plan= brings the policy that it was made for: pass plan= or policy=, not both")
    from hybridremat.planning.apply import applicable

    if not isinstance(plan, Plan | str | PathLike):
        raise TypeError(f"plan={plan!r} is neither a Plan nor the path of a file that holds one")
    given = plan if isinstance(plan, Plan) else Plan.load(plan)
    if not given.parts:
        applicable(given)
    _require_same_request(given, settings)
    return given


def _require_same_request(given: Plan, settings: Settings) -> None:
    """Refuse settings that differ from those of the given plan: they would have no effect."""
    request = settings.request()
    for item in fields(Request):
        name, asked, was = item.name, getattr(request, item.name), getattr(given.request, item.name)
        if item.metadata.get("same") and asked not in (was, item.default):
            raise LimitError(
                f"{name}={asked!r} beside plan=, which was made with {name}={was!r}: leave it out, or "
                f"make a plan with {name}={asked!r}"
            )


def wrap_at_first_step(
    model: nn.Module,
    settings: Settings,
    *,
    given: Plan | None = None,
    progress: bool = True,
    loss_outside: bool = False,
) -> PlannedCall:
    """Wrap without sample inputs: the first training step is planned for its own inputs.

    ``loss_outside``: the loop computes the loss outside of the model, so that a step is planned once its
    first backward has shown how (:mod:`hybridremat.runtime.first_steps`); not with a given plan.

    Returns the planned call. Ranks of a process group do not wait for one another.

    Raises
    ------
    LimitError, CostModelError, ModelError, CaptureError
        As :func:`hybridremat.wrap`, before anything has changed. Errors that depend on inputs, such as an
        infeasible limit, are raised by the first step.
    """
    context = PlanContext.of(settings.validated(need_limit=True), given=given)
    call = _new_call(model, context, progress=progress, loss_outside=loss_outside and given is None)
    call.install()
    return call


def require_wrappable(model: nn.Module, settings: Settings) -> None:
    """Raise what :func:`wrap_at_first_step` would raise, without wrapping."""
    _new_call(model, PlanContext.of(settings.validated(need_limit=True)), progress=False)
