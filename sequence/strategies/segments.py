"""Checkpointing by segments: only the inputs of segments are saved, and each is run again, once, whole.

``sqrt``: about as many segments as blocks in each, √L of L blocks. Chen, Xu, Zhang and Guestrin, "Training
Deep Nets with Sublinear Memory Cost" (2016): O(√L) memory for one more forward, if all blocks are equal.

``every-block``: each block is a segment, as people do by hand with ``torch.utils.checkpoint`` around each
layer. The least memory of this kind where outputs of blocks are small beside what they compute.

The last segment, whose backward follows its forward, saves what it needs. A block's forward that is run again
does not make its output anew where nobody reads that. Neither is optimal for blocks that differ, or under a
limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isqrt
from typing import Final

from hybridremat.sequence.chain_problem import ChainProblem
from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption
from hybridremat.sequence.strategies.strategy import Decided, Strategy, fastest_option


def by_segments(starts: Sequence[int], length: int) -> list[Decision]:
    """Decisions about ``length`` blocks of one option each, in segments that start at these."""
    *first, last = (range(start, end) for start, end in pairwise([*starts, length]))
    decisions: list[Decision] = [Forward(block) for segment in first for block in segment]
    for segment in (last, *reversed(first)):
        decisions += [ForwardOption(block, 0) for block in segment]
        decisions += [Backward(block, 0) for block in reversed(segment)]
    return decisions


def of_segments(starts: Callable[[ChainProblem], Sequence[int]]) -> Decided:
    """The one list of decisions with segments that start at what is returned for a chain."""
    return lambda problem: [by_segments(starts(problem), len(problem))]


def square_root(problem: ChainProblem) -> list[int]:
    """The starts of √L segments, rounded up, as even as they go."""
    length = len(problem)
    root = isqrt(length)
    count = root if root * root == length else root + 1
    return [length * number // count for number in range(count)]


every_block: Final = of_segments(lambda problem: range(len(problem)))
"""The one list of decisions in which each block is a segment."""

SQRT: Final = Strategy("sqrt", fastest_option, of_segments(square_root))
EVERY_BLOCK: Final = Strategy("every-block", fastest_option, every_block)
