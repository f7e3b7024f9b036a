"""A step with graph breaks: survey it, plan its graphs together, and compile them."""

from __future__ import annotations

import logging
from collections import Counter
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
from hybridremat.compiler.model_state import Unseen, preserve_state_and_parameters
from hybridremat.compiler.sample_inputs import copied
from hybridremat.compiler.units import compile_units, find_units, units_in
from hybridremat.compiler.unread_runs import UnreadRun
from hybridremat.errors import CaptureError, HybridRematError, InputError, LimitError
from hybridremat.planning.accept import require_policy
from hybridremat.planning.auto_breaks import BesideGraphsError
from hybridremat.planning.breaks.own_units import beside_graphs, own_units
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
    backend.shared |= survey.shared  # also of units that come later
    backend.partitioner, backend.select = backend_for(breaks.choose).partitioner, breaks.select
    if context.build:
        breaks.begin()
        with preserve_state_and_parameters(model, as_gathered(context.settings.sharding)):
            given, named = copied((args, kwargs), model)
            run_once(model, compiled, backend, given, named)
        breaks.ended()
    backend.starting, backend.ran, backend.compiling = breaks.graph_starts, breaks.graph_ran, breaks.compiled
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

    With units, what runs between them is captured too, unless that is captured anew in each run, or breaks as
    well and nobody has said that this is meant (``graph_breaks="plan"``): it may be another graph for other
    data.
    ``known``: of the step, where this is another path of it.
    """
    units, sharding = find_units(model, context.settings.units), context.settings.sharding
    if sharding is not None:
        _require_units(units, sharding.tail)
    later = known is not None or context.store.current is not None
    surveyed = _Step(model, args, kwargs, context, backend_for, units, known, later)
    if not units:
        return surveyed.survey(lambda backend: compile_step(model, backend))
    dtypes = gathered_dtype(sharding), returned_dtype(sharding)
    shared = not context.settings.policy
    compiled = partial(compile_units, model, units, shared=shared, required=not later, dtypes=dtypes)
    if known is None or known.captures_rest:
        alone = known is None and context.settings.graph_breaks != "plan"
        try:
            return surveyed.survey(partial(compiled, rest=True), stable=known is None, at_units_alone=alone)
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
    """A step to be surveyed, with its ``units`` by name, if it has any; ``known``: what has other paths.

    ``later``: whether the model has been planned before. Such a step may run nothing that is captured.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    context: PlanContext
    backend_for: BackendFor
    units: dict[str, nn.Module]
    known: Backend | None
    later: bool

    def survey(
        self,
        compiled_by: Callable[[Backend], Callable[..., Any]],
        *,
        stable: bool = False,
        at_units_alone: bool = False,
    ) -> tuple[Survey, Backend, Callable[..., Any]] | None:
        """A survey of the call that ``compiled_by`` makes for a backend.

        ``stable``: it is refused if graphs are captured in each run. ``at_units_alone``: or break elsewhere.

        Raises
        ------
        HybridRematError
        """
        survey = Survey(self.context, stable=stable, at_units_alone=at_units_alone)
        survey.shared |= self._parameters_of_alike_units()
        backend = self.backend_for(survey.choose)
        backend.visit = survey.visit
        if self.known is not None:
            backend.unread = self.known.unread
        backend.workspaces = {id(each): hook_workspace(each) for each in self.model.parameters()}
        compiled = compiled_by(backend)
        ready, settings, device = set_up(self.model), self.context.settings, model_device(self.model)
        try:
            with attention_of(settings.capability()):
                survey.run(partial(self._trial, backend, compiled, survey.unseen), device, backend)
            if settings.sharding is not None:
                require_graphs(backend.calls, survey.calls, self.units)
                trained = trained_in(survey, self.units, settings.sharding.tail)
                survey.sharded = self._sharded(trained)
                survey.sharding = survey.sharded(settings.sharding)
        except InputError as error:  # as Dynamo says it, of what may fail in a survey alone
            if settings.spec is not None or not self._trains_plainly():
                raise
            raise without_gradients(self.model, error, self.units) from error
        except HybridRematError:
            raise
        except Exception as error:
            raise self._without_gradients(error) from error
        finally:
            backend.visit = None
        if not survey.ran:
            planned = self.units or self.known is not None
            own = () if planned else self._own_units(units_in(self.model))
            if own or not self.later:
                raise nothing_captured(self.model, own, backend.refused)
        if survey.ran and not survey.has_breaks:
            return None
        if set_up(self.model) > ready:  # the first run broke at what no later one does
            return self.survey(compiled_by, stable=stable, at_units_alone=at_units_alone)
        self._require_all_planned(survey)
        self._require_kept(survey)
        return survey, backend, compiled

    @contextmanager
    def _trial(
        self, backend: Backend, compiled: Callable[..., Any], noted: Unseen | None = None
    ) -> Iterator[Callable[[], Any]]:
        """``noted``: where unseen changes of the model's state are noted."""
        settings = self.context.settings
        on_paper = settings.spec is not None
        gathered = as_gathered(settings.sharding, on_paper=on_paper)
        with preserve_state_and_parameters(self.model, gathered, on_paper=on_paper) as unseen:
            given, named = copied((self.args, self.kwargs), self.model)
            with nullcontext() if settings.spec is None else UnreadRun(settings.spec.rounded):
                yield lambda: run_once(self.model, compiled, backend, given, named)
        if noted is not None:
            noted |= unseen

    def _parameters_of_alike_units(self) -> set[int]:
        """Those of units that share a capture with others, which may run in one step on another path."""
        if self.context.settings.policy:
            return set()
        kinds = Counter(type(unit) for unit in self.units.values())
        alike = [unit for unit in self.units.values() if kinds[type(unit)] > 1]
        return {id(each) for unit in alike for each in unit.parameters()}

    def _sharded(self, trained: Trained) -> Callable[[Fsdp], Sharding]:
        """What FSDP2 makes of the model, by how it is called."""
        spec = self.context.settings.spec
        return lambda fsdp: Sharding.of(self.model, self.units, fsdp, trained, spec)

    def _require_all_planned(self, survey: Survey) -> None:
        """Refuse a step in which submodules run between graphs that could be graphs of their own."""
        if self.units or self.known is not None or not self.context.settings.own_units:
            return
        beside = beside_graphs(self.model, survey)
        found = self._own_units(beside) if beside else ()
        if found:
            raise BesideGraphsError("parts run between graphs", units=found)

    def _own_units(self, units: dict[str, nn.Module]) -> tuple[str, ...]:
        """Those of some submodules, or of what is in them, of which something can be captured."""

        def survey() -> tuple[Survey, Backend]:
            made = Survey(self.context)
            backend = self.backend_for(made.choose)
            backend.visit = made.visit
            return made, backend

        try:
            return own_units(self.model, units, survey, self._trial)
        except HybridRematError:
            raise
        except Exception as error:
            raise self._without_gradients(error) from error

    def _trains_plainly(self) -> bool:
        try:
            run_plainly(self.model, self.args, self.kwargs)
        except Exception:  # noqa: BLE001 - whatever the model raises
            return False
        return True

    def _without_gradients(self, error: Exception) -> CaptureError:
        """The error for what only a survey raises; raises what the plain model does."""
        if self.context.settings.spec is None:
            run_plainly(self.model, self.args, self.kwargs)
        return without_gradients(self.model, error, self.units)

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
