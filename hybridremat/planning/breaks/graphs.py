"""The distinct graphs of one input shape, and the point of its frontier that each runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import JointGraph
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.breaks.paths import GraphPath, Paths
from hybridremat.planning.breaks.points import PathProblem, choose_path, largest_gradient
from hybridremat.planning.breaks.survey import path_frontier
from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.context import PlanContext
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import Settings
from hybridremat.planning.step_costs import with_memory
from hybridremat.plans.records import GraphBreak, PlannedBlock
from hybridremat.sequence.pool import SchedulePoint

logger = logging.getLogger(__name__)


class StepGraphs:
    """Plans paths through graphs; a graph on several paths keeps the point that it got on the first.

    Attributes
    ----------
    frontiers, steps, chosen, plans
        By fingerprint: frontier and traced step of each graph, and of those on a planned path the point and
        its plan.
    """

    def __init__(
        self,
        context: PlanContext,
        frontiers: Mapping[str, GraphFrontier],
        steps: Mapping[str, TracedStep],
    ) -> None:
        self._context = context
        self.frontiers, self.steps = dict(frontiers), dict(steps)
        self.chosen: dict[str, SchedulePoint] = {}
        self._offers: dict[str, Sequence[SchedulePoint]] = {}
        self._given: Plan | None = None
        self.plans: dict[str, Plan] = {}

    def follow(self, given: Plan, order: GraphPath) -> None:
        """Let the graphs of a path run as a given plan says.

        Raises
        ------
        PlanMismatchError
            If it is for other graphs.
        """
        from hybridremat.planning.apply import applied, require_same_count

        keys = tuple(dict.fromkeys(order))
        require_same_count(given, len(keys))
        for key, part in zip(keys, given.parts, strict=True):
            if part.details is None:  # there is one way to run it
                continue
            step = self.steps[key]
            assert isinstance(part, Plan)
            measured = partial(with_memory, step, self._context.settings, self._context.agreement)
            self.plans[key] = applied(part, step, self._context.origin, measured)
            self.chosen[key] = self.frontiers[key].as_planned(self.plans[key])
        self._given = given

    def plan(self, order: GraphPath, paths: Paths, settings: Settings) -> Plan:
        """Choose a point for each graph of a path that has none, and make the plan of the whole step.

        Raises
        ------
        InfeasibleLimitError
            If nothing fits, unless ``on_infeasible="least"``.
        """
        at_last = self._context.settings.on_infeasible
        asked = replace(settings, on_infeasible=at_last).request()
        if (given := self._given) is not None:  # it keeps what it was made to keep, whatever was asked for
            limit = given.needed if given.memory_limit is None else given.memory_limit
            settings = replace(settings, memory_limit=limit, max_overhead=None)
        chosen, whole = self._choose(order, paths, settings)
        for key, point in chosen.items():
            if key not in self.plans:
                frontier = self.frontiers[key]
                part = replace(asked, reserve=frontier.outside.reserve, forwards=frontier.outside.forwards)
                self.plans[key] = plan_of_point(
                    frontier,
                    point,
                    limit=None,
                    asked=None,
                    cost_model=whole.cost_model,
                    origin=self._context.origin,
                    request=part,
                )
        self.chosen.update(chosen)
        for key in chosen:  # it runs as it does now: nothing is planned again
            self.steps.pop(key, None)
        if given is not None:  # whose times these are
            self._given, asked = None, given.request
            whole = replace(
                whole,
                memory_limit=given.memory_limit,
                asked_limit=given.asked_limit,
                cost_model=given.cost_model,
                overhead=given.overhead,
                extra_flops=given.extra_flops,
            )
        return replace(
            whole,
            origin=self._context.origin,
            request=asked,
            parts=tuple(self.plans[key] for key in chosen),
            breaks=self._breaks(order, paths),
            blocks=self._blocks(order),
        )

    def _choose(
        self, order: GraphPath, paths: Paths, settings: Settings
    ) -> tuple[dict[str, SchedulePoint], Plan]:
        """Points for the graphs of a path; those with few options are solved again if nothing fits."""
        new = [key for key in dict.fromkeys(order) if key not in self.chosen]
        if few := [key for key in new if self._has_few_options(key)]:
            try:
                return choose_path(self.problem(order, paths), replace(settings, on_infeasible="error"))
            except InfeasibleLimitError:
                logger.info("nothing fits with the options of blocks that were looked at first; solving all")
                for key in few:
                    timings = self.frontiers[key].counted.timings
                    self.frontiers[key] = path_frontier(
                        self.steps[key], timings, self._context, reuse=False, bounded=False
                    )
                    self._offers.pop(key, None)
        return choose_path(self.problem(order, paths), settings)

    def _has_few_options(self, key: str) -> bool:
        counted = self.frontiers[key].counted
        return counted.reused_options or counted.curtailed

    def problem(self, order: GraphPath, paths: Paths) -> PathProblem:
        """The graphs of a path, with the points that each may take."""
        eager_code, joined = paths.eager_code(order)
        if joined is None:
            joined = max(largest_gradient(self.frontiers[key]) for key in order)
        keys = tuple(dict.fromkeys(order))
        return PathProblem(
            keys,
            tuple(keys.index(key) for key in order),
            tuple(self.frontiers[key] for key in keys),
            tuple(self._offered(key) for key in keys),
            eager_code,
            joined,
            tuple(paths.passing(order, key) for key in keys),
            self._context.settings.forwards,
        )

    def _offered(self, key: str) -> Sequence[SchedulePoint]:
        if key in self.chosen:
            return (self.chosen[key],)
        if key not in self._offers:
            self._offers[key] = self.frontiers[key].offered()
        return self._offers[key]

    def _breaks(self, order: GraphPath, paths: Paths) -> tuple[GraphBreak, ...]:
        return tuple(
            GraphBreak(*ending, crossing_bytes=_output_bytes(self.frontiers[key].graph))
            for key, ending in zip(order, paths.breaks(order), strict=False)
            if ending is not None
        )

    def _blocks(self, order: GraphPath) -> tuple[PlannedBlock, ...]:
        """The blocks of all graphs, numbered in the order of the forward."""
        blocks = [block for key in order for block in self.plans[key].blocks]
        return tuple(replace(block, index=index) for index, block in enumerate(blocks))


def _output_bytes(graph: JointGraph) -> int:
    return sum(graph.values[value].bytes for value in graph.held_outputs | graph.released_outputs)
