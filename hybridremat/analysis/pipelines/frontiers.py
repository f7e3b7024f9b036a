"""Frontiers of pieces of a model, searched as far as a plan can win that back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.accept import under_checked_policy
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.origin import origin_of
from hybridremat.planning.planner import step_frontier
from hybridremat.planning.progress import no_progress
from hybridremat.planning.settings import Settings
from hybridremat.planning.step_costs import costed
from hybridremat.runtime.prepare import capture_only, with_memory


def piece_frontier(
    module: nn.Module, args: Sequence[Any], settings: Settings, *, searched: bool = True
) -> GraphFrontier:
    """The ways to run a module's step; without ``searched`` the plain one alone.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.frontier`.
    """
    module, args, kwargs = with_memory(module, args, {}, settings)
    context = PlanContext.of(settings).at(origin_of(module, args, kwargs, settings.spec), no_progress)
    found: list[GraphFrontier] = []

    def choose(traced: TracedStep) -> Chosen:
        step, timings = costed(under_checked_policy(traced, context), context)
        found.append(step_frontier(step, timings, context, bounded=True, searched=searched))
        return Chosen(step, plain_schedule(step.graph))

    capture_only(module, args, kwargs, settings, choose)
    return found[-1]


def phase_times(frontier: GraphFrontier) -> tuple[int, int]:
    """Nanoseconds of forward and backward of the plain step."""
    schedule, times = frontier.plain.schedule, frontier.graph.op_times
    forward = sum(times[op] for op in schedule.steps[: schedule.num_forward])
    return forward, frontier.plain.time - forward
