"""What one block does whatever is decided, and what its options read of far values."""

from __future__ import annotations

from hybridremat.blocks.types import BlockBinding, Option
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.graph.segmentation.skip_values import FarValue


def runs_once(chain: Chain, op: int) -> bool:
    """Whether a forward op makes nothing that a recomputation could need (mutations included)."""
    return all(value in chain.always for value in chain.graph.ops[op].writes)


class BlockReads:
    """What the options of one block read of far values, by rank among those it makes and those that enter."""

    def __init__(self, chain: Chain, far: tuple[FarValue, ...], binding: BlockBinding, index: int) -> None:
        self._ops, self._binding = chain.graph.ops, binding
        self._made = [v.value for v in far if v.producer == index]
        self._entering = [v.value for v in far if index in v.readers]
        self._in_steps = {v for ops in binding.steps for op in ops for v in self._ops[op].reads}
        block = chain.blocks[index]
        self.forward_time = sum(self._ops[op].time for op in block.forward if not runs_once(chain, op))

    def idle(self, option: Option) -> frozenset[int]:
        """Far values made here that stay as the option's forward left them, unread."""
        left = {self._binding.values[d] for d in option.idle}
        return frozenset(rank for rank, value in enumerate(self._made) if value in left)

    def late(self, option: Option) -> bool:
        """Whether the option saves what the backward must not read as the first forward left it."""
        return self._binding.problem.is_late(option)

    def touched(self, option: Option) -> frozenset[int]:
        """Far values entering here that the option's backward reads."""
        again = {self._binding.ops[c] for cs in option.recompute for c in cs}
        read = self._in_steps.union(*(self._ops[op].reads for op in again)) if self._entering else ()
        return frozenset(rank for rank, value in enumerate(self._entering) if value in read)
