"""The public functions: wrap, unwrap, plan, get_plan, frontier."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from hybridremat.backend import Backend
from hybridremat.capture import (
    capture,
    compile_step,
    require_matching_inputs,
    require_trainable,
    translated_errors,
)
from hybridremat.curve import Frontier, make_frontier
from hybridremat.errors import ModelError
from hybridremat.graph.costs import CostModel
from hybridremat.plans import Plan
from hybridremat.progress import planning_progress
from hybridremat.session import Session
from hybridremat.settings import GradOutputs, Settings

M = TypeVar("M", bound=nn.Module)

_SLOT = "_compiled_call_impl"  # where nn.Module.compile puts a compiled call; not copied or pickled


class PlannedCall:
    """Stands in for a module's call: planned in training, plain otherwise."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        self.model, self.session = model, session
        self.backend = Backend(
            session,
            hold_outputs=session.settings.hold_outputs,
            all_outputs=session.settings.grad_outputs == "all",
        )
        self.compiled = compile_step(model, self.backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the planned step in training, the plain model in eval mode or without gradients."""
        if not self.model.training or not torch.is_grad_enabled():
            return self.model._call_impl(*args, **kwargs)
        with translated_errors(self.model, self.backend):
            return self.compiled(*args, **kwargs)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, show: bool) -> None:
        """Capture and plan for sample inputs; nothing runs."""
        started = time.perf_counter()
        with planning_progress(show=show) as progress:
            self.session.progress = progress
            capture(self.model, self.compiled, self.backend, args, kwargs)
        self.session.note_total(time.perf_counter() - started)


def _prepared(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    settings: Settings,
    *,
    only_frontier: bool,
    progress: bool,
) -> PlannedCall:
    settings.validated(need_limit=not only_frontier)
    require_trainable(model)
    if getattr(model, _SLOT, None) is not None:
        raise ModelError(
            f"this {type(model).__name__} is already wrapped or compiled; call "
            "hybridremat.unwrap(model) first"
        )
    require_matching_inputs(model, args, kwargs or {})
    call = PlannedCall(model, Session(settings, only_frontier=only_frontier))
    call.prepare(args, kwargs or {}, show=progress)
    return call


def wrap(
    model: M,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_limit: int | str | None = None,
    max_overhead: float | str | None = None,
    reserve: int | str = 0,
    cost_model: str | CostModel = "profile",
    hold_outputs: bool = False,
    grad_outputs: GradOutputs = "auto",
    workers: int | None = None,
    progress: bool = True,
) -> M:
    """Make a model's training step fit a memory limit, in place, and return the same object.

    Parameters
    ----------
    model
        Any module; it may be in eval mode, it is planned for training.
    args, kwargs
        Sample inputs: what one training step passes. Nothing is run on them.
    memory_limit
        Most step memory: bytes, ``"6GiB"``, or ``"50%"`` of the plain step's. Step memory is everything
        allocated above what is resident (parameters, buffers, optimizer state, inputs).
    max_overhead
        Least memory at no more than this much extra time (0.1 or ``"10%"``). With ``memory_limit`` both hold.
    reserve
        Bytes of the limit kept free, once the forward is over, for what the caller's own code allocates
        between forward and backward (a loss outside the model). :func:`hybridremat.measure` reports how
        much that is, as ``outside``.
    cost_model
        Source of times: ``"profile"`` (measured here), ``"roofline"``, ``"flops"`` (the same everywhere).
    hold_outputs
        Whether outputs other than the loss are kept through the backward. By default they are taken to be
        dropped, as in ``loss = model(**batch).loss``; if they are held all the same, a warning says so.
    grad_outputs
        Which outputs may take part in the loss: ``"auto"`` (the scalars, if any output is one; else all) or
        ``"all"``.
    workers
        Processes that solve blocks; None: one a core. The plan is the same for any number.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    nn.Module
        ``model`` itself. ``state_dict()``, parameter names, type, hooks and optimizers are untouched. In eval
        mode or without gradients the plain model runs. A new input shape gets a plan of its own.

    Raises
    ------
    LimitError, InfeasibleLimitError, ModelError, InputError, CaptureError
        Before anything has changed.

    Examples
    --------
    >>> model = hybridremat.wrap(model, kwargs=batch, memory_limit="60%")  # doctest: +SKIP
    """
    settings = Settings(memory_limit, max_overhead, reserve, cost_model, hold_outputs, grad_outputs, workers)
    call = _prepared(model, args, kwargs, settings, only_frontier=False, progress=progress)
    setattr(model, _SLOT, call)
    return model


def unwrap(model: M) -> M:
    """Undo :func:`wrap` and return the same object.

    Raises
    ------
    ModelError
        If the model is not wrapped.
    """
    _call_of(model)
    delattr(model, _SLOT)
    return model


def _call_of(model: nn.Module) -> PlannedCall:
    call = getattr(model, _SLOT, None)
    if not isinstance(call, PlannedCall):
        raise ModelError(
            f"this {type(model).__name__} is not wrapped by hybridremat; call hybridremat.wrap first"
        )
    return call


def get_plan(model: nn.Module) -> Plan:
    """The plan that a wrapped model ran or made last (each input shape has one).

    Raises
    ------
    ModelError
        If the model is not wrapped.
    """
    plan = _call_of(model).session.plan
    assert plan is not None
    return plan


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_limit: int | str | None = None,
    max_overhead: float | str | None = None,
    reserve: int | str = 0,
    cost_model: str | CostModel = "profile",
    hold_outputs: bool = False,
    grad_outputs: GradOutputs = "auto",
    workers: int | None = None,
    progress: bool = True,
) -> Plan:
    """Only plan: the parameters and errors of :func:`wrap`; the model stays as it is."""
    settings = Settings(memory_limit, max_overhead, reserve, cost_model, hold_outputs, grad_outputs, workers)
    call = _prepared(model, args, kwargs, settings, only_frontier=False, progress=progress)
    made = call.session.plan
    assert made is not None
    return made


def frontier(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cost_model: str | CostModel = "profile",
    hold_outputs: bool = False,
    grad_outputs: GradOutputs = "auto",
    workers: int | None = None,
    progress: bool = True,
) -> Frontier:
    """The whole Pareto curve of step memory against overhead, from one planning run.

    Parameters and errors as in :func:`wrap`; the model stays as it is.
    """
    settings = Settings(
        cost_model=cost_model, hold_outputs=hold_outputs, grad_outputs=grad_outputs, workers=workers
    )
    call = _prepared(model, args, kwargs, settings, only_frontier=True, progress=progress)
    planning = call.session.planning
    assert planning is not None
    return make_frontier(planning)
