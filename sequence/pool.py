"""The pool: schedules that searches found, with their figures. What no other beats is kept."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hybridremat.graph.joint import Schedule
from hybridremat.sequence.decisions import Decision
from hybridremat.sequence.outside_memory import PhasePeaks

Code = Literal["none", "own", "lean", "plain"]
"""Whose bytes a point has: counted ones, or those of generated code. Code is in the compiler's own order, or
keeps that of the schedule and frees every buffer at once (lean), or is the plain step's, with what is saved
laid out as the compiler likes."""


@dataclass(frozen=True)
class SchedulePoint:
    """One schedule and its exact figures.

    Attributes
    ----------
    phases
        Bytes of step memory: the peak of each phase, and what is alive between them.
    time
        Nanoseconds of all executions.
    flops
        Matrix-product, convolution and attention flops of all executions.
    schedule
        Flat list of op executions.
    needs
        Bytes that have to be there for it: the peak, and what else is alive around the step.
    decisions
        What it decides for each block; empty for the plain step.
    parted
        The ops that run by parts.
    composed_time
        Nanoseconds of the schedule of blocks that it was improved from
        (:mod:`hybridremat.sequence.exchange`); None if it is one.
    least_time
        Nanoseconds that no schedule of its strategy beats under the limit that it was made for; None if that
        is not known.
    chain
        The number of the chain whose blocks it decides about; None without any.
    code
        Whose bytes these are.
    host
        Bytes of host memory that its moves take.
    """

    phases: PhasePeaks
    time: int
    flops: int
    schedule: Schedule
    needs: int
    decisions: tuple[Decision, ...] = ()
    parted: frozenset[int] = frozenset()
    composed_time: int | None = None
    least_time: int | None = None
    chain: int | None = None
    code: Code = "none"
    host: int = 0

    @property
    def peak(self) -> int:
        """Bytes of step memory at most."""
        return self.phases.peak


@dataclass(frozen=True)
class Pool:
    """Pareto sets of needed bytes against time, sorted by bytes.

    ``with_saved``: of needed bytes, saved bytes and time, where others run beside what is saved.

    Attributes
    ----------
    points
        Of all that was looked at.
    base
        Of that part of the search which does not depend on the limits asked for
        (:attr:`~hybridremat.sequence.frontier.Wanted.ranges`). What the least memory is, is said by this part
        alone, so that it is the same for every limit.
    """

    points: tuple[SchedulePoint, ...]
    base: tuple[SchedulePoint, ...]
    with_saved: bool = False

    @staticmethod
    def of(
        points: Iterable[SchedulePoint],
        base: Iterable[SchedulePoint] | None = None,
        *,
        with_saved: bool = False,
    ) -> Pool:
        """That of some points; by default all of them are looked at for any limit."""
        pareto = pareto_with_saved if with_saved else pareto_frontier
        points = tuple(points)
        return Pool(pareto(points), pareto(points if base is None else base), with_saved)

    @staticmethod
    def merged(pools: Sequence[Pool]) -> Pool:
        """That of all points of several pools of one graph, with the same needs."""
        return Pool.of(
            (point for each in pools for point in each.points),
            (point for each in pools for point in each.base),
            with_saved=any(each.with_saved for each in pools),
        )

    def under(self, limit: int) -> SchedulePoint | None:
        """The fastest of its points that needs at most so many bytes; None if none does."""
        fitting = (point for point in self.points if point.needs <= limit)
        return min(fitting, key=lambda point: (point.time, point.needs), default=None)

    def faster(self, time: int, count: int) -> tuple[SchedulePoint, ...]:
        """The ``count`` points that are the next ones faster than so many nanoseconds."""
        faster = (point for point in self.points if point.time < time)
        return tuple(sorted(faster, key=lambda point: (-point.time, point.needs))[:count])

    def with_points(self, points: Iterable[SchedulePoint]) -> Pool:
        """The pool with what was found for a limit."""
        pareto = pareto_with_saved if self.with_saved else pareto_frontier
        return replace(self, points=pareto((*self.points, *points)))

    def mapped(self, change: Callable[[SchedulePoint], Iterable[SchedulePoint]]) -> Pool:
        """That of what each point is changed to."""
        every = {id(point): point for point in (*self.points, *self.base)}
        changed = {key: tuple(change(point)) for key, point in every.items()}
        return Pool.of(
            (point for each in self.points for point in changed[id(each)]),
            (point for each in self.base for point in changed[id(each)]),
            with_saved=self.with_saved,
        )


def pareto_frontier(points: Iterable[SchedulePoint]) -> tuple[SchedulePoint, ...]:
    """Points that no other point equals or beats in both needed bytes and time, sorted by bytes."""
    kept: list[SchedulePoint] = []
    for point in sorted(points, key=lambda p: (p.needs, p.time, p.peak, p.flops)):
        if not kept or point.time < kept[-1].time:
            kept.append(point)
    return tuple(kept)


def pareto_with_saved(points: Iterable[SchedulePoint]) -> tuple[SchedulePoint, ...]:
    """Points that no other equals or beats in needed and saved bytes and in time, sorted by needed bytes."""
    kept: list[SchedulePoint] = []
    best: list[tuple[int, int]] = []  # time and saved bytes of those kept, none beats another: times rise
    for point in sorted(points, key=lambda p: (p.needs, p.time, p.phases.between, p.flops)):
        figures = point.time, point.phases.between
        place = bisect_right(best, figures)
        if place and best[place - 1][1] <= figures[1]:
            continue
        kept.append(point)
        end = place
        while end < len(best) and best[end][1] >= figures[1]:
            end += 1
        best[place:end] = [figures]
    return tuple(kept)
