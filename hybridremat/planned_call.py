"""What stands in for a wrapped model's call: planned steps, one for each input shape."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
)
from hybridremat.errors import CaptureError
from hybridremat.graph.private_torch import tree_leaves
from hybridremat.outstanding import Outstanding
from hybridremat.parted import PartedPlanner
from hybridremat.plans import Plan
from hybridremat.progress import planning_progress
from hybridremat.sample_inputs import copied
from hybridremat.session import Session
from hybridremat.survey import Survey, SurveyBackend
from hybridremat.untouched import untouched_by_trial

logger = logging.getLogger(__name__)

MANY_CAPTURES = 8  # of one input shape: modes, frozen layers and autocast switched to and fro are fewer


@dataclass(frozen=True)
class _Step:
    """The compiled step of one input shape; Dynamo's guards still decide whether it fits a call.

    ``plan_key`` names the plan that was made for it.
    """

    backend: Backend
    compiled: Callable[..., Any]
    plan_key: str | None = None


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
        self._warned = self._told = False

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
        with translated_errors(self.model, step.backend):
            output = step.compiled(*args, **kwargs)
        self.outstanding.after_forward(output)
        self._notice_captures(step.backend)
        return output

    def _notice_captures(self, backend: Backend) -> None:
        """Tell, once, that steps are captured again and again for inputs of one shape."""
        if backend.graphs >= MANY_CAPTURES and not backend.parted and not self._told:
            self._told = True
            logger.warning(
                "%s has been captured %d times for inputs of one shape: something that its forward reads "
                "keeps changing (a Python number on a module, self.calls += 1?), and each change is captured "
                'and planned anew, which takes seconds. TORCH_LOGS="recompiles" names it.',
                type(self.model).__name__,
                backend.graphs,
            )

    def _raise_as_plain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise what the plain model raises on these inputs, if it does: the caller may count on it."""
        with untouched_by_trial(self.model), torch.no_grad():
            given, named = copied((args, kwargs), self.model)
            self.model._call_impl(*given, **named)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """Capture and plan for sample inputs; no step is run.

        Raises
        ------
        CaptureError
            If no output depends on a trainable parameter.
        """
        with self._without_caches():
            step = self._step(args, kwargs)
        if not step.backend.captured:
            raise no_backward(self.model)
        self.session.running(step.plan_key)
        return self.session.plan

    def _step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Step:
        key = input_key(args, kwargs)
        if key in self._steps:
            self._steps.move_to_end(key)
            return self._steps[key]
        step = self._planned(args, kwargs)
        self._make_room()  # not before: a shape that cannot be planned costs no other its plan
        self._steps[key] = step
        return step

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
        return survey

    def _in_parts(self, survey: Survey) -> _Step:
        """The graphs that a survey found, planned together; they are compiled as they first run."""
        backend = Backend(
            PartedPlanner(self.session, survey), hold_outputs=True, all_outputs=True, parted=True
        )
        backend.captured = True
        return _Step(backend, compile_step(self.model, backend))

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
