"""Find the graphs of a step with graph breaks, by running its forward without gradients.

Which graph follows a break can depend on values, so the forward runs: once to trace the graphs, and once more
to measure the eager code between them, without tracing. Both runs are trials on copies of the inputs, and
leave nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from hybridremat.compiler.backend import Backend, break_after
from hybridremat.errors import CaptureError, PolicyError
from hybridremat.graph.joint import JointGraph, plain_schedule
from hybridremat.graph.private_torch import num_graph_breaks
from hybridremat.graph.tracing.fx_nodes import joint_outputs
from hybridremat.graph.tracing.non_leaf import non_leaf
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.graph_breaks.eager_code import EagerCodeRecorder, measure_eager_code
from hybridremat.planning.context import PlanContext
from hybridremat.planning.one_graph import with_policy_fingerprint
from hybridremat.planning.pipeline import Chosen, PlannedPartition, costed, graph_frontier
from hybridremat.planning.progress import Timings
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.sequence.joined_graphs import StepPart

# Yields the forward on copies of the inputs; at exit the model's state is restored.
Trial = AbstractContextManager[Callable[[], Any]]

_TRIALS = 3  # pairs of runs, for models that change their path


class NewPathError(CaptureError):
    """The run that measures has met a graph that has not been traced."""


@dataclass
class Survey:
    """What trial runs of the forward have found.

    Attributes
    ----------
    frontiers
        Those of the distinct graphs, by fingerprint.
    order
        Fingerprints in the order in which the graphs ran.
    breaks
        Place and reason of the break after each of these, None without a break.
    eager_code
        Memory of the eager code before each graph of ``order`` and after the last one, if measured.
    joined_bytes
        The largest gradient that several graphs make and autograd adds up.
    broken
        Whether Dynamo met a break as it traced.
    refused
        Why the policy cannot be kept in one of the graphs.
    latest
        Fingerprint of the graph that was traced last.
    recorder
        Of the run that measures, while it runs.
    traced
        The distinct graphs with costs, by fingerprint.
    """

    context: PlanContext
    frontiers: dict[str, StepFrontier] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    breaks: list[tuple[str, str] | None] = field(default_factory=list)
    eager_code: list[StepPart | None] = field(default_factory=list)
    joined_bytes: int = 0
    broken: bool = False
    refused: PolicyError | None = None
    latest: str | None = None
    recorder: EagerCodeRecorder | None = None
    traced: dict[str, JointGraph] = field(default_factory=dict)

    def choose(self, traced: TracedStep) -> Chosen:
        """Compute the frontier of a graph; the plain schedule that is returned never runs.

        Raises
        ------
        NewPathError
            If the graph is new in the run that measures: its kernels cannot be measured then.
        """
        step = with_policy_fingerprint(traced, self.context)
        key = step.graph.fingerprint
        if key not in self.traced:
            if self.recorder is not None:
                raise NewPathError("another path")
            step, timings = costed(step, self.context)
            self.traced[key] = step.graph
            if key not in self.frontiers:
                self._plan(key, timings)
        self.latest = key
        step = replace(step, graph=self.traced[key])
        return Chosen(step, plain_schedule(step.graph))

    def _plan(self, key: str, timings: Timings) -> None:
        try:
            self.frontiers[key] = path_frontier(self.traced[key], timings, self.context)
        except PolicyError as error:  # matters only if there are breaks: one graph holds fewer outputs
            self.refused = self.refused or error

    def enter(self, key: str, ending: tuple[str, str] | None) -> None:
        """Note that a graph runs; ``ending`` is the break after it."""
        self.order.append(key)
        self.breaks.append(ending)

    def run(self, trial: Callable[[], Trial], device: str) -> None:
        """Trace the graphs and, if there are breaks, measure the eager code between them.

        Raises
        ------
        CaptureError
            If the model takes a path that is new each time it runs.
        """
        for _ in range(_TRIALS):
            self._forget_path()
            before = num_graph_breaks()
            with trial() as run:
                run()
            self.broken = num_graph_breaks() > before
            if not self.has_breaks:
                return
            try:
                with trial() as run:
                    self._measure(run, device)
                return
            except NewPathError:
                continue
        raise CaptureError(
            f"the forward took another path in each of {2 * _TRIALS} runs on the same inputs, with graphs "
            "that had not come before, so it cannot be planned. Keep what changes with every call (a "
            "counter, random numbers of Python's own) out of the branches and loops of the forward."
        )

    def _forget_path(self) -> None:
        self.order.clear()
        self.breaks.clear()

    def _measure(self, run: Callable[[], Any], device: str) -> None:
        """Run once more; the survey keeps the path of this run."""
        self._forget_path()
        self.recorder = EagerCodeRecorder(device)
        try:
            self.eager_code = measure_eager_code(self.recorder, run)
            self.joined_bytes = self.recorder.joined_bytes
        finally:
            self.recorder = None

    @property
    def has_breaks(self) -> bool:
        """Whether the step is anything but one graph; a break before the first one is after none."""
        return self.broken or len(self.order) > 1 or any(ending is not None for ending in self.breaks)


def path_frontier(graph: JointGraph, timings: Timings, context: PlanContext) -> StepFrontier:
    """The frontier of one of several graphs; in training, options of other shapes are reused."""
    return graph_frontier(graph, timings, context, reuse=len(context.store) > 0, alone=False)


class SurveyBackend(Backend):
    """Traces each graph, and runs Dynamo's graph without gradients."""

    def __init__(self, survey: Survey) -> None:
        super().__init__(PlannedPartition(survey.choose), several_graphs=True)
        self.survey = survey

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_: object
    ) -> Callable[..., Any]:
        """Trace one graph; see :class:`~hybridremat.compiler.backend.Backend`."""
        differentiable = [_requires_grad(node) for node in joint_outputs(module)]
        super().__call__(module, example_inputs)
        key, ending = self.survey.latest, break_after(module)
        assert key is not None

        def run(*args: Any) -> tuple[Any, ...]:
            recorder = self.survey.recorder
            self.survey.enter(key, ending)
            if recorder is not None:
                recorder.enter(args)
            with torch.no_grad():
                outputs = tuple(map(_as_in_training, module(*args), differentiable))
            if recorder is not None:
                recorder.leave(outputs)
            return outputs

        return run


def _requires_grad(node: object) -> bool:
    """Whether an output of Dynamo's graph carries a gradient."""
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad


def _as_in_training(output: Any, differentiable: bool) -> Any:
    """The output, requiring a gradient if it would in training.

    A view that is made without gradients says that it requires one, and has no history.
    """
    if not differentiable or output.grad_fn is not None:
        return output
    return output if output.requires_grad and not output._is_view() else non_leaf(output)
