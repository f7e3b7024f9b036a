"""What batches need: each is captured once, and planned with the options of other batches where that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hybridremat.analysis.batch_capture import BatchCapture
from hybridremat.analysis.batch_size import TriedBatch
from hybridremat.analysis.resident import resident_bytes, rounding
from hybridremat.analysis.sample_step import SampleStep, sample_step
from hybridremat.graph.joint import JointGraph, as_plain, plain_schedule
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.accept import code_needs
from hybridremat.planning.auto_breaks import with_breaks
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.lowered_judge import inductor_for, plain_code
from hybridremat.planning.origin import origin_of
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import choose_from, step_frontier
from hybridremat.planning.progress import Progress, Timings, planning_progress
from hybridremat.planning.settings import Settings
from hybridremat.planning.stages import plain_point
from hybridremat.planning.step_costs import costed
from hybridremat.runtime.prepare import capture_only, path_frontier, with_memory
from hybridremat.sequence.judge import Judge

if TYPE_CHECKING:
    from hybridremat.planning.breaks.frontier import AnyFrontier, PathFrontier

Factory = Callable[[int], tuple[Any, ...]]


@dataclass(frozen=True)
class BatchStep:
    """The traced step of one batch with its costs; it is planned when somebody asks.

    ``timings`` are the seconds that the costs took, ``inputs`` the bytes that the batch takes.
    """

    batch: int
    step: TracedStep
    timings: Timings
    context: PlanContext
    inputs: int

    @property
    def graph(self) -> JointGraph:
        """The joint graph with its costs."""
        return self.step.graph

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients at the end of the step."""
        return sum(self.graph.values[value].bytes for value in self.graph.gradients)

    @property
    def traced(self) -> tuple[TracedStep, ...]:
        """Its graph."""
        return (self.step,)

    @property
    def plain_time(self) -> int:
        """Nanoseconds of the plain step."""
        return plain_point(self.graph).time

    @staticmethod
    def of_traced(
        made: SampleStep, settings: Settings, batch: int, traced: TracedStep, *, show: bool
    ) -> BatchStep:
        """The step of a batch that is traced from a capture of others."""
        context = PlanContext.of(settings).at(origin_of(made.model, made.args, made.kwargs))
        inputs = resident_bytes((made.args, made.kwargs), rounding(made.model, None))
        with planning_progress(show=show) as progress:
            step, timings = costed(traced, replace(context, progress=_named(progress, batch)))
        return BatchStep(batch, step, timings, context, inputs)

    @staticmethod
    def captured(
        made: SampleStep, settings: Settings, batch: int = 0, *, show: bool
    ) -> BatchStep | BatchPath:
        """The step of a model and its inputs; ``batch`` names it in the progress bar, unless it is 0."""
        def with_settings(settings: Settings) -> BatchStep | BatchPath:
            return BatchStep._captured(made, settings, batch, show=show)

        return with_breaks(made.model, settings, with_settings)

    @staticmethod
    def _captured(made: SampleStep, settings: Settings, batch: int, *, show: bool) -> BatchStep | BatchPath:
        model, args, kwargs = with_memory(made.model, made.args, made.kwargs, settings)
        context = PlanContext.of(settings).at(origin_of(model, args, kwargs, settings.spec))
        inputs = resident_bytes((args, kwargs), rounding(model, settings.spec))
        if settings.several_graphs:
            with planning_progress(show=show) as progress:
                path = path_frontier(
                    model, args, kwargs, replace(context, progress=_named(progress, batch))
                )
            if path is not None:
                return BatchPath(batch, path, context, inputs)
        found: list[BatchStep] = []

        def choose(traced: TracedStep) -> Chosen:
            step, timings = costed(traced, replace(context, progress=_named(progress, batch)))
            found.append(BatchStep(batch, step, timings, context, inputs))
            return Chosen(step, plain_schedule(step.graph))

        with planning_progress(show=show) as progress:
            capture_only(model, args, kwargs, settings, choose)
        return found[-1]

    def plain_need(self) -> int:
        """Bytes of the plain step, the caller's outside included."""
        settings, schedule = self.context.settings, plain_schedule(self.graph)
        outside = settings.outside_memory()
        if settings.compiler == "inductor":
            memory = plain_code(self.step, inductor_for(settings).lowered)
            return code_needs(self.graph, memory, outside)
        return Judge(as_plain(self.graph), outside=outside).needs(schedule)

    def frontier(self, *, reuse: bool, show: bool) -> GraphFrontier:
        """The frontier of the step; ``reuse``: options of other batches will do."""
        with planning_progress(show=show) as progress:
            context = replace(self.context, progress=_named(progress, self.batch))
            return step_frontier(self.step, self.timings, context, reuse=reuse)


