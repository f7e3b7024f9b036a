"""What batches need: each is captured once, and planned with the options of other batches where that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridremat.analysis.batch_size import TriedBatch
from hybridremat.analysis.sample_step import sample_step
from hybridremat.compiler.capture import require_matching_inputs
from hybridremat.graph.joint import JointGraph, Schedule, plain_schedule
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.choose import chosen_plan
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import Progress, plain_point
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.session import Session
from hybridremat.planning.settings import Settings
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.outside_memory import schedule_needs
from hybridremat.runtime.prepare import checked_call

Factory = Callable[[int], tuple[Any, ...]]


class TracedBatch(Session):
    """The step of one batch with its costs; it is planned when somebody asks.

    Attributes
    ----------
    graph
        The joint graph with costs; None before the capture.
    """

    def __init__(self, settings: Settings, batch: int) -> None:
        self._name = f"batch {batch}"
        super().__init__(settings, only_frontier=True)
        self.graph: JointGraph | None = None
        self._timings: dict[str, float] = {}

    def choose(self, step: TracedStep) -> tuple[TracedStep, Schedule, int | None]:
        """See :class:`~hybridremat.compiler.backend.StepPlanner`: costs, and the plain schedule."""
        self.progress = self._named(self.progress)
        step, self._timings = self.with_costs(step)
        self.graph = step.graph
        return step, plain_schedule(step.graph), None

    def planned(self, *, reuse: bool, show: bool) -> StepFrontier:
        """The frontier of the captured graph."""
        assert self.graph is not None
        with planning_progress(show=show) as progress:
            self.progress = self._named(progress)
            return self._planning(self.graph, self._timings, reuse=reuse)

    def _named(self, move: Progress) -> Progress:
        return lambda stage, done, total: move(f"{self._name}: {stage}", done, total)


class Batches:
    """Steps by batch size, under one limit."""

    def __init__(self, factory: Factory, settings: Settings, *, show: bool) -> None:
        self.settings = settings
        self._factory, self._show = factory, show
        self._steps: dict[int, TracedBatch] = {}
        self._plannings: dict[int, StepFrontier] = {}

    def constant(self, batch: int) -> int:
        """A guess, from one batch, at the bytes that do not grow with it: gradients and reserve."""
        graph = self._graph(batch)
        return sum(graph.values[value].bytes for value in graph.gradients) + self.settings.reserve_bytes()

    def plain_need(self, batch: int) -> int:
        """Bytes of the plain step, the caller's demands included."""
        graph, demands = self._graph(batch), self.settings.demands()
        if demands.none:
            return plain_point(graph).peak
        return schedule_needs(graph, plain_schedule(graph), demands)

    def plain_time(self, batch: int) -> int:
        """Nanoseconds of the plain step."""
        return plain_point(self._graph(batch)).time

    def need(self, batch: int) -> int:
        """Least bytes of a plan.

        It is beyond the limit only if options solved for this batch are: those of others may be worse.
        """
        step, limit = self._step(batch), self.limit
        planning = step.planned(reuse=True, show=self._show)
        if planning.reused_options and self._least(planning) > limit:
            planning = step.planned(reuse=False, show=self._show)
        self._plannings[batch] = planning
        return self._least(planning)

    def plan(self, batch: int) -> Plan:
        """The plan for a batch that fits, from options of its own."""
        step, planning = self._step(batch), self._plannings[batch]
        if planning.reused_options:
            anew = step.planned(reuse=False, show=self._show)
            if self._least(anew) <= self.limit:  # else the options of others were better, by chance
                planning = self._plannings[batch] = anew
        return chosen_plan(planning, step.settings, step.origin, on_infeasible="error")

    @property
    def limit(self) -> int:
        """The memory limit in bytes."""
        limit = self.settings.limit_bytes(0)
        assert limit is not None
        return limit

    def tried(self) -> tuple[TriedBatch, ...]:
        """All batches that were captured, by size."""
        return tuple(TriedBatch(n, self._known_least(n), self.plain_need(n)) for n in sorted(self._steps))

    def _known_least(self, batch: int) -> int | None:
        planning = self._plannings.get(batch)
        return None if planning is None else self._least(planning)

    def _least(self, planning: StepFrontier) -> int:
        """Least bytes of the points within the overhead that was asked for."""
        most, demands = self.settings.overhead_limit(), self.settings.demands()
        points = planning.candidates
        if most is not None:
            points = tuple(c for c in points if planning.overhead(c.point) <= most + 1e-12)
        return min(planning.needs(candidate, demands) for candidate in points)

    def _graph(self, batch: int) -> JointGraph:
        graph = self._step(batch).graph
        assert graph is not None
        return graph

    def _step(self, batch: int) -> TracedBatch:
        if batch not in self._steps:
            self._steps[batch] = self._captured(batch)
        return self._steps[batch]

    def _captured(self, batch: int) -> TracedBatch:
        target = sample_step(self._factory(batch), f"the model factory, called with batch {batch},")
        step = TracedBatch(self.settings, batch)
        call = checked_call(target.model, step, progress=self._show)
        require_matching_inputs(target.model, target.args, target.kwargs)
        call.prepare(target.args, target.kwargs)
        return step
