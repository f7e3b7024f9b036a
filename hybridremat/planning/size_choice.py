"""The schedule of a step at each of many sizes: of those that are known already, or searched for there.

Whatever was found without a limit at some sizes is a schedule at all others: the fastest that fits there is
taken. A search at further sizes comes where none fits, or where the same share of the plain step's memory
costs so much more time than where they were found that a search there is won back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import JointGraph
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.accept import under_checked_policy
from hybridremat.planning.apply import mismatch
from hybridremat.planning.choose import choose_with_point, plan_of_point
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.covered_plan import covering, covers_elsewhere, frontier_of_file
from hybridremat.planning.other_sizes import (
    differences,
    fastest_elsewhere,
    known_for,
    placed_elsewhere,
    run_alike,
)
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import adopted, choose_schedule, has_backward, make_plan, step_frontier
from hybridremat.planning.progress import Stopwatch
from hybridremat.planning.settings import Settings
from hybridremat.planning.stages import plain_point_of
from hybridremat.planning.step_costs import costed, costs_like, note_checkpointing, times_like
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.coverage import KnownSchedule
from hybridremat.sequence.effort import PlanningEffort
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import SchedulePoint

logger = logging.getLogger(__name__)

NEARLY: Final = 0.002
"""Of a plain step's time: a schedule that is emitted already, and no slower by more, is taken again."""


MOST_IN_FILES: Final = 64
"""Schedules that a plan file has at most."""


@dataclass(frozen=True)
class Pick:
    """A schedule that was chosen at some sizes.

    ``found`` is the frontier that it comes from, of other sizes or of these; ``limit`` the bytes that were
    asked for.
    """

    found: StepFrontier
    point: SchedulePoint
    limit: int


