"""From a joint graph with costs to its frontier: segment, solve, compose."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from hybridremat.blocks.types import BlockSolver
from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import JointGraph, Phase
from hybridremat.planning.effort import FOR_BLOCKS, TYPICAL_GAP, PlanningEffort
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.progress import Progress, Stopwatch, Timings, no_progress
from hybridremat.planning.stages import compose, forward_frontier, plain_point, segment_graph, solve_options
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.planning.whole_graph import whole_graph_frontier
from hybridremat.plans.policy import Pinned
from hybridremat.sequence.frontier import Ranges
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import NO_OUTSIDE_MEMORY, OutsideMemory
from hybridremat.sequence.strategies import Strategy, WholeGraph
from hybridremat.sequence.strategies.hybrid import HYBRID

SHARES: Final = {"solve": 0.5, "compose": 0.7, "improve": 0.9}
"""Of the time of a budget: when each stage ends with what it has. The rest is for the bound."""


def plan_graph(
    graph: JointGraph,
    *,
    cache: OptionCache,
    workers: int | None = None,
    progress: Progress = no_progress,
    reuse: bool = False,
    pinned: Pinned | None = None,
    timings: Timings | None = None,
    outside: OutsideMemory = NO_OUTSIDE_MEMORY,
    strategy: Strategy | WholeGraph = HYBRID,
    limit: int | None = None,
    ranges: Ranges | None = None,
    solver: BlockSolver = "auto",
    deadline: Deadline = NO_DEADLINE,
    bounded: bool = False,
) -> StepFrontier:
    """The frontier of a joint graph with costs: the whole of it, or what is in some ranges.

    Parameters
    ----------
    workers
        Processes that solve blocks; None for one a core. The result is the same for any number.
    reuse
        Whether to reuse options of blocks that differ in sizes alone (:mod:`hybridremat.blocks.pareto`).
    pinned
        What a policy pins in this graph.
    timings
        Seconds of earlier stages.
    outside
        What is alive around the step: a schedule is left out if another needs no more with it, and no more
        time.
    strategy
        Which schedules are looked at.
    limit
        In bytes: a strategy over the whole graph finds what is the best under this one.
    ranges
        In bytes, where the frontier is asked for; it is thin elsewhere. None: everywhere.
    solver
        What solves the blocks.
    deadline
        When to end with what has been found: each stage has a part of the time (:data:`SHARES`).
    bounded
        Whether searches go only as far as a plan can win back (:class:`PlanningEffort`), once under what is
        won as a rule, and where that leaves blocks aside, again under what the first plan could win.

    Raises
    ------
    PolicyError
        If no schedule that was found obeys the pins.
    GraphSizeError
        If the graph is too large for the strategy, or a block for the solver.
    """
    pinned, timed, plain = pinned or Pinned(), Stopwatch(timings or {}), plain_point(graph)
    effort = PlanningEffort.of(graph, plain.time) if bounded else None
    judge = Judge(graph, pinned.pins, outside)
    if not {Phase.FORWARD, Phase.BACKWARD} <= {op.phase for op in graph.ops}:
        return forward_frontier(judge, pinned.records, timed.timings)
    if isinstance(strategy, WholeGraph):
        return whole_graph_frontier(
            judge, strategy, pins=pinned.records, timed=timed, limit=limit, progress=progress
        )
    with timed("segment"):
        chains = segment_graph(judge, progress)  # segment

    def searched(seconds: float) -> StepFrontier:
        with timed("solve blocks"):
            solved = solve_options(  # solve
                chains,
                cache,
                workers,
                progress,
                reuse=reuse,
                strategy=strategy,
                solver=solver,
                deadline=deadline.share(SHARES["solve"]),
                seconds=seconds * FOR_BLOCKS,
            )
        until = deadline.share(SHARES["compose"])
        with timed("compose"):
            pool = compose(solved.plans, judge, progress, strategy, ranges, until)  # compose
        return StepFrontier(
            judge,
            solved.plans,
            pool.points,
            plain,
            timed.timings,
            solved.reused,
            pinned.records,
            base=pool.base,
            exchanges=strategy.exchanges,
            deadline=deadline.share(SHARES["improve"]),
            progress=progress,
            curtailed=solved.curtailed,
            effort=effort,
        )

    return searched(inf) if effort is None else _as_far_as_it_pays(searched, effort, limit)


def _as_far_as_it_pays(
    searched: Callable[[float], StepFrontier],
    effort: PlanningEffort,
    limit: int | None,
) -> StepFrontier:
    """What is found in what pays as a rule; or, if blocks were left aside, in what the first plan can win."""
    first = effort.seconds(TYPICAL_GAP)
    frontier = searched(first)
    more = effort.seconds(frontier.gap_under(limit))
    if not frontier.curtailed or more <= first:
        return frontier
    found = searched(more), frontier
    return min(found, key=lambda each: each.composed_under(limit) or inf)
