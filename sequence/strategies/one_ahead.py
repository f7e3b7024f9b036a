"""Moving by the order of saving and reading alone, as others do: no limit is asked for, and none is kept.

``offload-all``: the plain schedule, and all that may move does. So do torchtune's and TRL's
``OffloadActivations`` (hooks on saved tensors, two streams): a copy starts when a tensor is saved, the
device's own is let go when :data:`STASH` more have been saved, the head of the model keeps its own (here: the
last block).

``offload-inputs``: each block saves its input alone and is run again (as ``every-block``), and the inputs
move, each gone with the next one. So does Unsloth's ``Unsloth_Offloaded_Gradient_Checkpointer``.

What is still on the device when the forward ends is used from there. In the backward all of them copy back
what is read next when it is read; here the copy starts one reader earlier, at least as fast and with a value
more on the device. Neither is optimal for anything, and a link that is too slow makes either of them wait for
every copy. For the plain schedule with as few moves as a limit needs there is ``plain`` with ``offload=``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hybridremat.graph.joint import Move, Schedule
from hybridremat.graph.memory import Waiting
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.moved import unmoved
from hybridremat.sequence.strategies.segments import every_block
from hybridremat.sequence.strategies.strategy import Strategy, fastest_option

STASH: Final = 5
"""Values that are on the device beside their copies, ``max_fwd_stash_size`` of torchtune and TRL."""


def one_ahead(split: int, waiting: Sequence[Waiting], stash: int) -> tuple[Move, ...]:
    """Moves of what waits, in a schedule whose forward has ``split`` executions.

    Each is gone when ``stash`` more have been made and the forward reads it no more, and has room again when
    the reader before its own runs. The last ``stash`` stay.
    """
    readers = sorted({each.first for each in waiting})
    before = dict(zip(readers, (split, *readers), strict=False))
    return tuple(
        Move(each.value, each.birth, max(each.last, later.birth) + 1, before[each.first], each.first)
        for each, later in zip(waiting, waiting[stash:], strict=False)
    )


def all_but_the_last_block(judge: Judge, chain: Chain, schedule: Schedule) -> Schedule:
    """The schedule with all moved that may, but what the last block makes."""
    last = {value for op in chain.blocks[-1].forward for value in chain.graph.ops[op].writes}
    step = unmoved(judge, schedule)
    waiting = [each for each in step.waiting if each.value not in last]
    return replace(schedule, moves=one_ahead(step.split, waiting, STASH))


def block_inputs(judge: Judge, chain: Chain, schedule: Schedule) -> Schedule:
    """The schedule with what blocks hand on moved."""
    inputs = frozenset().union(*chain.boundary[1:-1])
    step = unmoved(judge, schedule)
    waiting = [each for each in step.waiting if each.value in inputs]
    return replace(schedule, moves=one_ahead(step.split, waiting, stash=1))


OFFLOAD_ALL: Final = Strategy("offload-all", fastest_option, lambda _: (), moved=all_but_the_last_block)
OFFLOAD_INPUTS: Final = Strategy("offload-inputs", fastest_option, every_block, moved=block_inputs)
