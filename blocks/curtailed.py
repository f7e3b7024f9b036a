"""Options of blocks for which less work is allowed than the best of them would take.

Work is counted in seconds of a nominal core: entries of a sweep, and the size of a model for CP-SAT. What is
allowed for all blocks is shared so that small ones are solved as ever and the largest have equal shares.
A block that is to cost less has fewer peak limits, a coarser lattice in which more ops run together, and
where that is still too much a few solves by CP-SAT, or only what :mod:`~hybridremat.blocks.quick_options`
finds in no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from hybridremat.blocks import pareto
from hybridremat.blocks.lattice import Fusing, Lattice
from hybridremat.blocks.pareto import (
    DEFAULT_EFFORT,
    fitting_lattice,
    nondominated,
    peak_limits_for,
    solved_options,
    swept_options,
)
from hybridremat.blocks.quick_options import quick_options
from hybridremat.blocks.scale import scale_block
from hybridremat.blocks.scratch import Scratch
from hybridremat.blocks.types import LOADING, BlockProblem, BlockSolver, Effort, OptionSet

ENTRIES_A_SECOND: Final = 200_000_000
"""Of sweeps."""

SOLVES: Final = 40
"""Solves by CP-SAT for one family of a block, about."""

CHAIN_OF_PAIR: Final = 3e-4
"""Seconds that the tables of a chain take for each pair of its blocks."""

TYPICAL_LIMITS: Final = 64
"""Peak limits that small blocks are swept for: between most of them the trade-offs do not change."""

FEWEST_LIMITS: Final = 8
"""Peak limits below which a coarser lattice finds better options."""

FEWEST_SOLVES: Final = 16
"""Solves below which CP-SAT finds nothing that quick options do not."""


def seconds_of(problem: BlockProblem, effort: Effort = DEFAULT_EFFORT) -> float:
    """About what the options of a block take, without a bound."""
    lattice = fitting_lattice(problem, effort, "auto")
    if lattice is not None:
        return min(TYPICAL_LIMITS, peak_limits_for(lattice, effort)) * lattice.work / ENTRIES_A_SECOND
    return 2 * (effort.family_time + SOLVES * _loading(problem))


def shares(
    chains: Sequence[Sequence[BlockProblem]], seconds: float
) -> tuple[tuple[int, ...], Mapping[BlockProblem, float]]:
    """How to spend what is allowed for the blocks of some chains of one graph.

    Returns
    -------
    tuple
        The chains to solve, by number: those of least work, up to one whose blocks are not solved as well as
        they could be. And what each of its large blocks may take: an equal part of what is left.
    """
    costs = {problem: seconds_of(problem) for chain in chains for problem in chain}
    solved, taken = set[BlockProblem](), list[int]()

    def work(number: int) -> float:
        return CHAIN_OF_PAIR * len(chains[number]) ** 2 + sum(costs[each] for each in set(chains[number]))

    for number in sorted(range(len(chains)), key=work):
        if taken and CHAIN_OF_PAIR * len(chains[number]) ** 2 > seconds:
            break
        taken.append(number)
        seconds = max(0.0, seconds - CHAIN_OF_PAIR * len(chains[number]) ** 2)
        new = sorted(set(chains[number]) - solved, key=lambda each: costs[each])
        waiting = [*new]
        while waiting and costs[waiting[0]] <= seconds / len(waiting):
            seconds -= costs[waiting.pop(0)]
        if waiting:
            return tuple(sorted(taken)), {problem: seconds / len(waiting) for problem in waiting}
        solved.update(new)
    return tuple(sorted(taken)), {}


def most_work(seconds: float) -> float:
    """Array entries of one sweep in so much time, where there are as few sweeps as can be."""
    return seconds * ENTRIES_A_SECOND / FEWEST_LIMITS


def options_within(
    problem: BlockProblem, seconds: float, solver: BlockSolver = "auto", scratch: Scratch | None = None
) -> OptionSet:
    """All options of a block, or with a bound those that are found in so many seconds.

    Raises
    ------
    ValueError
        If the block cannot run at all.
    GraphSizeError
        If it is too large for the exact program, and that was asked for (without a bound).
    """
    if seconds == inf:
        return pareto.enumerate_options(problem, solver=solver, scratch=scratch)
    return curtailed_options(problem, seconds, scratch)


def curtailed_options(
    problem: BlockProblem,
    seconds: float,
    scratch: Scratch | None = None,
    effort: Effort = DEFAULT_EFFORT,
) -> OptionSet:
    """Options of a block that are found in so much time; all of them are exact.

    Raises
    ------
    ValueError
        If the block cannot run at all.
    """
    lattice = _affordable(problem, seconds, effort)
    if lattice is not None:
        most = int(seconds * ENTRIES_A_SECOND / lattice.work)
        return swept_options(lattice, effort, scratch or Scratch(), most)
    quick = quick_options(problem)
    if quick is not None and 2 * FEWEST_SOLVES * _loading(problem) > seconds:
        return quick
    found = solved_options(problem, effort, seconds / 2)
    if quick is None:
        return found
    return OptionSet(
        nondominated((*found.options, *quick.options), problem),
        nondominated((*found.solo, *quick.solo)),
        found.solves + quick.solves,
        found.unproved,
    )


def _affordable(problem: BlockProblem, seconds: float, effort: Effort) -> Lattice | None:
    """The finest lattice that can be swept for some peak limits in the time."""
    scale = scale_block(problem)
    for fusing in Fusing:
        lattice = Lattice(problem, scale, fusing)
        if not lattice.exact:
            return None
        fits = lattice.work <= effort.solved_above and len(lattice.values) <= effort.most_values
        if fits and FEWEST_LIMITS * lattice.work <= seconds * ENTRIES_A_SECOND:
            return lattice
    return None


def _loading(problem: BlockProblem) -> float:
    """Seconds of one solve by CP-SAT before it searches."""
    return LOADING * len(problem.ops) * len(problem.steps)
