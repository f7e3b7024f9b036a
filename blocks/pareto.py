"""The Pareto set of one block: all nondominated ways to run it.

Blocks with few enough values are answered from sweeps of their lattice (:mod:`hybridremat.blocks.surface`),
the others by CP-SAT (:mod:`hybridremat.blocks.epsilon_constraint`). Options of one block serve another with
the same ops and other sizes (another input shape): what an option does does not depend on sizes, and its
figures are counted anew by the simulator, so they are exact; only a better option may be missing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import inf

import numpy as np

from hybridremat.blocks.lattice import Fusing, Lattice
from hybridremat.blocks.peak_limits import explore_peak_limits
from hybridremat.blocks.scale import scale_block
from hybridremat.blocks.scratch import Scratch
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.surface import Surface
from hybridremat.blocks.types import BlockProblem, BlockSolver, Effort, Option, OptionSet
from hybridremat.errors import GraphSizeError

__all__ = ["DEFAULT_EFFORT", "Effort", "enumerate_options", "nondominated"]

DEFAULT_EFFORT = Effort()


def enumerate_options(
    problem: BlockProblem,
    effort: Effort = DEFAULT_EFFORT,
    solver: BlockSolver = "auto",
    scratch: Scratch | None = None,
) -> OptionSet:
    """Options of ``problem`` that no other option beats in saved bytes, both peaks and time.

    ``scratch`` is memory to work in, for several blocks one after the other.

    Returns
    -------
    OptionSet
        ``options`` by time, then saved bytes; ``solo`` by time, empty if the block cannot run again.

    Raises
    ------
    ValueError
        If the block cannot run at all.
    GraphSizeError
        If it is too large for the exact program, and that was asked for.
    """
    lattice = None if solver == "cp-sat" else fitting_lattice(problem, effort, solver)
    if lattice is not None:
        return swept_options(lattice, effort, scratch or Scratch())
    if solver == "exact":
        raise GraphSizeError(
            f'block_solver="exact": a block of {len(problem.ops)} ops is too large for it, or has an op that '
            'may run in either phase and only once; block_solver="auto" gives such blocks to CP-SAT'
        )
    return solved_options(problem, effort)


def _that_run(problem: BlockProblem, found: OptionSet) -> OptionSet:
    if all(problem.rerun_only(option) for option in found.options):
        raise ValueError(f"no option found for a block of {len(problem.ops)} ops")
    return found


def solved_options(problem: BlockProblem, effort: Effort, seconds: float = inf) -> OptionSet:
    """Options of ``problem`` by CP-SAT, in about so many seconds of a nominal core for each family.

    Raises
    ------
    ValueError
        If the block cannot run at all.
    """
    from hybridremat.blocks.epsilon_constraint import explore_rectangles  # ortools: a third of a second

    ordinary, solo = (
        explore_rectangles(problem, effort, solo=solo, seconds=seconds) for solo in (False, True)
    )
    found = OptionSet(
        options=nondominated(ordinary.options),
        solo=nondominated(solo.options),
        solves=ordinary.solves + solo.solves,
        unproved=ordinary.unproved + solo.unproved,
    )
    return _that_run(problem, found)


def is_solved_exactly(
    problem: BlockProblem, effort: Effort = DEFAULT_EFFORT, solver: BlockSolver = "auto"
) -> bool:
    """Whether the exact program solves a block."""
    return solver != "cp-sat" and fitting_lattice(problem, effort, solver) is not None


def exact_work(problem: BlockProblem, solver: BlockSolver = "auto") -> float:
    """Array entries of one sweep of the exact program; infinite where CP-SAT solves a block."""
    if solver == "cp-sat":
        return inf
    lattice = fitting_lattice(problem, DEFAULT_EFFORT, solver)
    return inf if lattice is None else lattice.work


def fitting_lattice(problem: BlockProblem, effort: Effort, solver: BlockSolver) -> Lattice | None:
    """The finest lattice that is small enough for the solver; None if none is."""
    lattice = Lattice(problem, scale_block(problem))
    if lattice.work > effort.fused_above:
        lattice = Lattice(problem, lattice.scale, Fusing.EQUAL)
    for fusing in (Fusing.OPTIONAL, Fusing.COARSE):
        if lattice.exact and not _fits(lattice, effort, solver):
            lattice = Lattice(problem, lattice.scale, fusing)
    return lattice if _fits(lattice, effort, solver) else None


def _fits(lattice: Lattice, effort: Effort, solver: BlockSolver) -> bool:
    most = effort.exact_above if solver == "exact" else effort.solved_above
    values = effort.exact_values if solver == "exact" else effort.most_values
    return lattice.exact and lattice.work <= most and len(lattice.values) <= values


def peak_limits_for(lattice: Lattice, effort: Effort) -> int:
    """For how many peak limits a lattice is swept."""
    return max(effort.least_limits, min(effort.limits, effort.entries // lattice.work))


def swept_options(lattice: Lattice, effort: Effort, scratch: Scratch, most: int | None = None) -> OptionSet:
    """All options from the lattice, for as many peak limits as the effort allows, and at most ``most``.

    Raises
    ------
    ValueError
        If the block cannot run at all.
    """
    forward_time = sum(op.time for op in lattice.problem.ops)
    tick = lattice.scale.tick
    surface = Surface(lattice, scratch, tolerance=int(effort.tolerance * forward_time / tick))
    limits = peak_limits_for(lattice, effort)
    explore_peak_limits(
        surface,
        limits=limits if most is None else min(limits, most),
        resolution=effort.limit_resolution,
        much=forward_time // (4 * tick) + 1,
    )
    options = nondominated(surface.options, lattice.problem)
    return _that_run(
        lattice.problem, OptionSet(options, nondominated(surface.solo), solves=surface.sweeps)
    )


def nondominated(options: Sequence[Option], problem: BlockProblem | None = None) -> tuple[Option, ...]:
    """Options not matched or beaten in all four figures by another, by time, then saved bytes.

    An option that leaves skip values unread is beaten only by one that leaves them unread, too, and one that
    serves the first run of ``problem`` only by another such.
    """
    ordered = sorted(
        options,
        key=lambda o: (
            *(*_figures(o), -len(o.idle), problem is not None and problem.rerun_only(o)),
            *(o.saved, o.optional_forward, o.recompute),
        ),
    )
    if not ordered:
        return ()
    unread = sorted(frozenset[int]().union(*(o.idle for o in ordered)))
    rerun_only = [problem is not None and problem.rerun_only(o) for o in ordered]
    table = np.array(
        [
            (*_figures(o), *(d not in o.idle for d in unread), only)
            for o, only in zip(ordered, rerun_only, strict=True)
        ]
    )
    kept: list[int] = []
    for place, figures in enumerate(table):
        if not (table[kept] <= figures).all(axis=1).any():
            kept.append(place)
    return tuple(ordered[place] for place in kept)


def _figures(option: Option) -> tuple[int, int, int, int]:
    return option.time, option.saved_bytes, option.backward_peak, option.forward_peak


def block_structure(problem: BlockProblem) -> Hashable:
    """What two blocks must share for the options of one to be options of the other."""
    return (
        tuple((op.reads, op.writes, op.optional, op.recomputable) for op in problem.ops),
        tuple(step.reads for step in problem.steps),
        problem.outputs,
        problem.held_forward,
        problem.never_saved,
    )


def reuse_options(problem: BlockProblem, known: OptionSet) -> OptionSet:
    """The options of a block of equal :func:`block_structure`, with the figures they have in this one."""
    return OptionSet(
        options=nondominated(_simulated(problem, known.options, solo=False), problem),
        solo=nondominated(_simulated(problem, known.solo, solo=True)),
    )


def _simulated(problem: BlockProblem, options: Iterable[Option], *, solo: bool) -> list[Option]:
    return [
        simulate_option(problem.for_rerun, option.saved, option.optional_forward, option.recompute, solo=solo)
        for option in options
    ]
