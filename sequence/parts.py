"""Which ops of a schedule have to run by parts, so that it stays under its own peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from hybridremat.graph.joint import JointGraph, ops_by_parts
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import SchedulePoint

BETWEEN: Final = 3
"""Points of one schedule above the first, the last one with no op by parts that is slower so."""

NOTHING: Final = 1.001
"""Times the time without parts: what parts may take for no further points to be made."""

MOST_SETS: Final = 16
"""Sets of ops by parts whose graphs are kept: points that follow each other often have the same."""


def parts_for_nothing(graph: JointGraph) -> JointGraph:
    """The graph with all ops run by parts that can be, in the time of their own kernels."""
    ops = ops_by_parts(graph).ops
    return replace(graph, ops=tuple(replace(op, time=op.runs_alone.time) for op in ops))


def judge_of(judge: Judge, point: SchedulePoint) -> Judge:
    """The judge of a graph with the ops run by parts that a point runs so."""
    return judge.with_ops_of(ops_by_parts(judge.graph, point.parted))


class PartsChooser:
    """Decides which ops of a graph run by parts, for schedules of :func:`parts_for_nothing` of it."""

    def __init__(self, judge: Judge) -> None:
        self._judge, self._graph, graph = judge, judge.graph, judge.graph
        self._able = frozenset(op.id for op in graph.ops if op.variant)
        self._may = np.array([bool(op.variant) for op in graph.ops])
        self._run_by_parts = lru_cache(MOST_SETS)(self._made_to_run_by_parts)

    def __call__(self, point: SchedulePoint) -> Iterator[SchedulePoint]:
        """The point with as few parts as peaks allow.

        The first one is under the schedule's own peak. If parts take time there, others follow, between it
        and the peak of the ops' own kernels alone.
        """
        saved = self._saved(point)
        first = self._point(point, saved, point.peak)
        yield first
        if first.time > NOTHING * point.time:
            most = point.peak + max(bytes_ for _, bytes_ in saved.values())
            for step in range(1, BETWEEN + 1):
                yield self._point(point, saved, point.peak + (most - point.peak) * step // BETWEEN)

    def _saved(self, point: SchedulePoint) -> dict[int, tuple[int, int]]:
        """For each op that can go by parts: most bytes where its own kernel runs, and above the peak.

        An op's own kernel takes more while it runs, and nothing at any other time.
        """
        memory, over = self._judge.simulate.replay(point.schedule)
        steps = point.schedule.steps
        found: dict[int, tuple[int, int]] = {}
        for now in np.flatnonzero(self._may[np.array(steps, np.int64)]).tolist():
            own, parts = self._graph.ops[steps[now]].variants
            more = own.temp - parts.temp
            if now in over and over[now] not in own.overwrites:
                more += self._graph.values[over[now]].bytes
            most = max(found.get(steps[now], (0, 0))[0], memory.profile[now] + more)
            found[steps[now]] = most, max(0, most - point.peak)
        return found

    def _point(
        self, point: SchedulePoint, saved: dict[int, tuple[int, int]], limit: int
    ) -> SchedulePoint:
        """The point with the ops' own kernels wherever they fit under a limit, unless parts are faster."""
        parted = frozenset(
            op
            for op, (most, _) in saved.items()
            if most > limit or self._graph.ops[op].variants[0].time > self._graph.ops[op].variants[1].time
        )
        found = self._run_by_parts(parted)(point.schedule)
        if found.peak > limit:
            parted = self._able
            found = self._run_by_parts(parted)(point.schedule)
        return replace(point, phases=found.phases, time=found.time, needs=found.needs, parted=parted)

    def _made_to_run_by_parts(self, parted: frozenset[int]) -> Judge:
        """The judge of the graph with these ops run by parts."""
        return self._judge.with_ops_of(ops_by_parts(self._graph, parted))
