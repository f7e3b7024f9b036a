"""One block: its problem, the CP-SAT model, the Pareto set of options, and the simulator that judges them.

No torch here: a block is integers, bytes and nanoseconds. OR-Tools loads at the first solve.
"""

from __future__ import annotations

from hybridremat.blocks.problem import bind_block
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import (
    BackwardStep,
    BlockBinding,
    BlockProblem,
    ForwardOp,
    Option,
    OptionSet,
)

__all__ = [
    "BackwardStep",
    "BlockBinding",
    "BlockProblem",
    "ForwardOp",
    "Option",
    "OptionSet",
    "bind_block",
    "enumerate_options",
    "simulate_option",
    "solve_blocks",
]


def __getattr__(name: str) -> object:
    """Load the solver's side on first use: OR-Tools takes half a second to import."""
    if name == "enumerate_options":
        from hybridremat.blocks.pareto import enumerate_options

        return enumerate_options
    if name == "solve_blocks":
        from hybridremat.blocks.solve import solve_blocks

        return solve_blocks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
