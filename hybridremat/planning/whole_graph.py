"""The frontier by a strategy over the whole graph: for the limit asked for, or for a row of limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hybridremat.blocks.types import OptionSet
from hybridremat.errors import PolicyError
from hybridremat.graph.joint import JointGraph, ops_by_parts, plain_schedule
from hybridremat.planning.chain_plan import ChainPlan
from hybridremat.planning.progress import Progress, Stopwatch
from hybridremat.planning.stages import BoundChain, plain_point, segment_graph
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.block_summary import option_of_schedule
from hybridremat.plans.records import PinRecord
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import Pool
from hybridremat.sequence.strategies import WholeGraph, WholeGraphSearch

SHARES: Final = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Limits of a frontier, as shares of the plain step's memory."""


def whole_graph_frontier(
    judge: Judge,
    strategy: WholeGraph,
    *,
    pins: tuple[PinRecord, ...],
    timed: Stopwatch,
    limit: int | None,
    progress: Progress,
) -> StepFrontier:
    """What the strategy finds under a limit in bytes; without one, under several, and more when asked.

    The blocks of the largest size show what a schedule does; each has the option that recomputes nothing.

    Raises
    ------
    GraphSizeError
        If the graph is too large for the strategy.
    PolicyError
        If no schedule that was found obeys the pins.
    """
    plain = plain_point(judge.graph)
    judge = judge.with_ops_of(ops_by_parts(judge.graph, ()))
    with timed("segment"):
        chains = segment_graph(Judge(judge.graph, judge.pins), progress)
        bound = min(chains, key=lambda each: len(each.bindings))
    search = WholeGraphSearch(strategy, judge)

    limits = [int(share * plain.peak) for share in SHARES] if limit is None else [limit]
    total = len(limits) + 1
    with timed("solve"):
        progress("solving", 0, total)
        found = [*search.least()]
        for done, each in enumerate(limits, 1):
            progress("solving", done, total)
            found += search.under(each)
    found = [replace(each, least_time=None) for each in found]  # what is proved is for one limit
    if not found:
        raise PolicyError("policy: no schedule of this step was found that does as it says; pin less")
    return StepFrontier(
        judge,
        (_as_plain(bound, judge.graph),),
        Pool.of(found),
        plain,
        timed.timings,
        pins=pins,
        searches=(search,),
        least_searched=True,
    )


def _as_plain(bound: BoundChain, graph: JointGraph) -> ChainPlan:
    """The chain with one option a block: what the plain step does."""
    schedule = plain_schedule(graph)
    behind = schedule.steps[schedule.num_forward :]
    crossing = {value for op in behind for value in graph.ops[op].reads}
    options = (option_of_schedule(binding, schedule, crossing) for binding in bound.bindings)
    sets = tuple(OptionSet((option,) if option is not None else (), ()) for option in options)
    return ChainPlan(bound.chain, bound.bindings, sets)
