"""Options of one block used for another that has the same ops and other sizes (another input shape).

What an option does (which values it saves, what it recomputes and where) does not depend on sizes; its
figures do, and are counted anew by the simulator. So they are exact; only the choice of options was made for
other sizes, and a better one may be missing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from hybridremat.blocks.pareto import nondominated
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BlockProblem, Option, OptionSet


def structure(problem: BlockProblem) -> Hashable:
    """What two blocks must share for the options of one to be options of the other."""
    return (
        tuple((op.reads, op.writes, op.optional, op.recomputable) for op in problem.ops),
        tuple(step.reads for step in problem.steps),
        problem.outputs,
        problem.held_forward,
        problem.never_saved,
    )


def reuse_options(problem: BlockProblem, known: OptionSet) -> OptionSet:
    """The options of a block of the same :func:`structure`, with the figures that they have in this one."""
    return OptionSet(
        options=nondominated(_counted(problem, known.options, solo=False), problem),
        solo=nondominated(_counted(problem, known.solo, solo=True)),
    )


def _counted(problem: BlockProblem, options: Iterable[Option], *, solo: bool) -> list[Option]:
    return [
        simulate_option(problem.again, option.saved, option.optional_forward, option.recompute, solo=solo)
        for option in options
    ]
