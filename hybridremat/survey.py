"""Learn the graphs of a step that breaks: run its forward once, without gradients, and trace each graph.

Which graph comes after a break can depend on values, so it has to be run. Nothing is kept for a backward, and
gradients, buffers and random state come back as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from hybridremat.backend import Backend, break_after
from hybridremat.between import Recorder, measure_between
from hybridremat.emitted_memory import EmittedMemory
from hybridremat.graph.joint import Schedule, plain_schedule
from hybridremat.graph.nodes import joint_outputs
from hybridremat.graph.trace import TracedStep
from hybridremat.graph.windows import Windows
from hybridremat.planner import Planning
from hybridremat.plans import fingerprint
from hybridremat.sequence.parts import Part

if TYPE_CHECKING:
    from hybridremat.session import Session


@dataclass
class Survey:
    """What a run of the forward showed; a :class:`~hybridremat.backend.StepPlanner`.

    Attributes
    ----------
    plannings
        Each distinct graph by fingerprint.
    order
        Fingerprints in the order in which the graphs ran.
    breaks
        Place and reason of the break that ends each run, None where there is none.
    uses
        For each leaf that requires a gradient, its bytes and the runs that use it.
    between
        What the code before each run takes, and after the last one, once :meth:`measure` has been called.
    """

    session: Session
    plannings: dict[str, Planning] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    breaks: list[tuple[str, str] | None] = field(default_factory=list)
    uses: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    between: list[Part | None] = field(default_factory=list)
    latest: str | None = None
    recorder: Recorder | None = None

    def choose(self, step: TracedStep) -> tuple[TracedStep, Schedule, int | None]:
        """Keep the frontier of a graph; its plain schedule stands in, and never runs."""
        step, timings = self.session.with_costs(step)
        key = fingerprint(step.graph)
        if key not in self.plannings:
            self.plannings[key] = self.session.planning_of(step, timings)
        self.latest = key
        return step, plain_schedule(step.graph), None

    def emitted(self, step: TracedStep, memory: EmittedMemory) -> None:
        """Nothing to hold against."""

    def current(self) -> str | None:
        """The graph traced last."""
        return self.latest

    def running(self, key: str | None) -> None:
        """Never called: the graphs are not run as compiled."""

    def begin(self) -> None:
        """Nothing to begin."""

    def enter(self, key: str, ending: tuple[str, str] | None, args: Sequence[object]) -> None:
        """Note that a graph runs, and on which trainable leaves."""
        for item in args:
            if isinstance(item, torch.Tensor) and item.requires_grad and item.is_leaf:
                _, runs = self.uses.setdefault(id(item), (item.numel() * item.element_size(), []))
                runs.append(len(self.order))
        self.order.append(key)
        self.breaks.append(ending)

    def measure(self, forward: Callable[[], Any], device: str) -> None:
        """Measure the code between the graphs; ``forward`` runs the surveyed step again."""
        self.recorder = Recorder(Windows(device))
        try:
            self.between = measure_between(self.recorder, forward)
        finally:
            self.recorder = None

    @property
    def in_parts(self) -> bool:
        """Whether the step is anything but one graph."""
        return len(self.order) > 1 or any(ending is not None for ending in self.breaks)

    @property
    def joined_bytes(self) -> int:
        """The largest gradient that several graphs make and autograd adds up."""
        return max((size for size, runs in self.uses.values() if len(runs) > 1), default=0)


class SurveyBackend(Backend):
    """Traces each graph, and runs it as Dynamo left it, without gradients."""

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey, hold_outputs=True, all_outputs=True, parted=True)
        self.survey = survey

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_: object
    ) -> Callable[..., Any]:
        """Trace one graph; see :class:`~hybridremat.backend.Backend`."""
        traced = [_requires_grad(node) for node in joint_outputs(module)]
        super().__call__(module, example_inputs)
        key, ending = self.survey.latest, break_after(module)
        assert key is not None

        def run(*args: Any) -> tuple[Any, ...]:
            recorder = self.survey.recorder
            if recorder is None:
                self.survey.enter(key, ending, args)
            else:
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
    if not traced or output.requires_grad:
        return output
    return output.detach().requires_grad_()
