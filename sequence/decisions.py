"""What a plan does with each block, in order: the readable result of the chain program.

A sequence of decisions says how the step runs, block by block; :mod:`hybridremat.sequence.flatten`
turns it into single op executions. The plain step, which decides nothing, is the empty sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward of ``block`` and keep only what enters the next block."""

    block: int


@dataclass(frozen=True, slots=True)
class ForwardOption:
    """Run the forward of ``block`` and save what its ordinary option number ``option`` saves."""

    block: int
    option: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of ``block`` with the recomputations of ordinary option number ``option``."""

    block: int
    option: int


@dataclass(frozen=True, slots=True)
class Solo:
    """Run the backward of ``block`` from its input alone, with solo option number ``option``."""

    block: int
    option: int


Decision = Forward | ForwardOption | Backward | Solo


@dataclass(frozen=True, slots=True)
class BlockDecision:
    """One block's part in a sequence of decisions.

    Attributes
    ----------
    option
        Number of the option that its backward uses, among the solo options if ``solo``.
    forward_runs
        How often its whole forward runs; 1 is the run that every step has. What the option itself
        recomputes is not counted.
    """

    block: int
    option: int
    solo: bool
    forward_runs: int


def block_decisions(decisions: Sequence[Decision]) -> tuple[BlockDecision, ...]:
    """The same decisions sorted by block; empty for the plain step."""
    runs: dict[int, int] = {}
    backward: dict[int, Backward | Solo] = {}
    for decision in decisions:
        if isinstance(decision, Forward | ForwardOption):
            runs[decision.block] = runs.get(decision.block, 0) + 1
        else:
            backward[decision.block] = decision
    return tuple(
        BlockDecision(block, last.option, isinstance(last, Solo), runs.get(block, 0))
        for block, last in sorted(backward.items())
    )
