"""The distinct graphs of one input shape, and the point of its frontier that each runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph_breaks.choose_points import PathProblem, choose_path
from hybridremat.graph_breaks.paths import GraphPath, Paths
from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.context import PlanContext
from hybridremat.planning.pipeline import graph_frontier
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import Settings
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.records import GraphBreak, PlannedBlock
from hybridremat.sequence.pool import SchedulePoint

logger = logging.getLogger(__name__)


class StepGraphs:
    """Plans paths through graphs; a graph on several paths keeps the point that it got on the first.

    Attributes
    ----------
    frontiers, chosen, plans
        By fingerprint: the frontier of each graph, and of those on a planned path the point and its plan.
    """

    def __init__(self, context: PlanContext, frontiers: Mapping[str, StepFrontier]) -> None:
        self._context = context
        self.frontiers = dict(frontiers)
        self.chosen: dict[str, SchedulePoint] = {}
        self.plans: dict[str, Plan] = {}

    def plan(self, order: GraphPath, paths: Paths, settings: Settings) -> Plan:
        """Choose a point for each graph of a path that has none, and make the plan of the whole step.

        Raises
        ------
        InfeasibleLimitError
            If nothing fits, unless ``on_infeasible="least"``.
        """
        chosen, whole = self._choose(order, paths, settings)
        for key, candidate in chosen.items():
            if key not in self.plans:
                self.plans[key] = plan_of_point(
                    self.frontiers[key],
                    candidate,
                    limit=None,
                    asked=None,
                    cost_model=whole.cost_model,
                )
        self.chosen.update(chosen)
        return replace(
            whole,
            origin=self._context.origin,
            request=settings.request(),
            parts=tuple(self.plans[key] for key in chosen),
            breaks=self._breaks(order, paths),
            blocks=self._blocks(order),
        )

    def _choose(
        self, order: GraphPath, paths: Paths, settings: Settings
    ) -> tuple[dict[str, SchedulePoint], Plan]:
        """Points for the graphs of a path; those with reused options are solved again if nothing fits."""
        new = [key for key in dict.fromkeys(order) if key not in self.chosen]
        if reused := [self.frontiers[key] for key in new if self.frontiers[key].reused_options]:
            try:
                return choose_path(self._problem(order, paths), replace(settings, on_infeasible="error"))
            except InfeasibleLimitError:
                logger.info("the options of other shapes do not fit this one; its blocks are solved anew")
                for old in reused:
                    self.frontiers[old.graph.fingerprint] = graph_frontier(
                        old.graph, old.timings, self._context
                    )
        return choose_path(self._problem(order, paths), settings)

    def _problem(self, order: GraphPath, paths: Paths) -> PathProblem:
        eager_code, joined = paths.eager_code(order)
        if joined is None:
            joined = max(_largest_gradient(self.frontiers[key]) for key in order)
        keys = tuple(dict.fromkeys(order))
        return PathProblem(
            keys,
            tuple(keys.index(key) for key in order),
            tuple(self.frontiers[key] for key in keys),
            tuple(self._offered(key) for key in keys),
            eager_code,
            joined,
        )

    def _offered(self, key: str) -> tuple[SchedulePoint, ...]:
        return (self.chosen[key],) if key in self.chosen else self.frontiers[key].candidates

    def _breaks(self, order: GraphPath, paths: Paths) -> tuple[GraphBreak, ...]:
        return tuple(
            GraphBreak(*ending, crossing_bytes=_output_bytes(self.frontiers[key]))
            for key, ending in zip(order, paths.breaks(order), strict=False)
            if ending is not None
        )

    def _blocks(self, order: GraphPath) -> tuple[PlannedBlock, ...]:
        """The blocks of all graphs, numbered in the order of the forward."""
        blocks = [block for key in order for block in self.plans[key].blocks]
        return tuple(replace(block, index=index) for index, block in enumerate(blocks))


def _output_bytes(frontier: StepFrontier) -> int:
    graph = frontier.graph
    return sum(graph.values[value].bytes for value in graph.held_outputs | graph.released_outputs)


def _largest_gradient(frontier: StepFrontier) -> int:
    graph = frontier.graph
    return max((graph.values[value].bytes for value in graph.gradients), default=0)
