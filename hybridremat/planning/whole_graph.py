"""The frontier by a strategy over the whole graph: for the limit asked for, or for a row of limits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Final

from hybridremat.blocks.types import OptionSet
from hybridremat.errors import PolicyError
from hybridremat.graph.joint import JointGraph, ops_by_parts, plain_schedule
from hybridremat.graph.pins import obeys
from hybridremat.planning.candidates import Candidate, ChainPlan
from hybridremat.planning.progress import Progress, Stopwatch
from hybridremat.planning.stages import BoundChain, plain_point, segment_graph
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.block_summary import option_of_schedule
from hybridremat.plans.outside_memory import OutsideMemory, memory_needs
from hybridremat.plans.policy import Pinned
from hybridremat.sequence.frontier import pareto_frontier, peak_alone
from hybridremat.sequence.strategies import WholeGraph, WholeGraphPoints

SHARES: Final = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Limits of a frontier, as shares of the plain step's memory."""


def whole_graph_frontier(
    graph: JointGraph,
    strategy: WholeGraph,
    *,
    pinned: Pinned,
    timed: Stopwatch,
    outside: OutsideMemory,
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
    whole, plain = ops_by_parts(graph, ()), plain_point(graph)
    with timed("segment"):
        bound = min(segment_graph(whole, pinned.pins, progress), key=lambda each: len(each.bindings))
    needs = peak_alone if outside.none else partial(memory_needs, whole, outside)
    points = WholeGraphPoints(strategy, whole, pinned.pins, needs)

    @cache
    def under(limit: int) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(each, 0) for each in points.under(limit) if obeys(whole, each.schedule, pinned.pins)
        )

    limits = [int(share * plain.peak) for share in SHARES] if limit is None else [limit]
    total = len(limits) + 1
    with timed("solve"):
        progress("solving", 0, total)
        found = [each for each in points.least() if obeys(whole, each.schedule, pinned.pins)]
        for done, each in enumerate(limits, 1):
            progress("solving", done, total)
            found += [candidate.point for candidate in under(each)]
    found = [replace(each, least_time=None) for each in found]  # what is proved is for one limit
    if not found:
        raise PolicyError("policy: no schedule of this step was found that does as it says; pin less")
    return StepFrontier(
        whole,
        (_as_plain(bound, whole),),
        tuple(Candidate(each, 0) for each in pareto_frontier(found)),
        plain,
        timed.timings,
        pins=pinned.records,
        pinned=pinned.pins,
        under=under,
    )


def _as_plain(bound: BoundChain, graph: JointGraph) -> ChainPlan:
    """The chain with one option a block: what the plain step does."""
    schedule = plain_schedule(graph)
    behind = schedule.steps[schedule.num_forward :]
    crossing = {value for op in behind for value in graph.ops[op].reads}
    options = (option_of_schedule(binding, schedule, crossing) for binding in bound.bindings)
    sets = tuple(OptionSet((option,) if option is not None else (), ()) for option in options)
    return ChainPlan(bound.chain, bound.bindings, sets)
