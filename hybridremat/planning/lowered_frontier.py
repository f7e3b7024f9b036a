"""The frontier of a compiled step, by the memory of Inductor's own lowering.

The frontier counts the graph with its fused values left out, which is close: Inductor also writes results
over inputs that die. So a few points are lowered, those that a question needs, each at most once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.lowered_memory import LoweredStep
from hybridremat.graph.joint import Schedule, as_plain, plain_schedule
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.accept import code_needs
from hybridremat.planning.context import PlanContext
from hybridremat.planning.limit_errors import infeasible, too_slow
from hybridremat.planning.progress import Progress, Stopwatch, Timings, no_progress
from hybridremat.planning.settings import Settings
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.records import FrontierPoint
from hybridremat.sequence.pool import SchedulePoint
from hybridremat.sequence.sinking import sink_recomputations
from hybridremat.version import __version__

if TYPE_CHECKING:
    from hybridremat.compiler.inductor import Inductor

MOST_LOWERINGS: Final = 4
"""Points that are lowered for one limit in one way of scheduling, beside the plain step and a first one."""

WORTH: Final = 0.001
"""Share of the plain step's time that a faster point has to save to be lowered."""

FAR: Final = 0.1
"""Where a limit is below the plain step by this share of its peak, the fastest point is not tried first."""

SPREAD: Final = 6
"""Points that are lowered, in both ways, for a whole frontier."""


class Lower(Protocol):
    """Lowers a schedule (``Inductor.lowered``)."""

    def __call__(self, step: TracedStep, schedule: Schedule, *, lean: bool = False) -> LoweredStep:
        """Its code."""
        ...


@dataclass(frozen=True)
class LoweredPoint:
    """A candidate as lowered; ``needs``: bytes with the caller's code.

    ``lean``: whether Inductor keeps the order of the schedule and frees every buffer at once; ``plain``:
    whether this is the plain step, with what is saved laid out as Inductor likes.
    """

    candidate: SchedulePoint
    schedule: Schedule
    memory: EmittedMemory
    needs: int
    lean: bool
    plain: bool = False


