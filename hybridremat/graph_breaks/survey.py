"""Learn the graphs of a step that breaks: run its forward, graphs without gradients, and trace each graph.

Which graph comes after a break can depend on values, so it has to be run: once to trace the graphs, and once
more to measure the code between them, which nothing else may disturb. Both runs are trials: they get copies
of the inputs, and leave nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from hybridremat.compiler.backend import Backend, break_after
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.errors import CaptureError, PolicyError
from hybridremat.graph.joint import JointGraph, Schedule, plain_schedule
from hybridremat.graph.tracing.fx_nodes import joint_outputs
from hybridremat.graph.tracing.non_leaf import handed
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.graph_breaks.eager_code import Recorder, measure_between
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.sequence.joined_graphs import Part

if TYPE_CHECKING:
    from hybridremat.planning.session import Session


# A run of the forward on copies of the inputs, with everything as it was once the context is left.
Trial = AbstractContextManager[Callable[[], Any]]

_TRIALS = 3  # pairs of runs for a model that does not take the same path twice


class UnlearntPathError(CaptureError):
    """A graph came in the run that measures which has not been traced before."""


@dataclass
class Survey:
    """What a run of the forward showed; a :class:`~hybridremat.compiler.backend.StepPlanner`.

    Attributes
    ----------
    plannings
        Each distinct graph by fingerprint.
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

    session: Session
    plannings: dict[str, StepFrontier] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    breaks: list[tuple[str, str] | None] = field(default_factory=list)
    between: list[Part | None] = field(default_factory=list)
    joined_bytes: int = 0
    refused: PolicyError | None = None
    latest: str | None = None
    recorder: Recorder | None = None
    traced: dict[str, JointGraph] = field(default_factory=dict)

    def choose(self, step: TracedStep) -> tuple[TracedStep, Schedule, int | None]:
        """Keep the frontier of a graph; its plain schedule stands in, and never runs.

        Raises
        ------
        UnlearntPathError
            If the graph is new in the run that measures: nothing else can be measured within.
        """
        step = self.session.named(step)
        name = step.graph.fingerprint
        if name not in self.traced:
            if self.recorder is not None:
                raise UnlearntPathError("another path")
            costed, timings = self.session.with_costs(step)
            self.traced[name] = costed.graph
            if name not in self.plannings:
                self._plan(name, costed, timings)
        step = replace(step, graph=self.traced[name])
        self.latest = name
        return step, plain_schedule(step.graph), None

    def _plan(self, key: str, step: TracedStep, timings: dict[str, float]) -> None:
        try:
            self.plannings[key] = self.session.planning_of(step, timings)
        except PolicyError as error:  # a step of one graph holds fewer outputs, and may obey
            self.refused = self.refused or error

    def emitted(self, step: TracedStep, memory: EmittedMemory) -> None:
        """Nothing to hold against."""

    def current(self) -> str | None:
        """The graph traced last."""
        return self.latest

    def running(self, key: str | None) -> None:
        """Never called: the graphs are not run as compiled."""

    def begin(self) -> None:
        """Nothing to begin."""

    def enter(self, key: str, ending: tuple[str, str] | None) -> None:
        """Note that a graph runs."""
        self.order.append(key)
        self.breaks.append(ending)

    def learn(self, trial: Callable[[], Trial], device: str) -> None:
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
            if not self.in_parts:
                return
            try:
                with trial() as run:
                    self._measure(run, device)
                return
            except UnlearntPathError:
                continue
        raise CaptureError(
            f"the forward took another path in each of {2 * _TRIALS} runs on the same inputs, with graphs "
            "that had not come before, so the step cannot be learnt. Keep what changes with every call (a "
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
    def in_parts(self) -> bool:
        """Whether the step is anything but one graph."""
        return len(self.order) > 1 or any(ending is not None for ending in self.breaks)


class SurveyBackend(Backend):
    """Traces each graph, and runs it as Dynamo left it, without gradients."""

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey, hold_outputs=True, all_outputs=True, parted=True)
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
    return output if not traced or output.requires_grad else handed(output)
