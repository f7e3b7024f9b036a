"""Make the planned steps of a wrapped model, and the keys that they are kept by."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import compile_step, model_device, nothing_captured, run_once, training_mode
from hybridremat.compiler.capture_errors import without_gradients
from hybridremat.compiler.first_calls import set_up
from hybridremat.compiler.model_state import preserve_state_and_parameters
from hybridremat.compiler.sample_inputs import copied
from hybridremat.errors import HybridRematError
from hybridremat.graph.private_torch import tree_leaves
from hybridremat.graph_breaks.planner import GraphBreakPlanner
from hybridremat.graph_breaks.survey import Survey, SurveyBackend
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.context import PlanContext
from hybridremat.planning.one_graph import choose_schedule, require_policy
from hybridremat.planning.pipeline import PlannedPartition, backend_for, captured_call
from hybridremat.planning.progress import planning_progress
from hybridremat.runtime.library_workspaces import keep_workspaces
from hybridremat.runtime.origin import origin_of


@dataclass(frozen=True)
class Step:
    """The compiled step of one input shape; Dynamo's guards decide whether it fits a call.

    ``fingerprint`` is that of its plan; ``breaks`` plans a step of several graphs.
    """

    backend: Backend
    compiled: Callable[..., Any]
    fingerprint: str | None = None
    breaks: GraphBreakPlanner | None = None


class StepMaker:
    """Plans steps for sample inputs. ``show``: whether to show how far planning is."""

    def __init__(self, model: nn.Module, context: PlanContext, *, show: bool) -> None:
        self.model, self.context, self.show = model, context, show

    @prompt_interrupts()
    def planned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """Capture and plan the step for these inputs, without running it."""
        started = time.perf_counter()
        with self._context_for(args, kwargs) as context:
            survey = self._survey(args, kwargs, context)
            if survey is None:
                step = self._of_one_graph(args, kwargs, context)
            else:
                step = self._of_several(survey)
                if context.build:
                    self._compile_ahead(step, args, kwargs)
        keep_workspaces(model_device(self.model))
        store = self.context.store
        store.note_total(time.perf_counter() - started, step.backend.compile_seconds)
        return replace(step, fingerprint=store.current.fingerprint if store.current is not None else None)

    @prompt_interrupts()
    def path(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Survey | None:
        """A survey of the path that these inputs take; None if the step has no graph breaks."""
        with self._context_for(args, kwargs) as context:
            return self._survey(args, kwargs, context)

    @contextmanager
    def _context_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[PlanContext]:
        origin = origin_of(self.model, args, kwargs, self.context.settings.spec)
        first = f"capturing the step of {type(self.model).__name__}, {shape_text(args, kwargs)}"
        with planning_progress(show=self.show, first=first) as progress:
            yield self.context.at(origin, progress)

    def _of_one_graph(self, args: Sequence[Any], kwargs: Mapping[str, Any], context: PlanContext) -> Step:
        backend = backend_for(
            context.settings, partial(choose_schedule, context=context), build=context.build
        )
        capability = context.settings.capability()
        return Step(backend, captured_call(self.model, args, kwargs, backend, capability))

    def _survey(self, args: Sequence[Any], kwargs: Mapping[str, Any], context: PlanContext) -> Survey | None:
        """A survey of the step; None if it is one graph, or if breaks are errors."""
        if context.settings.graph_breaks == "error":
            return None
        survey = Survey(context)
        backend = SurveyBackend(survey)
        compiled, ready = compile_step(self.model, backend), set_up(self.model)

        @contextmanager
        def trial() -> Iterator[Callable[[], Any]]:
            with preserve_state_and_parameters(self.model):
                given, named = copied((args, kwargs), self.model)
                yield lambda: run_once(self.model, compiled, backend, given, named)

        try:
            survey.run(trial, model_device(self.model))
        except HybridRematError:
            raise
        except Exception as error:
            run_plainly(self.model, args, kwargs)
            raise without_gradients(self.model, error) from error
        if not survey.order:
            raise nothing_captured(self.model)
        if not survey.has_breaks:
            return None
        if set_up(self.model) > ready:  # the first run broke at what no later one does
            return self._survey(args, kwargs, context)
        require_policy(list(survey.traced.values()), context)
        if survey.refused is not None:
            raise survey.refused
        return survey

    def _compile_ahead(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the forward on copies, so that the first step holds nothing that capturing allocates."""
        assert step.breaks is not None
        step.breaks.begin()
        with preserve_state_and_parameters(self.model):
            given, named = copied((args, kwargs), self.model)
            run_once(self.model, step.compiled, step.backend, given, named)
        step.breaks.ended()

    def _of_several(self, survey: Survey) -> Step:
        """The step of a survey's graphs, planned together; each is compiled when it first runs."""
        planner = GraphBreakPlanner(survey)
        backend = Backend(PlannedPartition(planner.choose), several_graphs=True)
        backend.captured = True
        return Step(backend, compile_step(self.model, backend), breaks=planner)


def run_plainly(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the plain forward in training, on copies: what it raises is the model's own error."""
    with preserve_state_and_parameters(model), training_mode(model), torch.enable_grad():
        given, named = copied((args, kwargs), model)
        model._call_impl(*given, **named)


def input_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Shapes, dtypes and devices of the tensors in a call, and its plain values.

    Calls with different keys need different graphs; calls with equal keys may (Dynamo's guards decide).
    """

    def entry(leaf: object) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.dtype, leaf.device
        if isinstance(leaf, (bool, int, float, str, type(None))):
            return type(leaf), leaf
        return type(leaf).__qualname__

    named = sorted(kwargs.items())
    return (
        tuple(entry(leaf) for leaf in tree_leaves(list(args))),
        tuple((name, tuple(entry(leaf) for leaf in tree_leaves(item))) for name, item in named),
    )


def shape_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The shapes of the tensors in a call, each once, the first three."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    shapes = list(dict.fromkeys("×".join(map(str, each.shape)) or "scalar" for each in tensors))
    return ", ".join([*shapes[:3], *(["…"] if len(shapes) > 3 else [])])


def conditions(model: nn.Module) -> Hashable:
    """Autocast, the modules in eval mode, and dtype and ``requires_grad`` of each parameter."""
    device = model_device(model)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (
        autocast,
        tuple(module.training or not model.training for module in model.modules()),
        tuple((parameter.dtype, parameter.requires_grad) for parameter in model.parameters()),
    )