@dataclass(frozen=True)
class BatchPath:
    """As :class:`BatchStep`, of a step of several graphs, whose frontiers are known at once."""

    batch: int
    path: PathFrontier
    context: PlanContext
    inputs: int

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients at the end of the step."""
        return self.path.gradient_bytes

    @property
    def traced(self) -> tuple[TracedStep, ...]:
        """Its graphs, in the order of the forward."""
        survey = self.path.survey
        return tuple(survey.traced[key] for key in survey.order)

    @property
    def plain_time(self) -> int:
        """Nanoseconds of the plain step."""
        return self.path.plain_time

    def plain_need(self) -> int:
        """Bytes of the plain step, the caller's outside included."""
        return self.path.plain_needs

    def frontier(self, *, reuse: bool, show: bool) -> PathFrontier:
        """The frontier of the step; nothing is left to be solved."""
        return self.path


def _named(progress: Progress, batch: int) -> Progress:
    if not batch:
        return progress
    return lambda stage, done, total: progress(f"batch {batch}: {stage}", done, total)


class Batches:
    """Steps by batch size, under one limit; ``with_inputs``: what the batch itself takes counts, too."""

    def __init__(
        self, factory: Factory, settings: Settings, *, show: bool, with_inputs: bool = False
    ) -> None:
        self.settings, self._with_inputs = settings, with_inputs
        self._factory, self._show = factory, show
        self._capture = BatchCapture(settings)
        self._steps: dict[int, BatchStep | BatchPath] = {}
        self._frontiers: dict[int, AnyFrontier] = {}
        self._plain: dict[int, int] = {}

    def constant(self, batch: int) -> int:
        """A guess, from one batch, at the bytes that do not grow with it: gradients and reserve."""
        return self._step(batch).gradient_bytes + self.settings.reserve_bytes()

    def plain_need(self, batch: int) -> int:
        """Bytes of the plain step, the caller's outside included."""
        if batch not in self._plain:
            self._plain[batch] = self._step(batch).plain_need() + self._inputs(batch)
        return self._plain[batch]

    def plain_time(self, batch: int) -> int:
        """Nanoseconds of the plain step."""
        return self._step(batch).plain_time

    def need(self, batch: int) -> int:
        """Least bytes of a plan.

        It is beyond the limit only if options solved for this batch are: those of others may be worse.
        """
        step, limit = self._step(batch), self.limit
        frontier = step.frontier(reuse=True, show=self._show)
        if frontier.reused_options and self._least(frontier) + self._inputs(batch) > limit:
            frontier = step.frontier(reuse=False, show=self._show)
        self._frontiers[batch] = frontier
        return self._least(frontier) + self._inputs(batch)

    def plan(self, batch: int) -> Plan:
        """The plan for a batch that fits, from options of its own."""
        step, frontier = self._step(batch), self._frontiers[batch]
        settings = replace(self.settings, memory_limit=self.limit - self._inputs(batch))
        if frontier.reused_options:
            anew = step.frontier(reuse=False, show=self._show)
            if self._least(anew) + self._inputs(batch) <= self.limit:  # else others' were better, by chance
                frontier = self._frontiers[batch] = anew
        return choose_from(frontier, settings, step.context.origin)

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
        frontier = self._frontiers.get(batch)
        return None if frontier is None else self._least(frontier) + self._inputs(batch)

    def _inputs(self, batch: int) -> int:
        return self._step(batch).inputs if self._with_inputs else 0

    def _least(self, frontier: AnyFrontier) -> int:
        """Least bytes of the points within the overhead that was asked for."""
        return frontier.least_needs(self.settings.overhead_limit())

    def _step(self, batch: int) -> BatchStep | BatchPath:
        if batch not in self._steps:
            made = sample_step(self._factory(batch), f"the model factory, called with batch {batch},")
            self._steps[batch] = self._new_step(made, batch)
        return self._steps[batch]

    def _new_step(self, made: SampleStep, batch: int) -> BatchStep | BatchPath:
        if (traced := self._capture.traced(made)) is not None:
            return BatchStep.of_traced(made, self.settings, batch, traced, show=self._show)
        return BatchStep.captured(made, self.settings, batch, show=self._show)
