"""The distinct graphs of one input shape, and the points of its frontier that each runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import JointGraph
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.breaks.composition import placed
from hybridremat.planning.breaks.paths import GraphPath, Paths
from hybridremat.planning.breaks.points import choose_path
from hybridremat.planning.breaks.problem import PathProblem, largest_gradient
from hybridremat.planning.breaks.survey import path_frontier
from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.context import PlanContext
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.plan import Plan
from hybridremat.planning.plan_store import Refusals
from hybridremat.planning.settings import Settings
from hybridremat.planning.step_costs import with_memory
from hybridremat.plans.records import GraphBreak, PlannedBlock
from hybridremat.plans.request import Request
from hybridremat.sequence.effort import WHOLE
from hybridremat.sequence.pool import SchedulePoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variant:
    """One way in which a graph runs: a point of its frontier, and its plan."""

    point: SchedulePoint
    plan: Plan


class StepGraphs:
    """Plans paths through graphs; a graph on several paths keeps the points that it got on the first.

    Attributes
    ----------
    frontiers, steps, variants
        By fingerprint: frontier and traced step of each graph, and of those on a planned path the ways in
        which they run.
    places
        Of each planned path: the variant of each graph, in the order of the forward.
    """

    def __init__(
        self,
        context: PlanContext,
        frontiers: Mapping[str, GraphFrontier],
        steps: Mapping[str, TracedStep],
    ) -> None:
        self._context = context
        self.frontiers, self.steps = dict(frontiers), dict(steps)
        self.variants: dict[str, list[Variant]] = {}
        self.places: dict[GraphPath, tuple[int, ...]] = {}
        self._offers: dict[str, Sequence[SchedulePoint]] = {}
        self._refusals = Refusals()
        self._surveyed = set(frontiers)
        self._given: Plan | None = None
        self._given_points: tuple[SchedulePoint, ...] = ()

    def add(self, frontiers: Mapping[str, GraphFrontier], steps: Mapping[str, TracedStep]) -> None:
        """Add the graphs of a path; of those that are not planned, a survey knows best."""
        new = [key for key in frontiers if key not in self.variants and key not in self._surveyed]
        self._surveyed |= frontiers.keys()
        if not self.frontiers.keys().isdisjoint(new):
            self._refusals.clear()
        self.frontiers.update({key: frontiers[key] for key in new})
        for key in new:
            self._offers.pop(key, None)  # of what was known before
        self.steps.update({key: steps[key] for key in new if key in steps})

    def follow(self, given: Plan, order: GraphPath) -> None:
        """Let the graphs of a path run as a given plan says.

        Raises
        ------
        PlanMismatchError
            If it is for other graphs.
        """
        from hybridremat.planning.apply import applied, parts_by_graph
        from hybridremat.planning.planner import require_host_memory

        if given.host_bytes:
            require_host_memory(given, self._context.settings)
        points: dict[str, dict[int, SchedulePoint]] = {}
        for key, parts in parts_by_graph(given, order).items():
            step, frontier = self.steps[key], self.frontiers[key]
            measured = partial(with_memory, step, self._context.settings, self._context.agreement)
            points[key] = {}
            for number, part in parts.items():
                if part.details is None:  # there is one way to run it
                    points[key][number] = frontier.plain
                    continue
                plan = applied(part, step, self._context.origin, measured)
                points[key][number] = frontier.as_planned(plan)
                self.variants.setdefault(key, []).append(Variant(points[key][number], plan))
        places = given.places or tuple(map(list(points).index, order))
        self._given = given
        self._given_points = tuple(points[key][number] for key, number in zip(order, places, strict=True))

    def agreeing(self, ran: GraphPath, taken: Sequence[int]) -> list[GraphPath]:
        """Planned paths that start with these graphs, the first of them in the variants ``taken``."""
        there = tuple(taken)
        return [
            path
            for path, places in self.places.items()
            if path[: len(ran)] == ran and places[: len(there)] == there
        ]

    def plan(
        self, order: GraphPath, paths: Paths, settings: Settings, taken: tuple[int, ...] = ()
    ) -> Plan:
        """Choose points for the graphs of a path that have none, and make the plan of the whole step.

        The first graphs run already, in the variants ``taken``.

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
        chosen, whole = self._choose(order, paths, settings, taken)
        places: list[int] = []
        for key, point in zip(order, chosen, strict=True):
            known = self.variants.setdefault(key, [])
            number = next((n for n, each in enumerate(known) if each.point == point), len(known))
            if number == len(known):
                known.append(Variant(point, self._plan_of(key, point, whole.cost_model, asked)))
                self._refusals.clear()
            places.append(number)
            self.steps.pop(key, None)  # it runs as it does now: nothing is planned again
        self.places[order] = tuple(places)
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
        ways = list(dict.fromkeys(zip(order, places, strict=True)))
        return replace(
            whole,
            origin=self._context.origin,
            request=asked,
            parts=tuple(self.variants[key][number].plan for key, number in ways),
            places=(numbers := tuple(ways.index(each) for each in zip(order, places, strict=True))),
            composition=placed(whole.composition, numbers),
            breaks=self._breaks(order, paths),
            blocks=self._blocks(order),
        )

    def _plan_of(self, key: str, point: SchedulePoint, cost_model: str, asked: Request) -> Plan:
        frontier = self.frontiers[key]
        own = replace(asked, reserve=frontier.outside.reserve, forwards=frontier.outside.forwards)
        return plan_of_point(
            frontier,
            point,
            limit=None,
            asked=None,
            cost_model=cost_model,
            origin=self._context.origin,
            request=own,
        )

    def _choose(
        self, order: GraphPath, paths: Paths, settings: Settings, taken: tuple[int, ...]
    ) -> tuple[tuple[SchedulePoint, ...], Plan]:
        """Points for the graphs of a path; those with few options are solved again if nothing fits."""
        new = [key for key in dict.fromkeys(order) if key not in self.variants]
        if few := [key for key in new if self._has_few_options(key)]:
            try:
                strict = replace(settings, on_infeasible="error")
                return self._choose_of(self.problem(order, paths, taken), strict)
            except InfeasibleLimitError:
                logger.info("nothing fits with the options of blocks that were looked at first; solving more")
                for key in few:
                    timings, seconds = self.frontiers[key].counted.timings, WHOLE / len(few)
                    self.frontiers[key] = path_frontier(
                        self.steps[key], timings, self._context, reuse=False, seconds=seconds
                    )
                    self._offers.pop(key, None)
                self._refusals.clear()
        return self._choose_of(self.problem(order, paths, taken), settings)

    def _choose_of(
        self, problem: PathProblem, settings: Settings
    ) -> tuple[tuple[SchedulePoint, ...], Plan]:
        """As :func:`choose_path`; what did not fit is refused at once while the graphs are the same."""
        asked = replace(problem, frontiers=(), offered=()), settings
        with self._refusals.unless_known(asked, kept=self._context.keeps_refusals):
            return choose_path(problem, settings)

    def _has_few_options(self, key: str) -> bool:
        counted = self.frontiers[key].counted
        return counted.reused_options or counted.curtailed

    def problem(self, order: GraphPath, paths: Paths, taken: tuple[int, ...] = ()) -> PathProblem:
        """The graphs of a path, with the points that each may take; the first run already, as ``taken``."""
        eager_code, joined = paths.eager_code(order)
        if joined is None:
            joined = max((largest_gradient(self.frontiers[key]) for key in order), default=0)
        joined += sum(self._held_bytes(order, paths, key) for key in order)
        keys = tuple(dict.fromkeys(order))
        problem = PathProblem(
            keys,
            tuple(keys.index(key) for key in order),
            tuple(self.frontiers[key] for key in keys),
            tuple(self._offered(key) for key in keys),
            eager_code,
            joined,
            tuple(paths.passing(order, key) for key in keys),
            tuple(paths.staying(order, key) for key in keys),
            tuple(paths.dropped(order, key) for key in keys),
            tuple(paths.fading(order, key) for key in keys),
            self._context.settings.forwards,
            frozenset(self.variants),
            paths.units(order),
            None if (settings := self._context.settings).offload is None else settings.host_bytes(),
            paths.sharding(order),
        )
        if self._given is None:
            points = (self.variants[key][number].point for key, number in zip(order, taken, strict=False))
            return problem.begun(tuple(points)) if any(map(self._runs_differently, order)) else problem
        return replace(problem.apart(), offered=tuple((point,) for point in self._given_points))

    def _runs_differently(self, key: str) -> bool:
        return len(self.variants.get(key, ())) > 1

    def _held_bytes(self, order: GraphPath, paths: Paths, key: str) -> int:
        """Bytes of outputs of a graph that are held on this path, and were not where it was planned."""
        graph = self.frontiers[key].graph
        held = paths.held_outputs(order, key, graph.released_outputs)
        return sum(graph.values[value].bytes for value in held)

    def _offered(self, key: str) -> Sequence[SchedulePoint]:
        if key in self.variants:
            return tuple(variant.point for variant in self.variants[key])
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
        plans = (self.variants[key][n].plan for key, n in zip(order, self.places[order], strict=True))
        blocks = [block for plan in plans for block in plan.blocks]
        return tuple(replace(block, index=index) for index, block in enumerate(blocks))


def _output_bytes(graph: JointGraph) -> int:
    return sum(graph.values[value].bytes for value in graph.held_outputs | graph.released_outputs)