class SizeChoice:
    """Chooses the schedule of a step at each size; a ``Choose``.

    Attributes
    ----------
    context
        What is planned for: of the call at hand, to be set before each choice.
    known
        The frontiers that were searched, each at its sizes, after what a plan of the caller has.
    given
        A plan of the caller that is for many sizes, if it is for this step.
    costed
        The step that was chosen for last, with the costs of all ways to run its ops; None if these were not
        measured.
    """

    def __init__(self, context: PlanContext) -> None:
        self.context = context
        self.costed: TracedStep | None = None
        self._picked: dict[str, Pick] = {}
        self.known: list[StepFrontier] = []
        self.given = context.given if context.given is not None and context.given.coverage else None
        self._recalled = False

    def __call__(self, traced: TracedStep) -> Chosen:
        """The schedule of a step at its sizes, whose plan becomes the current one of the store.

        Raises
        ------
        HybridRematError
            As :func:`hybridremat.wrap`.
        """
        context, self.costed = self.context, None
        if not self.shares or not has_backward(traced.graph):
            return choose_schedule(traced, context)
        note_checkpointing(traced, context)
        step = under_checked_policy(traced, context)
        self._recall(step.graph)
        plan = context.store.get(step.graph.fingerprint)
        if plan is None or plan.details is None:
            plan = self._of_known(step, context) or self._searched(step, context)
            if self.given is not None:
                plan = covering(plan, self.given, context)
        return adopted(plan, step, context, keep=False)

    def _recall(self, graph: JointGraph) -> None:
        """Know what the caller's plan has for all sizes of a step, if it is for this one.

        Raises
        ------
        PlanMismatchError
            If it is for another step, and this is the first one.
        """
        if self.given is None or self._recalled:
            return
        assert self.given.details is not None
        if found := next(differences(self.given.details.graph, graph), ""):
            if not len(self.context.store):
                raise mismatch("the plan was not made for this step", [f"its graph is another one ({found})"])
            self.given = None
            return
        self.known.insert(0, frontier_of_file(self.given))
        self._recalled = True

    @property
    def shares(self) -> bool:
        """Whether sizes share schedules, by what is asked for.

        A plan of the caller runs first as it is, unless it covers other sizes and these are such.
        """
        given, here = self.context.given, self.context.origin
        first = given is not None and not len(self.context.store) and not covers_elsewhere(given, here)
        return self.covers and not first

    @property
    def covers(self) -> bool:
        """Whether what is known at some sizes is looked at for others: else a search is made at each."""
        settings, plain = self.context.settings, Settings()
        others = "max_overhead", "policy", "planning_budget", "strategy"
        same = all(getattr(settings, name) == getattr(plain, name) for name in others)
        return same and settings.memory_limit is not None and self.context.agreement.alone

    def schedules(self, graph: JointGraph) -> list[KnownSchedule]:
        """The schedules that are known, of a graph of the step at some sizes: at most :data:`MOST_IN_FILES`.

        Those that have been picked come first.
        """
        self._recall(graph)
        picked = [(each.found, each.point) for each in self._picked.values()]
        found = [(each, point) for each in self.known for point in each.candidates]
        few = found[:: max(1, -(-len(found) // MOST_IN_FILES))]
        least = [(each, each.least_composed) for each in self.known]
        kept = (
            known
            for frontier, point in (*picked, *least, *few)
            for known in known_for(frontier.graph_of(point), point.schedule, graph)
        )
        return list(dict.fromkeys(kept))[:MOST_IN_FILES]

    def plan_at(self, step: TracedStep) -> Plan | None:
        """The plan of a step with its costs, but for times that are measured, of a known schedule.

        None if a search has to find one.
        """
        self._recall(step.graph)
        if not self.known:
            return None
        timed = Stopwatch({})
        with timed("costs"):
            measured = self.context.settings.costs().name == "profile"
            like = self.known[0].graph
            graph = times_like(step, like, self.context).graph if measured else step.graph
        known = self.context.store.get(graph.fingerprint)
        if known is not None and known.details is not None:
            return known
        return self._plan_of_known(graph, self.context, timed)

    def adopted(self, plan: Plan, step: TracedStep) -> Chosen:
        """The schedule of a plan that :meth:`plan_at` has made: it becomes the current one of the store."""
        return adopted(plan, step, self.context, keep=False)

    def _of_known(self, step: TracedStep, context: PlanContext) -> Plan | None:
        """The plan of a known schedule; None if a search has to find one."""
        if not self.known:
            return None
        timed = Stopwatch({})
        with timed("costs"):
            self.costed = costs_like(step, self.known[0].graph, context)
        return self._plan_of_known(self.costed.graph, context, timed)

    def _plan_of_known(self, graph: JointGraph, context: PlanContext, timed: Stopwatch) -> Plan | None:
        with timed("compose"):
            judge, like = Judge(graph, outside=context.settings.outside_memory()), self.known[0].judge
            judge = replace(judge, link=like.link, host_limit=like.host_limit)
            plain = plain_point_of(judge)
            picked = self._picked.get(graph.fingerprint)
            if picked is None:
                limit = context.settings.limit_bytes(plain.peak)
                assert limit is not None, "sizes share schedules under limits alone"
                picked = self._pick(judge, plain, limit)
            if picked is None:
                return None
            self._picked[graph.fingerprint] = picked
            there = _frontier_there(picked.found, judge, plain, [picked.point])
        return plan_of_point(
            there,
            there.fastest,
            limit=picked.limit,
            asked=picked.limit,
            cost_model=context.settings.costs().name,
            origin=context.origin,
            request=context.settings.request(),
        ).with_timings(timed.timings)

    def _pick(self, judge: Judge, plain: SchedulePoint, limit: int) -> Pick | None:
        """The fastest known schedule that keeps a limit at some sizes, unless a search is worth its time.

        One that has been picked before is emitted already, and taken if it is nearly as fast.
        """
        every = [(found, found.candidates) for found in self.known]
        best = self._fastest(every, judge, limit)
        if judge.link is not None:
            best = self._placed(every, judge, plain, limit, best) or best
        if best is None:
            return None
        time, picked = best
        found = picked.found
        share = found.pool.under(limit * found.plain_peak // max(1, plain.peak)) or found.least_composed
        effort, gap = PlanningEffort.of(judge.graph, plain.time), time / max(1, plain.time) - 1.0
        if self.given is None and effort.seconds(gap - found.overhead(share)) > effort.capture:
            return None
        before = [(each.found, (each.point,)) for each in self._picked.values()]
        again = self._fastest(before, judge, limit)
        if again is not None and again[0] <= time + NEARLY * plain.time:
            picked = again[1]
        return _at_rest(picked, judge, limit)

    def _placed(
        self,
        known: Iterable[tuple[StepFrontier, Sequence[SchedulePoint]]],
        judge: Judge,
        plain: SchedulePoint,
        limit: int,
        best: tuple[int, Pick] | None,
    ) -> tuple[int, Pick] | None:
        """A known schedule with moves for some sizes, if it is faster than the ``best`` as they are."""
        most = inf if best is None else best[0] - NEARLY * plain.time
        made = None
        for found, points in known:
            placed = placed_elsewhere(found.graph, points, judge, limit, most)
            if placed is not None:
                most, made = placed[1], (placed[1], Pick(found, placed[0], limit))
        return made

    def _fastest(
        self,
        known: Iterable[tuple[StepFrontier, Sequence[SchedulePoint]]],
        judge: Judge,
        limit: int,
    ) -> tuple[int, Pick] | None:
        """The fastest of some schedules that keeps a limit at some sizes, and its nanoseconds there."""
        gathered: dict[int, tuple[StepFrontier, dict[int, SchedulePoint]]] = {}
        for found, points in known:
            gathered.setdefault(id(found), (found, {}))[1].update((id(each), each) for each in points)
        best: tuple[int, Pick] | None = None
        for found, mine in gathered.values():
            points = sorted(mine.values(), key=lambda each: (each.time, each.needs))
            fitting = fastest_elsewhere(found.graph, points, judge, limit)
            if fitting is None:
                continue
            time = judge.with_ops_of(fitting[1]).time(fitting[0].schedule)
            if best is None or time < best[0]:
                best = time, Pick(found, fitting[0], limit)
        return best

    def _searched(self, step: TracedStep, context: PlanContext) -> Plan:
        """A plan that is searched for at these sizes; what is found on the way is known from then on."""
        if self.given is not None:
            logger.info("no schedule of the given plan runs at %s", context.origin.inputs)
        step, timings = costed(step, context)
        self.costed = step
        reuse = bool(len(context.store))
        frontier = step_frontier(step, timings, context, reuse=reuse, bounded=True)
        assert isinstance(frontier, StepFrontier), "shared schedules run op by op"
        context.progress("improving", 0, 1)
        try:
            plan, point = choose_with_point(frontier, context.settings, context.origin, on_infeasible="error")
        except InfeasibleLimitError:
            return make_plan(step, timings, context)
        frontier = replace(frontier, pool=frontier.pool.with_points([point]), searches=())
        self.known.append(frontier)
        assert plan.memory_limit is not None
        self._picked[plan.fingerprint] = Pick(frontier, point, plan.memory_limit)
        return plan


def _at_rest(picked: Pick, judge: Judge, limit: int) -> Pick:
    """A pick without its moves, if it keeps the limit at some sizes even so."""
    point = picked.point
    if not point.schedule.moves:
        return picked
    bare = replace(point.schedule, moves=())
    there = judge.with_ops_of(run_alike(picked.found.graph_of(point), judge.graph))
    return replace(picked, point=replace(point, schedule=bare)) if there.needs(bare) <= limit else picked


def _frontier_there(
    found: StepFrontier, judge: Judge, plain: SchedulePoint, points: list[SchedulePoint]
) -> StepFrontier:
    """A frontier of some sizes that has known schedules alone: some of ``found``, and its least."""
    moved = []
    for point in (*points, found.least_composed):
        made = run_alike(found.graph_of(point), judge.graph)
        figures = judge.with_ops_of(made)(point.schedule, point.decisions)
        parted = frozenset(op.id for op in made.ops if op.variant)
        moved.append(replace(figures, parted=parted, chain=point.chain))
    pool = judge.pool(moved[:-1], moved)
    return StepFrontier(judge, found.chains, pool, plain, {}, reused_options=True, like=found)
