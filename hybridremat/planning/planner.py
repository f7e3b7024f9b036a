"""From a joint graph with costs to the frontier of its schedules: segment, solve, compose.

Each block size gives one chain; the distinct blocks of all chains are solved together, so that a block
that two chains share is solved once; the frontiers of the chains are merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from hybridremat.blocks.problem import bind_block
from hybridremat.errors import PolicyError
from hybridremat.graph.joint import JointGraph, Phase, plain_schedule
from hybridremat.graph.pins import Pins, obeys
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.graph.segmentation.cuts import block_sizes
from hybridremat.graph.segmentation.segment import segment
from hybridremat.graph.segmentation.validate import validate_chain
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.step_frontier import Candidate, ChainPlan, StepFrontier
from hybridremat.plans.policy import Pinned
from hybridremat.sequence.frontier import SchedulePoint, frontier, merge_frontiers, schedule_point
from hybridremat.sequence.repair import PinRepair

Progress = Callable[[str, int, int], None]

NOTHING_PINNED = Pinned()


def plan_graph(
    graph: JointGraph,
    *,
    cache: OptionCache,
    workers: int | None = None,
    progress: Progress | None = None,
    reuse: bool = False,
    pinned: Pinned = NOTHING_PINNED,
) -> StepFrontier:
    """Segment, solve and compose: the whole frontier of a joint graph with costs.

    Parameters
    ----------
    workers
        Processes that solve blocks; None for one a core. The result is the same for any number.
    progress
        Called with (stage, done, total).
    reuse
        Whether options of blocks that differ in sizes alone will do (:mod:`hybridremat.blocks.pareto`).
    pinned
        What a policy pins in this graph.

    Raises
    ------
    PolicyError
        If no schedule that was found obeys the pins.
    """
    report = progress or (lambda *_: None)
    plain = plain_point(graph)
    if not any(op.phase is Phase.BACKWARD for op in graph.ops):
        only = schedule_point(graph, PinRepair(graph, pinned.pins)(plain.schedule))
        return StepFrontier(graph, (), (Candidate(only, None),), plain, {}, pins=pinned.records)
    times = [time.perf_counter()]
    chains = _chains(graph, pinned.pins, report)
    bindings = [tuple(bind_block(chain, i) for i in range(len(chain.blocks))) for chain in chains]
    times.append(time.perf_counter())
    problems = [binding.problem for group in bindings for binding in group]
    reused = cache.reused(problems) if reuse else {}
    options = reused | cache.solve(
        [problem for problem in problems if problem not in reused],
        workers,
        lambda done, total: report("solving blocks", done, total),
    )
    times.append(time.perf_counter())
    plans = tuple(
        ChainPlan(chain, group, tuple(options[binding.problem] for binding in group))
        for chain, group in zip(chains, bindings, strict=True)
    )
    candidates = _candidates(plans, pinned.pins, report)
    times.append(time.perf_counter())
    spent = (end - start for start, end in pairwise(times))
    timings = dict(zip(("segment", "solve blocks", "compose"), spent, strict=True))
    return StepFrontier(graph, plans, candidates, plain, timings, bool(reused), pinned.records)


def _chains(graph: JointGraph, pins: Pins, report: Progress) -> list[Chain]:
    """The distinct chains that the block sizes give."""
    chains: list[Chain] = []
    sizes = block_sizes(graph, pins)
    for size in sizes:
        report("segmenting", len(chains), len(sizes))
        chain = segment(graph, max_ops=size, pins=pins)
        validate_chain(chain)
        if chain not in chains:
            chains.append(chain)
    return chains


def _candidates(plans: Sequence[ChainPlan], pins: Pins, report: Progress) -> tuple[Candidate, ...]:
    """The points of all chains' frontiers that obey and that none of another beats, each with its chain."""
    fronts = []
    for index, plan in enumerate(plans):
        report("composing", index, len(plans))
        points = frontier(plan.chain, plan.bindings, plan.option_sets, pins)
        fronts.append([p for p in points if obeys(plan.chain.graph, p.schedule, pins)])
    if not any(fronts):
        raise PolicyError("policy: no schedule of this step was found that does as it says; pin less")
    owner = {id(point): index for index, front in enumerate(fronts) for point in front}
    return tuple(Candidate(point, owner[id(point)]) for point in merge_frontiers(*fronts))


def plain_point(graph: JointGraph) -> SchedulePoint:
    """The figures of the plain step."""
    return schedule_point(graph, plain_schedule(graph))
