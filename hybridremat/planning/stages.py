"""The stages between a joint graph with costs and its frontier: segment, solve, compose.

Each block size gives one chain. The distinct blocks of all chains are solved together, each once, and the
frontiers of the chains are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from hybridremat.blocks.curtailed import shares
from hybridremat.blocks.pareto import is_solved_exactly
from hybridremat.blocks.problem import bind_blocks
from hybridremat.blocks.types import BlockBinding, BlockProblem, BlockSolver
from hybridremat.errors import GraphSizeError
from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import JointGraph, as_plain, plain_schedule
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.graph.segmentation.cuts import block_sizes
from hybridremat.graph.segmentation.segment import segment
from hybridremat.graph.segmentation.validate import validate_chain
from hybridremat.planning.chain_plan import ChainPlan
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.progress import Progress, Timings
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.records import PinRecord
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.parts import parts_for_nothing
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.repair import PinRepair
from hybridremat.sequence.strategies import Strategy


@dataclass(frozen=True)
class BoundChain:
    """One segmentation, with the problem of each block."""

    chain: Chain
    bindings: tuple[BlockBinding, ...]


@dataclass(frozen=True)
class SolvedChains:
    """Chains with the options of their blocks.

    ``reused``: some blocks have options of blocks of other sizes. ``curtailed``: with more work there would
    be more options, or more chains.
    """

    plans: tuple[ChainPlan, ...]
    reused: bool
    curtailed: bool


def segment_graph(judge: Judge, progress: Progress) -> tuple[BoundChain, ...]:
    """The distinct chains that the block sizes give.

    Ops that can run by parts are taken to do so and to need no more time; what has to is decided for each
    schedule (:mod:`hybridremat.sequence.parts`). Blocks are solved for their own peaks. If what is saved
    counts again for further forwards, schedules of low peak are not those of least need: then each chain is
    also there with blocks in which no op writes over anything, whose options save less.
    """
    chains: list[Chain] = []
    optimistic = parts_for_nothing(judge.graph)
    sizes = block_sizes(judge.graph, judge.pins)
    for size in sizes:
        progress("segmenting", len(chains), len(sizes))
        chain = segment(optimistic, max_ops=size, pins=judge.pins)
        validate_chain(chain)
        if chain not in chains:
            chains.append(chain)
    bare = replace(optimistic, ops=tuple(replace(op, overwrites=()) for op in optimistic.ops))
    views = (optimistic, bare) if judge.saved_counts and bare != optimistic else (optimistic,)
    return tuple(
        BoundChain(chain, bind_blocks(replace(chain, graph=view))) for view in views for chain in chains
    )


def solve_options(
    chains: Sequence[BoundChain],
    cache: OptionCache,
    workers: int | None,
    progress: Progress,
    *,
    reuse: bool,
    strategy: Strategy,
    solver: BlockSolver = "auto",
    deadline: Deadline = NO_DEADLINE,
    seconds: float = inf,
) -> SolvedChains:
    """The chains with the options of their blocks that the strategy takes.

    In ``seconds`` of a nominal core: chains of more work are left out (:mod:`hybridremat.blocks.curtailed`).
    ``reuse`` allows options of blocks that differ in sizes alone (:mod:`hybridremat.blocks.pareto`). The
    exact ``solver`` leaves chains out whose blocks are too large for it. Blocks that are not solved by the
    ``deadline`` have quick options.

    Raises
    ------
    GraphSizeError
        If the blocks of every chain are.
    """
    chains = _solvable(chains, solver)
    solved: Sequence[int] = range(len(chains))
    share: Mapping[BlockProblem, float] = {}
    if seconds < inf and solver == "auto":
        every = [[binding.problem for binding in bound.bindings] for bound in chains]
        solved, share = shares(every, seconds)
    curtailed = bool(share) or len(solved) < len(chains)
    chains = [chains[number] for number in solved]
    problems = [binding.problem for bound in chains for binding in bound.bindings]
    reused = cache.reused(problems, solver) if reuse else {}
    options = reused | cache.solve(
        [problem for problem in problems if problem not in reused],
        workers,
        lambda done, total: progress("solving blocks", done, total),
        solver,
        deadline,
        share,
    )
    taken = {problem: strategy.restrict(found) for problem, found in options.items()}
    plans = tuple(
        ChainPlan(bound.chain, bound.bindings, tuple(taken[each.problem] for each in bound.bindings))
        for bound in chains
    )
    return SolvedChains(plans, bool(reused), curtailed)


def _solvable(chains: Sequence[BoundChain], solver: BlockSolver) -> Sequence[BoundChain]:
    """The chains that a solver can solve."""
    if solver != "exact":
        return chains
    problems = {binding.problem for bound in chains for binding in bound.bindings}
    small = {problem for problem in problems if is_solved_exactly(problem, solver=solver)}
    found = [bound for bound in chains if all(each.problem in small for each in bound.bindings)]
    if not found:
        raise GraphSizeError(
            f'block_solver="exact": {len(problems - small)} of {len(problems)} distinct blocks are too large '
            'for the exact program, in chains of every block size; block_solver="auto" gives these to CP-SAT'
        )
    return found


def forward_frontier(judge: Judge, pins: tuple[PinRecord, ...], timings: Timings) -> StepFrontier:
    """The frontier of a graph without a backward: nothing to choose."""
    plain = plain_point(judge.graph)
    only = judge(PinRepair(judge.graph, judge.pins)(plain.schedule))
    return StepFrontier(judge, (), Pool.of([only]), plain, timings, pins=pins)


def plain_point(graph: JointGraph) -> SchedulePoint:
    """The figures of the plain step, as PyTorch runs it."""
    return Judge(as_plain(graph))(plain_schedule(graph))


def plain_point_of(judge: Judge) -> SchedulePoint:
    """As :func:`plain_point`, of a graph that a judge has read already."""
    if judge.graph.deliveries:  # a plain step has none
        return plain_point(judge.graph)
    return judge.without_outside(as_plain(judge.graph))(plain_schedule(judge.graph))
