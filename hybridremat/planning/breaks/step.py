"""A step with graph breaks: survey it, plan its graphs together, and compile them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import compile_step, model_device, nothing_captured, run_once, training_mode
from hybridremat.compiler.capture_errors import without_gradients
from hybridremat.compiler.early_gradients import hook_workspace
from hybridremat.compiler.first_calls import set_up
from hybridremat.compiler.model_state import preserve_state_and_parameters
from hybridremat.compiler.sample_inputs import copied
from hybridremat.compiler.units import compile_units, find_units
from hybridremat.errors import HybridRematError
from hybridremat.planning.accept import require_policy
from hybridremat.planning.breaks.planner import PathPlanner
from hybridremat.planning.breaks.survey import Survey
from hybridremat.planning.chosen import Choose
from hybridremat.planning.context import PlanContext

BackendFor = Callable[[Choose], Backend]
"""Makes the backend of a step whose schedules a function gives."""


def plan_path(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    context: PlanContext,
    backend_for: BackendFor,
) -> tuple[Backend, Callable[..., Any], PathPlanner] | None:
    """The step of several graphs and what plans it, together; None if the step is one graph.

    The forward runs on copies, so that the first step holds nothing that compiling allocates.
    """
    surveyed = survey_step(model, args, kwargs, context, backend_for)
    if surveyed is None:
        return None
    survey, backend, compiled = surveyed
    breaks = PathPlanner(survey)  # combine
    backend.captured = True
    backend.partitioner, backend.select = backend_for(breaks.choose).partitioner, breaks.select
    if context.build:
        breaks.begin()
        with preserve_state_and_parameters(model):
            given, named = copied((args, kwargs), model)
            run_once(model, compiled, backend, given, named)
        breaks.ended()
    backend.settle(breaks.has_variants)
    return backend, compiled, breaks


def survey_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    context: PlanContext,
    backend_for: BackendFor,
) -> tuple[Survey, Backend, Callable[..., Any]] | None:
    """A survey of a step and what it captured; None if it is one graph."""
    survey = Survey(context)
    backend = backend_for(survey.choose)
    backend.visit, survey.running_unit = survey.visit, lambda: backend.unit
    backend.workspaces = {id(each): hook_workspace(each) for each in model.parameters()}
    if units := find_units(model, context.settings.units):
        compiled = compile_units(model, units, backend, shared=not context.settings.policy)
    else:
        compiled = compile_step(model, backend)
    ready = set_up(model)

    @contextmanager
    def trial() -> Iterator[Callable[[], Any]]:
        with preserve_state_and_parameters(model):
            given, named = copied((args, kwargs), model)
            yield lambda: run_once(model, compiled, backend, given, named)

    try:
        survey.run(trial, model_device(model))
    except HybridRematError:
        raise
    except Exception as error:
        run_plainly(model, args, kwargs)
        raise without_gradients(model, error, units) from error
    finally:
        backend.visit = None
    if not survey.ran:
        raise nothing_captured(model)
    if not survey.has_breaks:
        survey.ran.clear()  # PyTorch keeps every backend, and so what chooses for it
        return None
    if set_up(model) > ready:  # the first run broke at what no later one does
        return survey_step(model, args, kwargs, context, backend_for)
    require_policy([step.graph for step in survey.traced.values()], context)
    if survey.refused is not None:
        raise survey.refused
    if context.settings.rewrites == "chunked" and not survey.by_chunks:
        from hybridremat.graph.rewrites.loss_chunks import no_loss_in_any

        raise no_loss_in_any(len(survey.traced))
    return survey, backend, compiled


def run_plainly(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the plain forward in training, on copies: what it raises is the model's own error."""
    with preserve_state_and_parameters(model), training_mode(model), torch.enable_grad():
        given, named = copied((args, kwargs), model)
        model._call_impl(*given, **named)
