"""The frontier of a step that is captured with symbols, at each size that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hybridremat.errors import CaptureError
from hybridremat.graph.garbage import collected_seldom
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.private_joint import planning_state
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.accept import under_checked_policy
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.input_keys import every_dimension, shapes_of
from hybridremat.planning.other_plans import PlannedElsewhere, no_sizes
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import step_frontier
from hybridremat.planning.portfolio import Portfolio
from hybridremat.planning.progress import Progress
from hybridremat.planning.settings import Settings
from hybridremat.planning.size_choice import SizeChoice
from hybridremat.planning.sized_capture import SizedCapture, capture_sizes
from hybridremat.planning.step_costs import costed
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.planning.symbolic_partition import SymbolicPartition
from hybridremat.plans.origin import Origin


@dataclass(frozen=True)
class SizedFrontier:
    """A capture whose frontiers are searched at each size.

    Attributes
    ----------
    capture
        The capture.
    elsewhere
        It at other sizes, by name.
    """

    capture: SizedCapture
    elsewhere: PlannedElsewhere

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return no_sizes, ()

    @property
    def own(self) -> Mapping[str, int]:
        """The sizes by name."""
        return self.elsewhere.own

    def at(self, sizes: Mapping[str, int], progress: Progress) -> tuple[GraphFrontier, Origin, SizedFrontier]:
        """The frontier at other sizes, with what was planned for and the capture there; nothing is captured.

        Raises
        ------
        InputError
            As :meth:`hybridremat.Plan.at`.
        """
        numbers = self.elsewhere.numbers(sizes)
        context = replace(self.elsewhere.context_at(numbers), progress=progress)
        assert self.capture.partition.portfolio is not None
        with planning_state(), collected_seldom():
            frontier = _searched(self.capture.partition.portfolio.steps.at(numbers).traced, context)
        there = replace(self.elsewhere, own={**self.own, **sizes})
        return frontier, context.origin, replace(self, elsewhere=there)

    def knowing(self, plan: Plan, frontier: GraphFrontier, settings: Settings) -> Plan:
        """A plan of a frontier that is planned at other sizes, too, from what the frontier has."""
        assert self.capture.partition.portfolio is not None
        context = PlanContext.of(settings, build=False).at(plan.origin)
        choice = SizeChoice(context)
        if isinstance(frontier, StepFrontier):
            choice.known.append(frontier)
        partition = SymbolicPartition(choice)
        partition.portfolio = Portfolio(self.capture.partition.portfolio.steps, choice)
        capture = replace(self.capture, partition=partition, choice=choice, rows={})
        context.store.add(plan)
        capture.keep_current(self.elsewhere.numbers({}), context)
        made = context.store.current
        assert made is not None
        return made


def capture_frontier(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], context: PlanContext
) -> tuple[GraphFrontier, SizedFrontier]:
    """The frontier of a step that is captured for all sizes of its inputs.

    Raises
    ------
    CaptureError
        If it cannot be captured so.
    HybridRematError
        As :func:`hybridremat.frontier`.
    """
    found: list[GraphFrontier] = []

    def choose(traced: TracedStep) -> Chosen:
        found.append(_searched(traced, context))
        return Chosen(replace(traced, graph=found[-1].graph), plain_schedule(found[-1].graph))

    shapes = shapes_of(args, kwargs)
    dimensions = every_dimension(shapes)
    made = capture_sizes(model, args, kwargs, dimensions, context, choose=choose) if dimensions else None
    sizes = None if made is None else made.sizes_of(shapes)
    if made is None or sizes is None:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured for all sizes of these inputs: PyTorch makes numbers "
            "of them, or an input has gaps between its elements. Leave dynamic= out, and the frontier is of "
            "these sizes."
        )
    return found[-1], SizedFrontier(made, replace(made.elsewhere(shapes, context), looking=True))


def _searched(traced: TracedStep, context: PlanContext) -> GraphFrontier:
    step, timings = costed(under_checked_policy(traced, context), context)
    return step_frontier(step, timings, context)
