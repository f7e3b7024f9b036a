"""Learn the graphs of a step that breaks: run its forward once, without gradients, and trace each graph.

Which graph comes after a break can depend on values, so it has to be run. Nothing is kept for a backward, and
gradients, buffers and random state come back as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from hybridremat.backend import Backend, break_after
from hybridremat.emitted_memory import EmittedMemory
from hybridremat.graph.joint import Schedule, plain_schedule
from hybridremat.graph.nodes import joint_outputs
from hybridremat.graph.trace import TracedStep
from hybridremat.planner import Planning
from hybridremat.plans import fingerprint

if TYPE_CHECKING:
    from hybridremat.session import Session


logger = logging.getLogger(__name__)


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
    """

    session: Session
    plannings: dict[str, Planning] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    breaks: list[tuple[str, str] | None] = field(default_factory=list)
    uses: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    latest: str | None = None

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

    def warn_of_the_rest(self, model: nn.Module) -> None:
        """Name the parameters that no graph uses: code between the graphs may, and is not planned."""
        rest = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in self.uses]
        if rest:
            shown = ", ".join(rest[:3]) + (f" and {len(rest) - 3} more" if len(rest) > 3 else "")
            logger.warning(
                "%s: no captured graph uses %s. If code between graph breaks does, its memory is not in the "
                "plan: keep room for it with reserve=.",
                type(model).__name__,
                shown,
            )

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
        super().__call__(module, example_inputs)
        key, ending = self.survey.latest, break_after(module)
        assert key is not None
        traced = [node.meta.get("example_value") for node in joint_outputs(module)]

        def run(*args: Any) -> tuple[Any, ...]:
            self.survey.enter(key, ending, args)
            with torch.no_grad():
                outputs = module(*args)
            return tuple(map(_as_traced, outputs, traced))

        return run


def _as_traced(output: Any, traced: object) -> Any:
    """The output as the next graph would see it in training: requiring a gradient or not."""
    if not (isinstance(traced, torch.Tensor) and traced.requires_grad) or output.requires_grad:
        return output
    return output.detach().requires_grad_()
