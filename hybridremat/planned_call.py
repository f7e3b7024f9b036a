"""What stands in for a wrapped model's call: planned steps, one for each input shape."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybridremat.backend import Backend
from hybridremat.capture import (
    capture,
    compile_step,
    model_device,
    no_backward,
    nothing_captured,
    run_once,
    translated_errors,
    untouched,
)
from hybridremat.errors import CaptureError, InfeasibleLimitError
from hybridremat.graph.private_torch import tree_leaves
from hybridremat.outstanding import Outstanding
from hybridremat.parted import PartedPlanner, UnknownFirstGraphError
from hybridremat.plans import Plan
from hybridremat.progress import planning_progress
from hybridremat.session import Session
from hybridremat.step_key import conditions, input_key
from hybridremat.survey import Survey, SurveyBackend
from hybridremat.watch import watch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Step:
    """The compiled step of one input shape; Dynamo's guards still decide whether it fits a call.

    ``plan_key`` names the plan that was made for it, ``parted`` plans a step of several graphs.
    """

    backend: Backend
    compiled: Callable[..., Any]
    plan_key: str | None = None
    parted: PartedPlanner | None = None


class PlannedCall:
    """Stands in for a module's call: planned in training, plain otherwise.

    Steps are kept by input shape, the least recently used is given up for a new one beyond
    ``Settings.max_plans``.
    """

    def __init__(self, model: nn.Module, session: Session, *, show: bool = False) -> None:
        self.model, self.session, self.show = model, session, show
        self.outstanding = Outstanding(session)
        self._steps: OrderedDict[Hashable, _Step] = OrderedDict()
        self._caching = _caching_configs(model)
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the planned step in training, the plain model in eval mode or without gradients."""
        if not self.model.training or not torch.is_grad_enabled():
            return self.model._call_impl(*args, **kwargs)
        with self._without_caches():
            try:
                return self._planned_forward(args, kwargs)
            except CaptureError:
                self._raise_as_plain(args, kwargs)
                raise

    def _planned_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        step = self._step(args, kwargs)
        step.backend.planner.begin()
        self.outstanding.before_forward()
        output = self._run(step, args, kwargs)
        self.outstanding.after_forward(output)
        return output

    def _run(self, step: _Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a step; where breaks are planned, one whose graphs have changed is first surveyed again."""
        if step.parted is not None:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            step.parted.unchanged = watch([*self.model.parameters(), *self.model.buffers(), *inputs])
        try:
            return self._compiled(step, args, kwargs)
        except UnknownFirstGraphError:
            pass
        except CaptureError:
            if step.parted is not None or self.session.settings.graph_breaks == "error":
                raise
        return self._compiled(self._surveyed_again(step, args, kwargs), args, kwargs)

    def _compiled(self, step: _Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with translated_errors(self.model, step.backend):
            output = step.compiled(*args, **kwargs)
        if step.parted is not None:
            step.parted.ended()
        return output

    def _surveyed_again(self, step: _Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Step:
        """A step that knows the graphs of these inputs: one path more, or else all of it planned anew."""
        if step.parted is not None:
            with suppress(InfeasibleLimitError):
                step.parted.learn(self._path(args, kwargs), on_infeasible="error")
                return step
        anew = self._steps[self._key(args, kwargs)] = self._planned(args, kwargs)
        return anew

    def _path(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Survey | None:
        """A survey of the path that these inputs take in a step that is planned already."""
        with planning_progress(show=self.show) as progress:
            self.session.progress = progress
            return self._survey(args, kwargs)

    def _raise_as_plain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise what the plain model raises on these inputs, if it does: the caller may count on it."""
        with untouched(self.model), torch.no_grad():
            self.model._call_impl(*args, **kwargs)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """Capture and plan for sample inputs; no step is run.

        Raises
        ------
        CaptureError
            If no output depends on a trainable parameter.
        """
        with self._without_caches():
            known = self._key(args, kwargs) in self._steps
            step = self._step(args, kwargs)
            if known and step.parted is not None and (survey := self._path(args, kwargs)) is not None:
                step.parted.learn(survey, self.session.settings.on_infeasible)
        if not step.backend.captured:
            raise no_backward(self.model)
        if step.parted is None:
            self.session.running(step.plan_key)
        return self.session.plan

    def _step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Step:
        key = self._key(args, kwargs)
        if key in self._steps:
            self._steps.move_to_end(key)
            return self._steps[key]
        step = self._planned(args, kwargs)
        self._make_room()  # not before: a shape that cannot be planned costs no other its plan
        self._steps[key] = step
        return step

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """Names a step. Where breaks are planned, the model's state decides too: it may touch no graph."""
        parted = self.session.settings.graph_breaks == "plan"
        return input_key(args, kwargs), conditions(self.model) if parted else None

    def _planned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Step:
        started = time.perf_counter()
        with planning_progress(show=self.show) as progress:
            self.session.progress = progress
            survey = self._survey(args, kwargs)
            step = self._in_one_graph(args, kwargs) if survey is None else self._in_parts(survey)
        self.session.note_total(time.perf_counter() - started)
        return replace(step, plan_key=self.session.current())

    def _in_one_graph(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Step:
        settings = self.session.settings
        backend = Backend(
            self.session,
            hold_outputs=settings.hold_outputs,
            all_outputs=settings.grad_outputs == "all",
        )
        compiled = compile_step(self.model, backend)
        capture(self.model, compiled, backend, args, kwargs)
        return _Step(backend, compiled)

    def _survey(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Survey | None:
        """The graphs of the step; None for a step of one graph, and where breaks are errors."""
        if self.session.settings.graph_breaks == "error" or self.session.only_frontier:
            return None
        survey = Survey(self.session)
        backend = SurveyBackend(survey)
        compiled = compile_step(self.model, backend)

        def run() -> Any:
            return run_once(self.model, compiled, backend, args, kwargs)

        with untouched(self.model):
            run()
        if not survey.order:
            raise nothing_captured(self.model)
        if not survey.in_parts:
            return None
        with untouched(self.model):
            survey.measure(run, model_device(self.model))
        return survey

    def _in_parts(self, survey: Survey) -> _Step:
        """The graphs that a survey found, planned together; they are compiled as they first run."""
        planner = PartedPlanner(self.session, survey)
        backend = Backend(planner, hold_outputs=True, all_outputs=True, parted=True)
        backend.captured = True
        return _Step(backend, compile_step(self.model, backend), parted=planner)

    def _make_room(self) -> None:
        most = self.session.settings.max_plans
        while len(self._steps) >= most:
            self._steps.popitem(last=False)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s has met more than max_plans=%d input shapes; a plan is given up for each new one, "
                    "and made again if its shape comes back. Pad inputs to few lengths (a collator's "
                    "pad_to_multiple_of=), or raise max_plans.",
                    type(self.model).__name__,
                    most,
                )

    @contextmanager
    def _without_caches(self) -> Iterator[None]:
        """Key/value caches are dead weight in training: ``use_cache`` is off while a planned step runs."""
        switched = [config for config in self._caching if config.use_cache is True]
        for config in switched:
            config.use_cache = False
        try:
            yield
        finally:
            for config in switched:
                config.use_cache = True


def _caching_configs(model: nn.Module) -> list[Any]:
    """The distinct ``config`` objects of the modules that say ``use_cache``, as transformers has them."""
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "use_cache")}
    return list(configs.values())
