"""The frontier of a step of several graphs: what its graphs can be combined to, under each of some limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

from hybridremat.errors import InfeasibleLimitError
from hybridremat.planning.breaks.graphs import StepGraphs
from hybridremat.planning.breaks.limits import StepLimits
from hybridremat.planning.breaks.paths import Paths, SurveyedPath
from hybridremat.planning.breaks.problem import PathProblem
from hybridremat.planning.breaks.survey import Survey
from hybridremat.planning.plan import Plan
from hybridremat.planning.progress import Progress
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.plans.fsdp import Fsdp
from hybridremat.plans.origin import Origin
from hybridremat.plans.records import FrontierPoint
from hybridremat.sequence.joined_graphs import MultiGraphStep, choose_points

if TYPE_CHECKING:
    from hybridremat.planning.graph_frontier import GraphFrontier

    AnyFrontier: TypeAlias = "GraphFrontier | PathFrontier"

LIMITS: Final = 12
"""Limits, evenly from the least memory to what the fastest choice needs, that a frontier is looked at."""

AGAIN: Final = 4
"""How often a point is planned again under the bytes that it needs, until it is its own plan."""


@dataclass(frozen=True)
class PathFrontier:
    """What the graphs on one path of a step can be combined to.

    A point is the plan that :func:`hybridremat.wrap` makes under its limit: it is the same function.
    """

    survey: Survey

    reused_options = False

    @cached_property
    def _path(self) -> SurveyedPath:
        return SurveyedPath.of(self.survey)

    @cached_property
    def _paths(self) -> Paths:
        paths = Paths(self.survey.context.settings.max_plans)
        paths.surveyed.append(self._path)
        return paths

    @cached_property
    def _problem(self) -> PathProblem:
        return self._graphs().problem(self._path.order, self._paths)

    @cached_property
    def _step(self) -> MultiGraphStep:
        return self._problem.step(self._problem.offered)

    def over(self, fsdp: Fsdp | None) -> PathFrontier:
        """The same step sharded in another way, or not at all; nothing is captured or solved again."""
        survey = self.survey
        assert survey.sharded is not None
        settings = replace(survey.context.settings, fsdp=fsdp)
        sharding = None if fsdp is None else survey.sharded(fsdp)
        context = replace(survey.context, settings=settings)
        return PathFrontier(replace(survey, context=context, sharding=sharding))

    def _graphs(self) -> StepGraphs:
        return StepGraphs(self.survey.context, self.survey.frontiers, self.survey.traced)

    @cached_property
    def _limits(self) -> StepLimits:
        return StepLimits.of(self._problem.plain(), self.survey.context.settings)

    @property
    def plain_peak(self) -> int:
        """Bytes of the plain step."""
        return self._limits.plain_peak

    @property
    def plain_time(self) -> int:
        """Nanoseconds of the plain step."""
        return self._limits.plain_time

    @property
    def plain_needs(self) -> int:
        """Bytes of the plain step with the caller's code and further forwards."""
        plain = replace(self._problem.plain(), forwards=self._problem.forwards)
        return plain.peak((0,) * len(plain.parts)) + self._limits.reserve

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients at the end of the step."""
        return sum(self._step.parts[number].gradient_bytes for number in self._step.order)

    def least_needs(self, max_overhead: float | None) -> int:
        """Least bytes of a plan, with the caller's code, within an overhead (a fraction; None: any)."""
        most = None if max_overhead is None else int(self.plain_time * (1 + max_overhead))
        points = choose_points(self._step, most_time=most)
        assert points is not None, "plain graphs take no more time than the plain step"
        least = self._step.peak(points) + self._limits.reserve
        if max_overhead is not None:
            return least
        return min(least, self._plan(least, None).needed)  # searches may find a little less

    def points(self) -> tuple[FrontierPoint, ...]:
        """The figures of what is the fastest under each of some limits, by rising peak."""
        return self._points

    @cached_property
    def _points(self) -> tuple[FrontierPoint, ...]:
        fastest = choose_points(self._step, limit=self._step.peak_bound())
        assert fastest is not None
        reserve = self._limits.reserve
        low, high = self.least_needs(None), self._step.peak(fastest) + reserve
        limits = dict.fromkeys(low + (high - low) * number // LIMITS for number in range(LIMITS + 1))
        kept: list[FrontierPoint] = []
        for point in sorted({self._own_plan(limit) for limit in limits}, key=lambda p: p.peak):
            if not kept or point.overhead < kept[-1].overhead:
                kept.append(point)
        return tuple(kept)

    def _own_plan(self, limit: int) -> FrontierPoint:
        """The figures of a plan under a limit, or about it, that is the plan under what it needs as well.

        Near the least memory, searches under a limit may find what those under a lower one do not.
        """
        plan = self._plan(limit, None)
        for _ in range(AGAIN):
            try:
                again = self._plan(plan.needed, None)
            except InfeasibleLimitError as error:
                again = self._plan(error.least, None)
            if again.predicted_peak == plan.predicted_peak and again.overhead == plan.overhead:
                break
            plan = again
        return _figures(plan)

    def figures_at(self, limit: int | None, max_overhead: float | None) -> FrontierPoint:
        """The figures of the plan under a limit (bytes), within an overhead (fraction), or both.

        Raises
        ------
        InfeasibleLimitError
            If there is none.
        """
        return _figures(self._plan(limit, max_overhead))

    def plan_under(self, limit: int) -> Plan:
        """The plan under a limit in bytes.

        Raises
        ------
        InfeasibleLimitError
            If there is none.
        """
        return self._plan(limit, None)

    @property
    def compiler(self) -> str:
        """``"eager"`` or ``"inductor"``."""
        return self.survey.context.settings.compiler

    @cached_property
    def _plans(self) -> dict[tuple[int | None, float | None], Plan | InfeasibleLimitError]:
        """What was found by limit (bytes) and overhead (fraction); points are asked for again and again."""
        return {}

    def _plan(self, limit: int | None, max_overhead: float | None) -> Plan:
        asked = limit, max_overhead
        if asked not in self._plans:
            try:
                self._plans[asked] = self._planned(limit, max_overhead)
            except InfeasibleLimitError as error:
                self._plans[asked] = error.fresh()
        found = self._plans[asked]
        if isinstance(found, InfeasibleLimitError):
            raise found.fresh()
        return found

    def _planned(self, limit: int | None, max_overhead: float | None) -> Plan:
        asked = replace(self.survey.context.settings, memory_limit=limit, max_overhead=max_overhead)
        return self.plan_for(asked, Origin(), on_infeasible="error")

    def checkpointed(self) -> None:
        """Layers are not looked for across breaks."""

    def shown_by(self, progress: Progress) -> PathFrontier:
        """The same frontier: a choice takes no time."""
        del progress
        return self

    def plan_for(self, settings: Settings, origin: Origin, *, on_infeasible: OnInfeasible) -> Plan:
        """The plan that the settings ask for; nothing is solved.

        Raises
        ------
        InfeasibleLimitError
            If there is none, unless ``on_infeasible="least"``.
        """
        asked = replace(settings, on_infeasible=on_infeasible)
        return replace(self._graphs().plan(self._path.order, self._paths, asked), origin=origin)


def _figures(plan: Plan) -> FrontierPoint:
    return FrontierPoint(plan.predicted_peak, plan.overhead, plan.extra_flops)
