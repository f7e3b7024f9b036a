"""Other ways to run the same chain, for comparison with the frontier."""

from __future__ import annotations

from collections.abc import Sequence

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption
from hybridremat.sequence.flatten import Flattener
from hybridremat.sequence.frontier import SchedulePoint, schedule_point


def per_block_checkpoint(
    chain: Chain, bindings: Sequence[BlockBinding], option_sets: Sequence[OptionSet]
) -> SchedulePoint:
    """Every block keeps only its input and runs its forward again, once, before its backward.

    This is what ``torch.utils.checkpoint`` around each block does (Chen et al., 2016), except that
    the re-run does not remake the block's output. The last block, whose backward follows its forward,
    saves what it needs.

    Raises
    ------
    ValueError
        If a block has no option.
    """
    last = len(chain.blocks) - 1
    if any(not options.options for options in option_sets):
        raise ValueError("per-block checkpointing needs an option for every block")
    steps: list[Decision] = [Forward(i) for i in range(last)]
    steps += _fastest(option_sets[last], last)
    for i in reversed(range(last)):
        steps += _fastest(option_sets[i], i)
    flatten = Flattener(chain, bindings, option_sets)
    return schedule_point(chain.graph, flatten(steps), tuple(steps))


def _fastest(options: OptionSet, block: int) -> list[Decision]:
    """Run the whole block with the ordinary option that recomputes least."""
    number = min(range(len(options.options)), key=lambda o: (options.options[o].time, o))
    return [ForwardOption(block, number), Backward(block, number)]
