"""From a traced step to the frontier of schedules, and from the frontier to one plan.

Each block size gives one chain; the distinct blocks of all chains are solved together, so that a block
that two chains share is solved once; the frontiers of the chains are merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hybridremat.blocks.problem import bind_block
from hybridremat.blocks.reuse import reuse_options, structure
from hybridremat.blocks.solve import solve_blocks
from hybridremat.blocks.types import BlockBinding, BlockProblem, OptionSet
from hybridremat.demands import NOTHING, Demands, schedule_needs
from hybridremat.errors import InfeasibleLimitError, PolicyError
from hybridremat.graph.chain import Chain
from hybridremat.graph.joint import JointGraph, Phase, plain_schedule
from hybridremat.graph.pins import Pins, obeys
from hybridremat.graph.segment import block_sizes, segment
from hybridremat.graph.validate import validate_chain
from hybridremat.limits import format_bytes
from hybridremat.plan_records import PinRecord
from hybridremat.policy import Pinned
from hybridremat.refusals import too_slow, too_slow_policy
from hybridremat.sequence import Mender, SchedulePoint, frontier, merge_frontiers, schedule_point

Progress = Callable[[str, int, int], None]

NOTHING_PINNED = Pinned()


@dataclass(frozen=True)
class ChainPlan:
    """One segmentation with the options of its blocks."""

    chain: Chain
    bindings: tuple[BlockBinding, ...]
    option_sets: tuple[OptionSet, ...]


@dataclass(frozen=True)
class Candidate:
    """One point of the frontier; ``chain_index`` says whose chain's decisions it holds, if it has any."""

    point: SchedulePoint
    chain_index: int | None


@dataclass(frozen=True)
class Planning:
    """Everything that is known about a step before a limit is chosen.

    Attributes
    ----------
    graph
        The joint graph with costs.
    chains
        One for each block size.
    candidates
        The frontier, by rising peak and falling time; its last point is the plain step or better, or,
        where there are pins, the fastest step that obeys them.
    plain
        The plain step's figures.
    timings
        Seconds by stage.
    reused_options
        Whether some blocks have the options of others that differ in sizes.
    pins
        What the patterns of a policy pin; every candidate obeys them.
    """

    graph: JointGraph
    chains: tuple[ChainPlan, ...]
    candidates: tuple[Candidate, ...]
    plain: SchedulePoint
    timings: dict[str, float] = field(compare=False)
    reused_options: bool = False
    pins: tuple[PinRecord, ...] = ()

    def least(self, demands: Demands) -> Candidate:
        """The point that takes the least memory, the fastest of its kind."""
        return min(self.candidates, key=lambda c: (self.needs(c, demands), c.point.time))

    def overhead(self, point: SchedulePoint) -> float:
        """Extra time as a fraction of the plain step's."""
        return point.time / self.plain.time - 1.0 if self.plain.time else 0.0

    def extra_flops(self, point: SchedulePoint) -> float:
        """Extra flops as a fraction of the plain step's."""
        return point.flops / self.plain.flops - 1.0 if self.plain.flops else 0.0

    @property
    def fastest_overhead(self) -> float:
        """The least overhead there is: 0 or less, except where a policy asks for recomputations."""
        return self.overhead(self.candidates[-1].point)

    def choose(self, limit: int | None, max_overhead: float | None, demands: Demands = NOTHING) -> Candidate:
        """The fastest point under a limit (bytes), or the smallest within an overhead (fraction).

        The limit holds with what the caller demands beside the step (:mod:`hybridremat.demands`).

        Raises
        ------
        InfeasibleLimitError
            If no point satisfies what was asked.
        PolicyError
            If what a policy wants recomputed takes more time than the overhead allows, whatever the limit.
        """
        if max_overhead is not None and self.fastest_overhead > max_overhead + 1e-12:
            raise too_slow_policy(max_overhead, self.fastest_overhead)
        needs = [self.needs(candidate, demands) for candidate in self.candidates]
        fitting = [
            c for c, need in zip(self.candidates, needs, strict=True) if limit is None or need <= limit
        ]
        if not fitting:
            assert limit is not None
            raise self._infeasible(limit, min(needs), demands)
        if max_overhead is None:
            return fitting[-1]
        within = [c for c in fitting if self.overhead(c.point) <= max_overhead + 1e-12]
        if not within:
            assert limit is not None
            fast = [
                n
                for c, n in zip(self.candidates, needs, strict=True)
                if self.overhead(c.point) <= max_overhead
            ]
            raise too_slow(limit, max_overhead, takes=self.overhead(fitting[-1].point), least=min(fast))
        return within[-1] if limit is not None else within[0]

    def needs(self, candidate: Candidate, demands: Demands) -> int:
        """Bytes that the step may take at a point, the caller's demands included."""
        point = candidate.point
        return point.peak if demands.none else schedule_needs(self.graph, point.schedule, demands)

    def _infeasible(self, limit: int, least: int, demands: Demands) -> InfeasibleLimitError:
        share = 100 * least / self.plain.peak
        under = f" under policy= ({', '.join(pin.pattern for pin in self.pins)})" if self.pins else ""
        less = ", pin less" if self.pins else ""
        kept = f", {format_bytes(demands.reserve)} of it kept free by reserve=" if demands.reserve else ""
        if demands.forwards > 1:
            kept += f", for {demands.forwards} forwards at a time"
        return InfeasibleLimitError(
            f"no plan fits memory_limit {format_bytes(limit)} ({limit} bytes{kept}): "
            f"the least feasible limit for this model and input{under} is {format_bytes(least)} "
            f"({least} bytes, {share:.1f} % of the plain step's {format_bytes(self.plain.peak)}). "
            f"Raise the limit to that, make the batch or the input smaller{less}, or pass "
            'on_infeasible="least" to run the plan of least memory.',
            limit=limit,
            least=least,
        )


