"""A step with graph breaks: survey it, plan its graphs together, and compile them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import (
    attention_of,
    compile_step,
    model_device,
    nothing_captured,
    run_once,
    training_mode,
)
from hybridremat.compiler.capture_errors import without_gradients
from hybridremat.compiler.early_gradients import hook_workspace
from hybridremat.compiler.first_calls import set_up
from hybridremat.compiler.model_state import preserve_state_and_parameters
from hybridremat.compiler.sample_inputs import copied
from hybridremat.compiler.units import compile_units, find_units
from hybridremat.compiler.unread_runs import UnreadRun
from hybridremat.errors import CaptureError, HybridRematError, LimitError
from hybridremat.planning.accept import require_policy
from hybridremat.planning.breaks.own_units import own_units
from hybridremat.planning.breaks.planner import PathPlanner
from hybridremat.planning.breaks.sharding import Sharding, Trained
from hybridremat.planning.breaks.shards import as_gathered, gathered_dtype, returned_dtype
from hybridremat.planning.breaks.survey import Survey
from hybridremat.planning.breaks.trained import require_graphs, trained_in
from hybridremat.planning.chosen import Choose
from hybridremat.planning.context import PlanContext
from hybridremat.plans.fsdp import Fsdp

logger = logging.getLogger(__name__)

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
        with preserve_state_and_parameters(model, as_gathered(context.settings.sharding)):
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
    *,
    known: Backend | None = None,
) -> tuple[Survey, Backend, Callable[..., Any]] | None:
    """A survey of a step and what it captured; None if it is one graph.

    With units, what runs between them is captured too, unless that breaks as well or is captured anew in
    each run: it may be another graph for other data.
    ``known``: of the step, where this is another path of it.
    """
    units, sharding = find_units(model, context.settings.units), context.settings.sharding
    if sharding is not None:
        _require_units(units, sharding.tail)
    surveyed = _Step(model, args, kwargs, context, backend_for, units, known)
    if not units:
        return surveyed.survey(lambda backend: compile_step(model, backend))
    dtypes = gathered_dtype(sharding), returned_dtype(sharding)
    compiled = partial(compile_units, model, units, shared=not context.settings.policy, dtypes=dtypes)
    if known is None or known.captures_rest:
        try:
            return surveyed.survey(partial(compiled, rest=True), stable=known is None)
        except CaptureError as error:
            if known is not None:
                raise
            logger.info("what runs between the units of %s runs as it is: %s", type(model).__name__, error)
    return surveyed.survey(partial(compiled, rest=False))


def _require_units(units: Collection[str], tail: Sequence[str]) -> None:
    """Refuse a tail that is not made of units."""
    missing = [name for name in tail if name not in units]
    if missing:
        raise LimitError(
            f"fsdp: {missing[0]!r} of tail={tuple(tail)!r} is no unit: name it as one, too "
            f"(hybridremat.wrap_each(model, [\"layers.*\", {', '.join(map(repr, tail))}], …)"
        )


@dataclass(frozen=True)
class _Step:
    """A step to be surveyed, with its ``units`` by name, if it has any; ``known``: what has other paths."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    context: PlanContext
    backend_for: BackendFor
    units: dict[str, nn.Module]
    known: Backend | None

    def survey(
        self, compiled_by: Callable[[Backend], Callable[..., Any]], *, stable: bool = False
    ) -> tuple[Survey, Backend, Callable[..., Any]] | None:
        """A survey of the call that ``compiled_by`` makes for a backend.

        ``stable``: it is refused if its graphs break at anything but units, or are captured in each run.

        Raises
        ------
        HybridRematError
        """
        survey = Survey(self.context, stable=stable)
        backend = self.backend_for(survey.choose)
        backend.visit = survey.visit
        if self.known is not None:
            backend.unread = self.known.unread
        backend.workspaces = {id(each): hook_workspace(each) for each in self.model.parameters()}
        compiled = compiled_by(backend)
        ready, settings = set_up(self.model), self.context.settings
        try:
            with attention_of(settings.capability()):
                survey.run(partial(self._trial, backend, compiled), model_device(self.model), backend)
            if settings.sharding is not None:
                require_graphs(backend.calls, survey.calls, self.units)
                trained = trained_in(survey, self.units, settings.sharding.tail)
                survey.sharded = self._sharded(trained)
                survey.sharding = survey.sharded(settings.sharding)
        except HybridRematError:
            raise
        except Exception as error:
            if settings.spec is None:
                run_plainly(self.model, self.args, self.kwargs)
            raise without_gradients(self.model, error, self.units) from error
        finally:
            backend.visit = None
        if not survey.ran:
            raise nothing_captured(self.model, () if self.units else self._own_units())
        if not survey.has_breaks:
            survey.ran.clear()  # PyTorch keeps every backend, and so what chooses for it
            return None
        if set_up(self.model) > ready:  # the first run broke at what no later one does
            return self.survey(compiled_by, stable=stable)
        self._require_kept(survey)
        return survey, backend, compiled

    @contextmanager
    def _trial(self, backend: Backend, compiled: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
        settings = self.context.settings
        on_paper = settings.spec is not None
        gathered = as_gathered(settings.sharding, on_paper=on_paper)
        with preserve_state_and_parameters(self.model, gathered, on_paper=on_paper):
            given, named = copied((self.args, self.kwargs), self.model)
            with nullcontext() if settings.spec is None else UnreadRun(settings.spec.rounded):
                yield lambda: run_once(self.model, compiled, backend, given, named)

    def _sharded(self, trained: Trained) -> Callable[[Fsdp], Sharding]:
        """What FSDP2 makes of the model, by how it is called."""
        spec = self.context.settings.spec
        return lambda fsdp: Sharding.of(self.model, self.units, fsdp, trained, spec)

    def _own_units(self) -> tuple[str, ...]:
        """Submodules of which something can be captured."""

        def survey() -> tuple[Survey, Backend]:
            made = Survey(self.context)
            backend = self.backend_for(made.choose)
            backend.visit = made.visit
            return made, backend

        return own_units(self.model, survey, self._trial)

    def _require_kept(self, survey: Survey) -> None:
        """Refuse settings that no graph of the step can keep."""
        require_policy([step.graph for step in survey.traced.values()], self.context)
        if survey.refused is not None:
            raise survey.refused
        if self.context.settings.rewrites == "chunked" and not survey.by_chunks:
            from hybridremat.graph.rewrites.loss_chunks import no_loss_in_any

            raise no_loss_in_any(len(survey.traced))


def run_plainly(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the plain forward in training, on copies: what it raises is the model's own error."""
    with preserve_state_and_parameters(model), training_mode(model), torch.enable_grad():
        given, named = copied((args, kwargs), model)
        model._call_impl(*given, **named)
