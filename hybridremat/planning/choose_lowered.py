"""From a frontier to the plan of a compiled step, by the memory of Inductor's own lowering.

The frontier counts the graph with its fused values left out, which is close: Inductor also writes results
over inputs that die. So a few points are lowered, and the fastest one whose code fits is taken.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace
from typing import Final, Protocol

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.errors import InfeasibleLimitError, InfeasibleLimitWarning
from hybridremat.graph.joint import Schedule, plain_schedule
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.plan import Plan
from hybridremat.planning.progress import Progress
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.planning.step_frontier import Candidate, StepFrontier, infeasible, too_slow
from hybridremat.plans.origin import Origin
from hybridremat.plans.outside_memory import PhasePeaks, needed_bytes
from hybridremat.sequence.sinking import sink_recomputations

MOST_LOWERINGS: Final = 4
"""Points that are lowered in each way of scheduling for one plan, beside the plain step."""


class Lower(Protocol):
    """Lowers a schedule (``Inductor.lowered_memory``)."""

    def __call__(self, step: TracedStep, schedule: Schedule, *, lean: bool) -> EmittedMemory:
        """The memory of its code."""
        ...


@dataclass(frozen=True)
class _Point:
    """A candidate as lowered; ``needs``: bytes with the caller's code."""

    candidate: Candidate
    schedule: Schedule
    memory: EmittedMemory
    needs: int
    lean: bool


class _Lowerings:
    """The points of one frontier, each lowered at most once."""

    def __init__(self, step: TracedStep, frontier: StepFrontier, settings: Settings, lower: Lower) -> None:
        self.step, self.frontier = step, frontier
        self.outside, self._lower = settings.outside_memory(), lower
        self._known: dict[tuple[int, bool], _Point] = {}
        self.fused = step.fused_ops

    @property
    def all(self) -> tuple[_Point, ...]:
        """All points lowered so far."""
        return tuple(self._known.values())

    def modelled(self, index: int) -> int:
        """Bytes that a candidate needs by the frontier's count."""
        return self.frontier.needs(self.frontier.candidates[index], self.outside)

    def point(self, index: int, *, lean: bool) -> _Point:
        """A candidate of the frontier, lowered."""
        if (index, lean) not in self._known:
            candidate = self.frontier.candidates[index]
            graph = self.frontier.graph
            schedule = sink_recomputations(graph, candidate.point.schedule, self.fused)
            memory = self._lower(self.step, schedule, lean=lean)
            peaks = PhasePeaks(memory.forward_peak, memory.backward_peak, memory.saved)
            needs = needed_bytes(graph, peaks, self.outside)
            self._known[index, lean] = _Point(candidate, schedule, memory, needs, lean)
        return self._known[index, lean]


def choose_lowered(
    step: TracedStep,
    frontier: StepFrontier,
    settings: Settings,
    origin: Origin,
    *,
    on_infeasible: OnInfeasible,
    progress: Progress,
    lower: Lower,
) -> Plan:
    """The fastest plan whose generated code keeps the limit; of an overhead alone, the one of least memory.

    Raises
    ------
    InfeasibleLimitError
        As :func:`~hybridremat.planning.choose.choose_plan`.
    """
    started = time.perf_counter()
    points = _Lowerings(step, frontier, settings, lower)
    progress("lowering", 0, MOST_LOWERINGS)
    plain = lower(step, plain_schedule(frontier.graph), lean=False).peak
    limit = asked = settings.limit_bytes(plain)
    try:
        chosen = _chosen(points, limit, settings.overhead_limit(), plain, progress)
    except InfeasibleLimitError as error:
        chosen = min(points.all, key=lambda point: (point.needs, point.candidate.point.time))
        if on_infeasible == "error" or (limit is not None and chosen.needs <= limit):
            raise
        limit = chosen.needs
        warnings.warn(f"{error} The plan of least memory runs.", InfeasibleLimitWarning, stacklevel=3)
    plan = _plan(points, chosen, settings, origin, limit=limit, asked=asked)
    return replace(
        plan, plain_peak=plain, timings={**plan.timings, "lowering": time.perf_counter() - started}
    )


def _plan(
    points: _Lowerings,
    chosen: _Point,
    settings: Settings,
    origin: Origin,
    *,
    limit: int | None,
    asked: int | None,
) -> Plan:
    """The plan of a point, with the figures of its code in place of those that were counted."""
    plan = plan_of_point(
        points.frontier,
        chosen.candidate,
        limit=limit,
        asked=asked,
        outside=points.outside,
        cost_model=settings.costs().name,
        origin=origin,
        request=settings.request(),
    )
    return replace(
        plan,
        schedule=chosen.schedule,
        predicted_peak=chosen.memory.peak,
        needed=chosen.needs,
        least_peak=min(points.modelled(0), *(point.needs for point in points.all)),
        saved_bytes=chosen.memory.saved,
        compiler="inductor",
        lean=chosen.lean,
    )


def _chosen(
    points: _Lowerings, limit: int | None, overhead: float | None, plain: int, progress: Progress
) -> _Point:
    frontier = points.frontier
    if limit is None:
        index = frontier.candidates.index(frontier.choose(None, overhead, points.outside))
        return points.point(index, lean=True)
    best = _fastest_within(points, limit, progress)
    if best is None:
        least = min(point.needs for point in points.all)
        raise infeasible(limit, least, plain, points.outside, frontier.pins)
    takes = frontier.overhead(best.candidate.point)
    if overhead is not None and takes > overhead + 1e-12:
        raise too_slow(limit, overhead, takes=takes, least=best.needs)
    return best


def _fastest_within(points: _Lowerings, limit: int, progress: Progress) -> _Point | None:
    """The fastest candidate that fits, with Inductor's own scheduling or, if that is slower, lean."""
    own = _search(points, limit, -1, progress, lean=False)
    if own == len(points.frontier.candidates) - 1:
        return points.point(own, lean=False)
    lean = _search(points, limit, own, progress, lean=True)
    if max(own, lean) < 0:
        return None
    return points.point(max(own, lean), lean=lean > own)


def _search(points: _Lowerings, limit: int, low: int, progress: Progress, *, lean: bool) -> int:
    """The fastest candidate known to fit; ``low`` if none beyond it does.

    The next one to be lowered is guessed from how far lowered and counted bytes were apart.
    """
    count = len(points.frontier.candidates)
    fits, high = low, count  # the fastest that fits, the slowest that does not
    gap = 0
    for done in range(MOST_LOWERINGS):
        if high - fits <= 1:
            break
        progress("lowering lean" if lean else "lowering", done, MOST_LOWERINGS)
        within = (i for i in range(count) if points.modelled(i) <= limit + gap)
        index = min(max(max(within, default=0), fits + 1), high - 1)
        found = points.point(index, lean=lean)
        if found.needs <= limit:
            fits = index
        else:
            high = index
        gap = points.modelled(index) - found.needs
    if lean and fits < 0 and points.point(0, lean=True).needs <= limit:
        fits = 0
    return fits
