"""Makes the planned steps of a wrapped model: captured in one graph, or surveyed and planned in parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import capture, compile_step, model_device, nothing_captured, run_once
from hybridremat.compiler.model_state import untouched_by_trial
from hybridremat.compiler.sample_inputs import copied
from hybridremat.graph.private_torch import tree_leaves
from hybridremat.graph_breaks.planner import PartedPlanner
from hybridremat.graph_breaks.survey import Survey, SurveyBackend
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.session import Session
from hybridremat.plans.origin import Origin
from hybridremat.runtime.origin import origin_of


@dataclass(frozen=True)
class Step:
    """The compiled step of one input shape; Dynamo's guards still decide whether it fits a call.

    ``origin`` records what it is for, ``plan_key`` names the plan made for it, and ``parted`` plans a step of
    several graphs.
    """

    backend: Backend
    compiled: Callable[..., Any]
    origin: Origin = field(default_factory=Origin)
    plan_key: str | None = None
    parted: PartedPlanner | None = None


class StepMaker:
    """Plans steps for sample inputs. ``show``: whether a person sees the progress."""

    def __init__(self, model: nn.Module, session: Session, *, show: bool) -> None:
        self.model, self.session, self.show = model, session, show

    def planned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """Capture and plan the step for these inputs; nothing of it is run."""
        started = time.perf_counter()
        with planning_progress(show=self.show) as progress:
            self.session.progress = progress
            self.session.origin = origin_of(self.model, args, kwargs, self.session.settings.spec)
            survey = self._survey(args, kwargs)
            step = self._in_one_graph(args, kwargs) if survey is None else self._in_parts(survey)
        self.session.note_total(time.perf_counter() - started)
        return replace(step, origin=self.session.origin, plan_key=self.session.current())

    def path(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Survey | None:
        """A survey of the path that these inputs take in a step that is planned already."""
        with planning_progress(show=self.show) as progress:
            self.session.progress = progress
            return self._survey(args, kwargs)

    def _in_one_graph(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        settings = self.session.settings
        backend = Backend(
            self.session,
            hold_outputs=settings.hold_outputs,
            all_outputs=settings.grad_outputs == "all",
        )
        compiled = compile_step(self.model, backend)
        capture(self.model, compiled, backend, args, kwargs)
        return Step(backend, compiled)

    def _survey(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Survey | None:
        """The graphs of the step; None for a step of one graph, and where breaks are errors."""
        if self.session.settings.graph_breaks == "error" or self.session.only_frontier:
            return None
        survey = Survey(self.session)
        backend = SurveyBackend(survey)
        compiled = compile_step(self.model, backend)

        @contextmanager
        def trial() -> Iterator[Callable[[], Any]]:
            with untouched_by_trial(self.model):
                given, named = copied((args, kwargs), self.model)
                yield lambda: run_once(self.model, compiled, backend, given, named)

        survey.learn(trial, model_device(self.model))
        if not survey.order:
            raise nothing_captured(self.model)
        if not survey.in_parts:
            return None
        self.session.check_policy(list(survey.traced.values()))
        if survey.refused is not None:
            raise survey.refused
        return survey

    def _in_parts(self, survey: Survey) -> Step:
        """The graphs that a survey found, planned together; they are compiled as they first run."""
        planner = PartedPlanner(self.session, survey)
        backend = Backend(planner, hold_outputs=True, all_outputs=True, parted=True)
        backend.captured = True
        return Step(backend, compile_step(self.model, backend), parted=planner)


def input_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Shapes, dtypes and devices of the tensors in a call, and the plain values beside them.

    Two calls with one key may still need two graphs (Dynamo's guards see everything); two calls with
    different keys always do.
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


def conditions(model: nn.Module) -> Hashable:
    """Autocast, the modules in eval mode, and of each parameter its dtype and whether it is trained."""
    device = model_device(model)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (
        autocast,
        tuple(module.training or not model.training for module in model.modules()),
        tuple((parameter.dtype, parameter.requires_grad) for parameter in model.parameters()),
    )