@dataclass(frozen=True)
class LoweredFrontier:
    """The points of one frontier, each lowered at most once.

    ``plain_memory`` is that of the plain step's code, ``at_end`` the same if all gradients are handed
    out at the end, where some leave earlier. ``known``: the memory of schedules that have been
    lowered, in Inductor's own scheduling and lean.
    """

    step: TracedStep
    counted: StepFrontier
    lower: Lower
    plain_memory: EmittedMemory
    progress: Progress = no_progress
    at_end: EmittedMemory | None = None
    known: dict[tuple[Schedule, bool], EmittedMemory] = field(default_factory=dict)
    _points: dict[tuple[int, bool], LoweredPoint] = field(default_factory=dict)

    @property
    def reused_options(self) -> bool:
        """Whether some blocks have options of blocks with other sizes."""
        return self.counted.reused_options

    @property
    def curtailed(self) -> bool:
        """Whether blocks were left with fewer options than more work would find."""
        return self.counted.curtailed

    @property
    def plain_peak(self) -> int:
        """Bytes of the plain step as Inductor compiles it."""
        return (self.at_end or self.plain_memory).peak

    @property
    def lowered(self) -> tuple[LoweredPoint, ...]:
        """All points lowered so far."""
        return tuple(self._points.values())

    def counted_needs(self, index: int) -> int:
        """Bytes that a candidate needs by the frontier's count."""
        return self.counted.candidates[index].needs

    def point(self, index: int, *, lean: bool) -> LoweredPoint:
        """A candidate of the frontier, lowered."""
        if (index, lean) not in self._points:
            self._points[index, lean] = self._point_of(self.counted.candidates[index], lean=lean)
        return self._points[index, lean]

    def lowered_as(self, point: SchedulePoint, *, lean: bool, plain: bool) -> LoweredPoint:
        """A schedule that a plan has, lowered as it says."""
        if plain:
            return self.plain_point
        memory = self._lowered(point.schedule, lean=lean)
        needs = code_needs(self.counted.graph, memory, self.counted.judge.outside)
        return LoweredPoint(point, point.schedule, memory, needs, lean)

    def _point_of(self, candidate: SchedulePoint, *, lean: bool) -> LoweredPoint:
        graph = self.counted.graph
        schedule = sink_recomputations(graph, candidate.schedule, self.step.fused_ops)
        memory = self._lowered(schedule, lean=lean)
        needs = code_needs(graph, memory, self.counted.judge.outside)
        return LoweredPoint(candidate, schedule, memory, needs, lean)

    def figures(self, point: LoweredPoint) -> FrontierPoint:
        """The figures of a point, with the peak of its code."""
        return replace(self.counted.figures(point.candidate), peak=point.memory.peak)

    def least(self, max_overhead: float | None = None) -> LoweredPoint:
        """The point of least memory within an overhead: of the fewest counted bytes, in the better way.

        Raises
        ------
        PolicyError
            If what a policy wants recomputed alone exceeds the overhead.
        """
        frontier = replace(self.counted, exchanges=False)
        index = 0
        if max_overhead is not None:
            index = frontier.candidates.index(frontier.choose(None, max_overhead))
        return min((self.point(index, lean=lean) for lean in (True, False)), key=lambda point: point.needs)

    def fastest(self, limit: int, max_overhead: float | None = None) -> LoweredPoint:
        """The fastest point whose code fits a limit (bytes); ``max_overhead`` as a fraction.

        Raises
        ------
        InfeasibleLimitError
            If no point satisfies both.
        PolicyError
            If what a policy wants recomputed alone exceeds the overhead.
        """
        frontier = self.counted
        frontier.require_policy_within(max_overhead)
        best = self._fastest_within(limit)
        if best is None:
            least = min(point.needs for point in self.lowered)
            raise infeasible(limit, least, self.plain_peak, self.counted.judge.outside, frontier.pins)
        best = self._improved(best, limit)
        takes = frontier.overhead(best.candidate)
        if max_overhead is not None and takes > max_overhead + 1e-12:
            raise too_slow(limit, max_overhead, takes=takes, least=self.least(max_overhead).needs)
        return best

    def figures_at(self, limit: int | None, max_overhead: float | None) -> FrontierPoint:
        """The figures of the fastest point under a limit, or of the least within an overhead."""
        point = self.least(max_overhead) if limit is None else self.fastest(limit, max_overhead)
        return self.figures(point)

    def checkpointed(self) -> None:
        """Checkpointing each layer is not lowered."""

    def points(self) -> tuple[FrontierPoint, ...]:
        """Figures of points at about equal steps of counted memory, and of all that were lowered.

        None of them beats another.
        """
        return tuple(self.figures(point) for point in self.lowered_points())

    def lowered_points(self) -> tuple[LoweredPoint, ...]:
        """The points of :meth:`points`."""
        indices = _evenly([self.counted_needs(i) for i in range(len(self.counted.candidates))], SPREAD)
        for done, index in enumerate(indices):
            self.progress("lowering", done, len(indices))
            self.point(index, lean=False)
            if index < len(self.counted.candidates) - 1:
                self.point(index, lean=True)
        return _pareto(self.lowered)

    @property
    def plain_point(self) -> LoweredPoint:
        """The plain step; the fastest candidate may run it in another order, whose code takes more."""
        graph, memory = self.counted.graph, self.plain_memory
        needs = code_needs(graph, memory, self.counted.judge.outside)
        candidate = replace(self.counted.plain, chain=0 if self.counted.chains else None)
        return LoweredPoint(candidate, plain_schedule(graph), memory, needs, lean=False, plain=True)

    def _lowered(self, schedule: Schedule, *, lean: bool) -> EmittedMemory:
        if (schedule, lean) not in self.known:
            self.known[schedule, lean] = self.lower(self.step, schedule, lean=lean).memory
        return self.known[schedule, lean]

    def _fastest_within(self, limit: int) -> LoweredPoint | None:
        """The fastest candidate that fits, in the way of scheduling that takes less near the limit."""
        last, plain = len(self.counted.candidates) - 1, self.plain_point
        if not self.counted.pins and plain.needs <= limit:
            return plain
        if limit > plain.needs - FAR * plain.memory.peak and self.point(last, lean=False).needs <= limit:
            return self.point(last, lean=False)
        near = self._guess(limit, self._gap_near(limit), -1, max(last, 1))
        own, lean = (self.point(near, lean=how).needs for how in (False, True))
        leaner = lean < own
        found = self._search(limit, lean=leaner)
        if not leaner and (found < 0 or lean == own):  # it shrinks evenly; near the floor it alone may fit
            further = self._search(limit, lean=True, beyond=found)
            found, leaner = max(found, further), further > found
        return self.point(found, lean=leaner) if found >= 0 else None

    def _improved(self, best: LoweredPoint, limit: int) -> LoweredPoint:
        """What exchanges and polishing make of the best point, where their code fits and is faster.

        They go by the count, which is some bytes apart from the code: first they may need more by what the
        code leaves free, then no more than the point.
        """
        if best.plain or not self.counted.exchanges:
            return best
        composed = best.candidate
        for budget in dict.fromkeys((composed.needs + limit - best.needs, composed.needs)):
            self.progress("improving", 0, 1)
            found = self.counted.polished(self.counted.improved(composed, budget), budget)
            if found.time < composed.time and (point := self._point_of(found, lean=best.lean)).needs <= limit:
                return point
        return best

    def _guess(self, limit: int, gap: int, fits: int, high: int) -> int:
        """The candidate between two others that may just fit, if the count is ``gap`` bytes too high."""
        within = (i for i in range(high) if self.counted_needs(i) <= limit + gap)
        return min(max(max(within, default=0), fits + 1), high - 1)

    def _search(self, limit: int, *, lean: bool, beyond: int = -1) -> int:
        """The fastest candidate known to fit, or ``beyond``, which does in another way; -1 if there is none.

        The next one to be lowered is guessed from how far lowered and counted bytes were apart.
        """
        fits, high = self._bracket(limit, beyond, lean=lean)
        gap = self._gap_near(limit)
        for done in range(MOST_LOWERINGS):
            if high - fits <= 1 or not self._is_worth(fits, high - 1):
                break
            self.progress("lowering lean" if lean else "lowering", done, MOST_LOWERINGS)
            index = self._guess(limit, gap, fits, high)
            found = self.point(index, lean=lean)
            if found.needs <= limit:
                fits = index
            else:
                high = index
            gap = self.counted_needs(index) - found.needs
        if lean and fits < 0 and self.point(0, lean=True).needs <= limit:
            fits = 0
        return fits

    def _bracket(self, limit: int, least: int, *, lean: bool) -> tuple[int, int]:
        """The fastest candidate that is known to fit, at ``least`` or beyond, and the next known not to."""
        known = {index: point.needs for (index, how), point in self._points.items() if how == lean}
        fits = max([least, *(index for index, needs in known.items() if needs <= limit)])
        beyond = (index for index, needs in known.items() if needs > limit and index > fits)
        return fits, min(beyond, default=len(self.counted.candidates))

    def _gap_near(self, limit: int) -> int:
        """By how many bytes the point lowered nearest to a limit was counted too high."""
        last = len(self.counted.candidates) - 1  # much of the plain step is written over what dies
        known = [(point.needs, index) for (index, _), point in self._points.items() if index < last]
        if not known:
            return 0
        needs, index = min(known, key=lambda each: abs(each[0] - limit))
        return self.counted_needs(index) - needs

    def _is_worth(self, slow: int, fast: int) -> bool:
        """Whether a candidate saves enough time against another, which is -1 for none."""
        if slow < 0:
            return True
        times = [self.counted.candidates[index].time for index in (slow, fast)]
        return times[0] - times[1] > WORTH * self.counted.plain.time


