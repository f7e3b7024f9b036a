"""The frontier of a compiled step: a few counted points, those that a question needs, as their code runs.

Which of them keep a limit is not known before they are lowered. How far counted and lowered bytes are apart
at one point tells which one to lower next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.limit_errors import infeasible, too_slow
from hybridremat.planning.lowered_judge import LoweredJudge
from hybridremat.planning.progress import Progress, no_progress
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import FrontierPoint
from hybridremat.sequence.pool import Code, SchedulePoint, pareto_frontier

MOST_LOWERINGS: Final = 4
"""Points that are lowered for one limit in one way of scheduling, beside the plain step and a first one."""

WORTH: Final = 0.001
"""Share of the plain step's time that a faster point has to save to be lowered."""

FAR: Final = 0.1
"""Where a limit is below the plain step by this share of its peak, the fastest point is not tried first."""

SPREAD: Final = 6
"""Points that are lowered, in both ways, for a whole frontier."""


@dataclass(frozen=True)
class CompiledFrontier(GraphFrontier):
    """The frontier of a compiled step (:class:`GraphFrontier`); no point is lowered twice.

    Attributes
    ----------
    counted
        The frontier of the step by the count, all of it.
    judge
        What its points need as code.
    progress
        Called with (stage, done, total).
    """

    counted: StepFrontier
    judge: LoweredJudge
    progress: Progress = field(default=no_progress, compare=False)
    _points: dict[tuple[int, bool], SchedulePoint] = field(default_factory=dict, repr=False)

    choosing = "lowering"

    @property
    def plain(self) -> SchedulePoint:  # type: ignore[override]
        """The plain step as Inductor compiles it."""
        return self.judge.unplanned

    @property
    def reused_options(self) -> bool:  # type: ignore[override]
        """See :class:`GraphFrontier`."""
        return self.counted.reused_options

    def as_planned(self, plan: PlanData) -> SchedulePoint:
        """See :class:`GraphFrontier`."""
        code: Code = "plain" if plan.plain_code else "lean" if plan.lean else "own"
        return self.judge.as_it_is(self.counted.as_planned(plan), code)

    def points_beside(self, chosen: SchedulePoint) -> tuple[FrontierPoint, ...]:
        """See :class:`GraphFrontier`; the others by the count."""
        del chosen
        return self.counted.points()

    def shown_by(self, progress: Progress) -> Self:
        """See :class:`GraphFrontier`."""
        return replace(self, progress=progress)

    @property
    def lowered(self) -> tuple[SchedulePoint, ...]:
        """All points lowered so far."""
        return tuple(self._points.values())

    def point(self, index: int, *, lean: bool) -> SchedulePoint:
        """A counted point, lowered."""
        if (index, lean) not in self._points:
            self._points[index, lean] = self.judge(self._candidates[index], lean=lean)
        return self._points[index, lean]

    @property
    def _candidates(self) -> tuple[SchedulePoint, ...]:
        return self.counted.candidates

    def least(self) -> SchedulePoint:
        """See :class:`GraphFrontier`: that of the fewest counted bytes, or another that was lowered."""
        for lean in (True, False):
            self.point(0, lean=lean)
        return min(self.lowered, key=lambda each: (each.needs, each.time))

    def smallest(self, max_overhead: float) -> SchedulePoint:
        """See :class:`GraphFrontier`: of the fewest counted bytes in the better way."""
        index = self._candidates.index(replace(self.counted, searches=()).smallest(max_overhead))
        return min((self.point(index, lean=lean) for lean in (True, False)), key=lambda each: each.needs)

    def least_known(self, chosen: SchedulePoint) -> int:
        """See :class:`GraphFrontier`."""
        return min(self._candidates[0].needs, chosen.needs, *(each.needs for each in self.lowered))

    def choose(self, limit: int | None, max_overhead: float | None) -> SchedulePoint:
        """See :class:`GraphFrontier`."""
        self.require_policy_within(max_overhead)
        if limit is None:
            return self.least() if max_overhead is None else self.smallest(max_overhead)
        best = self._fastest_within(limit)
        if best is None:
            raise infeasible(limit, self.least().needs, self.plain_peak, self.outside, self.counted.pins)
        best = self._improved(best, limit)
        if self.is_within(best, max_overhead):
            return best
        assert max_overhead is not None
        least = self.smallest(max_overhead).needs
        raise too_slow(limit, max_overhead, takes=self.overhead(best), least=least)

    def offered(self) -> tuple[SchedulePoint, ...]:
        """See :class:`GraphFrontier`: at about equal steps of counted bytes, and all that were lowered."""
        indices = _evenly([each.needs for each in self._candidates], SPREAD)
        for done, index in enumerate(indices):
            self.progress("lowering", done, len(indices))
            self.point(index, lean=False)
            if index < len(self._candidates) - 1:
                self.point(index, lean=True)
        return pareto_frontier(self.lowered)

    def _fastest_within(self, limit: int) -> SchedulePoint | None:
        """The fastest candidate that fits, in the way of scheduling that takes less near the limit."""
        last, plain = len(self._candidates) - 1, self.judge.plain
        if not self.counted.pins and plain.needs <= limit:
            return plain
        if limit > plain.needs - FAR * plain.peak and self.point(last, lean=False).needs <= limit:
            return self.point(last, lean=False)
        near = self._guess(limit, self._gap_near(limit), -1, max(last, 1))
        own, lean = (self.point(near, lean=how).needs for how in (False, True))
        leaner = lean < own
        found = self._search(limit, lean=leaner)
        if not leaner and (found < 0 or lean == own):  # it shrinks evenly; near the floor it alone may fit
            further = self._search(limit, lean=True, beyond=found)
            found, leaner = max(found, further), further > found
        return self.point(found, lean=leaner) if found >= 0 else None

    def _improved(self, best: SchedulePoint, limit: int) -> SchedulePoint:
        """What searches make of the best point, where their code fits and is faster.

        They go by the count, which is some bytes apart from the code: first they may need more by what the
        code leaves free, then no more than the point.
        """
        composed = self._counted_as.get(best)
        if composed is None or not self.counted.searches:
            return best
        for budget in dict.fromkeys((composed.needs + limit - best.needs, composed.needs)):
            self.progress("improving", 0, 1)
            found = self.counted.best(budget)
            if found.time < composed.time:
                point = self.judge(found, lean=best.code == "lean")
                if point.needs <= limit:
                    return point
        return best

    @property
    def _counted_as(self) -> dict[SchedulePoint, SchedulePoint]:
        """The counted points of those that were lowered."""
        return {point: self._candidates[index] for (index, _), point in self._points.items()}

    def _guess(self, limit: int, gap: int, fits: int, high: int) -> int:
        """The candidate between two others that may just fit, if the count is ``gap`` bytes too high."""
        within = (i for i in range(high) if self._candidates[i].needs <= limit + gap)
        return min(max(max(within, default=0), fits + 1), high - 1)

    def _search(self, limit: int, *, lean: bool, beyond: int = -1) -> int:
        """The fastest candidate known to fit, or ``beyond``, which does in another way; -1 if none does."""
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
            gap = self._candidates[index].needs - found.needs
        if lean and fits < 0 and self.point(0, lean=True).needs <= limit:
            fits = 0
        return fits

    def _bracket(self, limit: int, least: int, *, lean: bool) -> tuple[int, int]:
        """The fastest candidate that is known to fit, at ``least`` or beyond, and the next known not to."""
        known = {index: point.needs for (index, how), point in self._points.items() if how == lean}
        fits = max([least, *(index for index, needs in known.items() if needs <= limit)])
        beyond = (index for index, needs in known.items() if needs > limit and index > fits)
        return fits, min(beyond, default=len(self._candidates))

    def _gap_near(self, limit: int) -> int:
        """By how many bytes the point lowered nearest to a limit was counted too high."""
        last = len(self._candidates) - 1  # much of the plain step is written over what dies
        known = [(point.needs, index) for (index, _), point in self._points.items() if index < last]
        if not known:
            return 0
        needs, index = min(known, key=lambda each: abs(each[0] - limit))
        return self._candidates[index].needs - needs

    def _is_worth(self, slow: int, fast: int) -> bool:
        """Whether a candidate saves enough time against another, which is -1 for none."""
        if slow < 0:
            return True
        return self._candidates[slow].time - self._candidates[fast].time > WORTH * self.plain.time


def _evenly(needs: Sequence[int], count: int) -> list[int]:
    """Indices of about equal steps, the first and the last among them; ``needs`` rise."""
    low, high = needs[0], needs[-1]
    wanted = [low + (high - low) * number / (count - 1) for number in range(count)]
    return sorted({min(range(len(needs)), key=lambda i: abs(needs[i] - each)) for each in wanted})
