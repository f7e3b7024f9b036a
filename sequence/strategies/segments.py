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

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isqrt
from typing import Final

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption
from hybridremat.sequence.flatten import Flattener
from hybridremat.sequence.frontier import SchedulePoint, schedule_point
from hybridremat.sequence.strategies.strategy import Strategy, fastest_option


def by_segments(length: int, count: int) -> list[Decision]:
    """Decisions about ``length`` blocks of one option each, in ``count`` segments as even as they go."""
    cuts = [length * number // count for number in range(count + 1)]
    *first, last = (range(start, end) for start, end in pairwise(cuts))
    decisions: list[Decision] = [Forward(block) for segment in first for block in segment]
    for segment in (last, *reversed(first)):
        decisions += [ForwardOption(block, 0) for block in segment]
        decisions += [Backward(block, 0) for block in reversed(segment)]
    return decisions


def _sqrt(option_sets: Sequence[OptionSet]) -> Iterable[list[Decision]]:
    length = len(option_sets)
    root = isqrt(length)
    yield by_segments(length, root if root * root == length else root + 1)


def _every_block(option_sets: Sequence[OptionSet]) -> Iterable[list[Decision]]:
    yield by_segments(len(option_sets), len(option_sets))


def checkpointed_blocks(
    chain: Chain, bindings: Sequence[BlockBinding], option_sets: Sequence[OptionSet]
) -> SchedulePoint:
    """The one schedule of ``every-block``, for comparison; any options given."""
    fastest = tuple(map(fastest_option, option_sets))
    decisions = by_segments(len(fastest), len(fastest))
    schedule = Flattener(chain, bindings, fastest)(decisions)
    return schedule_point(chain.graph, schedule, tuple(decisions))


SQRT: Final = Strategy("sqrt", fastest_option, _sqrt)
EVERY_BLOCK: Final = Strategy("every-block", fastest_option, _every_block)