@dataclass(frozen=True)
class Lowering:
    """A step as Inductor compiles it: its ops with the workspaces of its code, what lowers it, its memory.

    ``timings``: seconds by stage so far; ``at_end``: memory of the plain step with its gradients at the end.
    """

    step: TracedStep
    timings: Timings
    lower: Lower
    plain_memory: EmittedMemory
    at_end: EmittedMemory

    @staticmethod
    def of_plain_step(step: TracedStep, timings: Timings, context: PlanContext) -> Lowering:
        """Lower the plain step."""
        inductor, timed = inductor_for(context.settings), Stopwatch(timings)
        with timed("lowering"):
            context.progress("lowering", 0, 1)
            code = inductor.lowered(step, plain_schedule(step.graph), plain=True)
            plain = plain_code(step, inductor.lowered) if step.graph.deliveries else code.memory
        return Lowering(code.laid_out(step), timed.timings, inductor.lowered, code.memory, plain)

    def frontier(self, counted: StepFrontier, progress: Progress) -> LoweredFrontier:
        """The frontier of the step with its code."""
        return LoweredFrontier(
            self.step, counted, self.lower, self.plain_memory, progress, at_end=self.at_end
        )


def plain_code(step: TracedStep, lower: Lower) -> EmittedMemory:
    """The memory of the code of the plain step, which hands out all gradients at its end."""
    graph = as_plain(step.graph)
    return lower(replace(step, graph=graph), plain_schedule(graph)).memory


def inductor_for(settings: Settings) -> Inductor:
    """Inductor, which these settings ask for."""
    from hybridremat.compiler.inductor import Inductor  # takes a second

    return Inductor(f"hybridremat {__version__} {settings.request()}")


def _evenly(needs: Sequence[int], count: int) -> list[int]:
    """Indices of about equal steps, the first and the last among them; ``needs`` rise."""
    low, high = needs[0], needs[-1]
    wanted = [low + (high - low) * number / (count - 1) for number in range(count)]
    return sorted({min(range(len(needs)), key=lambda i: abs(needs[i] - each)) for each in wanted})


def _pareto(points: Iterable[LoweredPoint]) -> tuple[LoweredPoint, ...]:
    """Points by rising needs and falling time."""
    kept: list[LoweredPoint] = []
    for point in sorted(points, key=lambda p: (p.needs, p.candidate.time, p.lean)):
        if not kept or point.candidate.time < kept[-1].candidate.time:
            kept.append(point)
    return tuple(kept)