class OptionCache:
    """Options of block problems solved before, in this process."""

    def __init__(self) -> None:
        self._known: dict[BlockProblem, OptionSet] = {}
        self._alike: dict[Hashable, BlockProblem] = {}

    def solve(
        self, problems: Sequence[BlockProblem], workers: int | None, on_progress: Callable[[int, int], None]
    ) -> dict[BlockProblem, OptionSet]:
        """Options of each problem; only those not known are solved."""
        missing = [problem for problem in dict.fromkeys(problems) if problem not in self._known]
        if missing:
            self._known.update(solve_blocks(missing, workers=workers, on_progress=on_progress))
            self._alike.update((structure(problem), problem) for problem in missing)
        return {problem: self._known[problem] for problem in problems}

    def reused(self, problems: Iterable[BlockProblem]) -> dict[BlockProblem, OptionSet]:
        """Options of those problems that are not known, from others that differ in sizes alone."""
        found = {}
        for problem in dict.fromkeys(problems):
            alike = self._alike.get(structure(problem))
            if problem not in self._known and alike is not None:
                found[problem] = reuse_options(problem, self._known[alike])
        return found


def plan_graph(
    graph: JointGraph,
    *,
    cache: OptionCache,
    workers: int | None = None,
    progress: Progress | None = None,
    reuse: bool = False,
    pinned: Pinned = NOTHING_PINNED,
) -> Planning:
    """Segment, solve and compose: the whole frontier of a joint graph with costs.

    Parameters
    ----------
    workers
        Processes that solve blocks; None for one a core. The result is the same for any number.
    progress
        Called with (stage, done, total).
    reuse
        Whether options of blocks that differ in sizes alone will do (:mod:`hybridremat.blocks.reuse`).
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
        only = schedule_point(graph, Mender(graph, pinned.pins)(plain.schedule))
        return Planning(graph, (), (Candidate(only, None),), plain, {}, pins=pinned.records)
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
    return Planning(graph, plans, candidates, plain, timings, bool(reused), pinned.records)


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
