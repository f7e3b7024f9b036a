"""What comes before a wrap or a plan: checks, and the call that then stands in for the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hybridremat.compiler.capture import require_matching_inputs, require_traceable, require_trainable
from hybridremat.compiler.parallel_modules import require_local
from hybridremat.errors import LimitError, ModelError, PolicyError
from hybridremat.planning.apply import applicable
from hybridremat.planning.plan import Plan
from hybridremat.planning.rank_agreement import plan_name
from hybridremat.planning.ranks import ALONE, together
from hybridremat.planning.session import Session
from hybridremat.planning.settings import Settings
from hybridremat.runtime.auto_limit import with_auto_limit
from hybridremat.runtime.planned_call import SLOT, PlannedCall, planned_call


def wrap_planned(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    settings: Settings,
    *,
    plan: Plan | str | Path | None = None,
    progress: bool = False,
    across_ranks: bool = False,
) -> None:
    """Plan a model for sample inputs, and let the planned call stand in for its own.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.wrap`, before anything has changed.
    """
    call = prepared_call(
        model,
        args,
        kwargs,
        settings,
        only_frontier=False,
        progress=progress,
        across_ranks=across_ranks,
        plan=plan,
    )
    setattr(model, SLOT, call)


def remove_call(model: nn.Module) -> None:
    """Give a wrapped model its own call back.

    Raises
    ------
    ModelError
        If the model is not wrapped.
    """
    call_of(model)
    delattr(model, SLOT)


def call_of(model: nn.Module) -> PlannedCall:
    """What stands in for a wrapped model's call.

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


def prepared_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    settings: Settings,
    *,
    only_frontier: bool,
    progress: bool,
    across_ranks: bool = False,
    plan: Plan | str | Path | None = None,
) -> PlannedCall:
    """A planned call with the plan, or the frontier, for these inputs; the model is as it was.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.wrap`.
    """
    with together(across_ranks) as ranks:
        given = None if plan is None else given_plan(plan, settings)
        settings = settings if given is None else settings.following(given)
        checked = with_auto_limit(settings, model).validated(need_limit=not only_frontier)
        session = Session(checked, only_frontier=only_frontier, given=given)
        call = checked_call(model, session, progress=progress)
        require_matching_inputs(model, args, kwargs or {})
        session.agreement.ranks = ranks
        call.prepare(args, kwargs or {})
        ranks.finish(plan_name(session.plan) if session.plan is not None else "")
        session.agreement.ranks = ALONE  # an input shape that comes in training waits for nobody
    return call


def checked_call(
    model: nn.Module,
    session: Session,
    *,
    progress: bool,
) -> PlannedCall:
    """A planned call that has nothing planned yet.

    Raises
    ------
    ModelError, CaptureError
        If the model cannot be planned.
    """
    require_trainable(model)
    if planned_call(model) is not None:
        raise ModelError(
            f"this {type(model).__name__} is already wrapped; call hybridremat.unwrap(model) first"
        )
    if getattr(model, SLOT, None) is not None:
        raise ModelError(
            f"this {type(model).__name__} is already compiled (model.compile(), or torch_compile=True of a "
            "training loop), and a call is either compiled or planned: leave that out"
        )
    require_local(model)
    require_traceable(model)
    return PlannedCall(model, session, show=progress)


def given_plan(plan: Plan | str | Path, settings: Settings) -> Plan:
    """A plan that is to be applied, read if it is a file.

    Raises
    ------
    LimitError
        If the settings name a limit beside it, or ask for something else that it was not made for.
    PlanFormatError
        If the file cannot be read.
    """
    if settings.memory_limit is not None or settings.max_overhead is not None:
        raise LimitError(
            "plan= brings the limit that it was made for: pass plan=, or memory_limit= and max_overhead=, "
            "not both"
        )
    if settings.policy is not None:
        raise PolicyError("plan= brings the policy that it was made for: pass plan= or policy=, not both")
    given = plan if isinstance(plan, Plan) else Plan.load(plan)
    applicable(given)
    _require_asked_for(given, settings)
    return given


def _require_asked_for(given: Plan, settings: Settings) -> None:
    """Refuse settings that would make another plan than the one that is given: they would change nothing."""
    brings, usual = settings.following(given), Settings()
    for name in ("reserve", "forwards", "hold_outputs", "grad_outputs"):
        asked, brought = getattr(settings, name), getattr(brings, name)
        same = settings.reserve_bytes() == given.reserve if name == "reserve" else asked == brought
        if not same and asked != getattr(usual, name):
            raise LimitError(
                f"{name}={asked!r} beside plan=, which was made with {name}={brought!r}: leave it out, or "
                f"make a plan with {name}={asked!r}"
            )


def wrap_at_first_step(
    model: nn.Module, settings: Settings, *, given: Plan | None = None, progress: bool = True
) -> PlannedCall:
    """Wrap without sample inputs: the first training step is planned for what it is given.

    Returns what stands in for the model's call. Ranks of a process group do not wait for one another.

    Raises
    ------
    LimitError, CostModelError, ModelError, CaptureError
        As :func:`hybridremat.wrap`, before anything has changed. What needs inputs to be known, an
        infeasible limit among it, comes out of the first step.
    """
    session = Session(settings.validated(need_limit=True), given=given)
    call = checked_call(model, session, progress=progress)
    setattr(model, SLOT, call)
    return call


def require_wrappable(model: nn.Module, settings: Settings) -> None:
    """Raise what :func:`wrap_at_first_step` would raise; nothing is changed."""
    checked_call(model, Session(settings.validated(need_limit=True)), progress=False)
