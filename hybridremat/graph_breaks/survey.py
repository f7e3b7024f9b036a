"""Find the graphs of a step that breaks: run its forward, graphs without gradients, and trace each graph.

Which graph comes after a break can depend on values, so it has to be run: once to trace the graphs, and once
more to measure the code between them, which nothing else may disturb. Both runs are trials: they get copies
of the inputs, and leave nothing changed.
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
from hybridremat.graph.tracing.fx_nodes import joint_outputs
from hybridremat.graph.tracing.non_leaf import non_leaf
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.graph_breaks.eager_code import Recorder, measure_between
from hybridremat.planning.context import PlanContext
from hybridremat.planning.one_graph import with_policy_fingerprint
from hybridremat.planning.pipeline import Chosen, PlannedPartition, costed, make_frontier
from hybridremat.planning.progress import Timings
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.sequence.joined_graphs import StepPart

# A run of the forward on copies of the inputs, with everything as it was once the context is left.
Trial = AbstractContextManager[Callable[[], Any]]

_TRIALS = 3  # pairs of runs for a model that does not take the same path twice


class NewPathError(CaptureError):
    """A graph came in the run that measures which has not been traced before."""


@dataclass
class Survey:
    """What a run of the forward showed.

    Attributes
    ----------
    frontiers
        Those of the distinct graphs, by fingerprint.
    order
        Fingerprints in the order in which the graphs ran.
    breaks
        Place and reason of the break that ends each run, None where there is none.
    between
        What the code before each run takes, and after the last one, if that has been measured.
    joined_bytes
        The largest gradient that several graphs make and autograd adds up.
    refused
        Why a graph cannot be planned as a part.
    """

    context: PlanContext
    frontiers: dict[str, StepFrontier] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    breaks: list[tuple[str, str] | None] = field(default_factory=list)
    between: list[StepPart | None] = field(default_factory=list)
    joined_bytes: int = 0
    refused: PolicyError | None = None
    latest: str | None = None
    recorder: Recorder | None = None
    traced: dict[str, JointGraph] = field(default_factory=dict)

    def choose(self, traced: TracedStep) -> Chosen:
        """Keep the frontier of a graph; its plain schedule stands in, and never runs.

        Raises
        ------
        NewPathError
            If the graph is new in the run that measures: nothing else can be measured within.
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
            self.frontiers[key] = frontier_of(self.traced[key], timings, self.context)
        except PolicyError as error:  # a step of one graph holds fewer outputs, and may obey
            self.refused = self.refused or error

    def enter(self, key: str, ending: tuple[str, str] | None) -> None:
        """Note that a graph runs."""
        self.order.append(key)
        self.breaks.append(ending)

    def run(self, trial: Callable[[], Trial], device: str) -> None:
        """Trace the graphs, and, unless the step is one graph, measure the code between them.

        Raises
        ------
        CaptureError
            If the model takes a path that is new each time it runs.
        """
        for _ in range(_TRIALS):
            self._forget_path()
            with trial() as run:
                run()
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
        """Run the step once more; the path of this run is the one that is kept."""
        self._forget_path()
        self.recorder = Recorder(device)
        try:
            self.between = measure_between(self.recorder, run)
            self.joined_bytes = self.recorder.joined_bytes
        finally:
            self.recorder = None

    @property
    def has_breaks(self) -> bool:
        """Whether the step is anything but one graph."""
        return len(self.order) > 1 or any(ending is not None for ending in self.breaks)


def frontier_of(graph: JointGraph, timings: Timings, context: PlanContext) -> StepFrontier:
    """The frontier of one of several graphs; in training, options of other shapes will do."""
    return make_frontier(graph, timings, context, reuse=len(context.store) > 0)


class SurveyBackend(Backend):
    """Traces each graph, and runs it as Dynamo left it, without gradients."""

    def __init__(self, survey: Survey) -> None:
        super().__init__(
            PlannedPartition(survey.choose), hold_outputs=True, all_outputs=True, several_graphs=True
        )
        self.survey = survey

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_: object
    ) -> Callable[..., Any]:
        """Trace one graph; see :class:`~hybridremat.compiler.backend.Backend`."""
        traced = [_requires_grad(node) for node in joint_outputs(module)]
        super().__call__(module, example_inputs)
        key, ending = self.survey.latest, break_after(module)
        assert key is not None

        def run(*args: Any) -> tuple[Any, ...]:
            recorder = self.survey.recorder
            self.survey.enter(key, ending)
            if recorder is not None:
                recorder.enter(args)
            with torch.no_grad():
                outputs = tuple(map(_as_traced, module(*args), traced))
            if recorder is not None:
                recorder.leave(outputs)
            return outputs

        return run


def _requires_grad(node: object) -> bool:
    """Whether an output of Dynamo's graph carries a gradient."""
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad


def _as_traced(output: Any, traced: bool) -> Any:
    """The output as the next graph would see it in training: requiring a gradient or not."""
    return output if not traced or output.requires_grad else non_leaf(output)
