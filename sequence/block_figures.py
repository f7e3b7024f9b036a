"""Of one block of a chain: the peak of its plain forward, and what its options read of skip values."""

from __future__ import annotations

from hybridremat.blocks.types import BlockBinding, Option
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.graph.segmentation.skip_values import SkipValue


def value_bytes(chain: Chain, values: frozenset[int] | set[int]) -> int:
    """Bytes of a set of values; graph inputs and tangents are charged elsewhere."""
    return sum(chain.graph.values[v].bytes for v in values if chain.graph.values[v].producer is not None)


def plain_peaks(chain: Chain) -> tuple[tuple[int, ...], ...]:
    """pn[s][k]; it depends on s only through the held part of the input, so most entries repeat."""
    known: dict[tuple[int, frozenset[int]], int] = {}

    def peak(s: int, k: int) -> int:
        extra = chain.boundary[k] - chain.boundary[s] - chain.always if k > s else frozenset()
        key = (k, extra)
        if key not in known:
            known[key] = _plain_peak(chain, k, extra)
        return known[key]

    count = len(chain.blocks)
    return tuple(tuple(peak(s, k) if k >= s else 0 for k in range(count)) for s in range(count))


def _plain_peak(chain: Chain, k: int, extra: frozenset[int]) -> int:
    """Peak of one plain forward of block k, ``extra`` being the charged part of its input."""
    graph, block = chain.graph, chain.blocks[k]
    stay = chain.boundary[k + 1] | graph.released_outputs
    own = extra | {v for op in block.forward for v in graph.ops[op].writes} - chain.always
    last: dict[int, int] = {}
    for position, op in enumerate(block.forward):
        for value in (*graph.ops[op].reads, *graph.ops[op].writes):
            if value in own:
                last[value] = position
    dying: list[list[int]] = [[] for _ in block.forward]
    for value, position in last.items():
        if value not in stay:
            dying[position].append(value)
    live = peak = value_bytes(chain, extra)
    for op, dead in zip(block.forward, dying, strict=True):
        live += sum(graph.values[v].bytes for v in graph.ops[op].writes if v in own)
        peak = max(peak, live + graph.ops[op].temp)
        live -= sum(graph.values[v].bytes for v in dead)
    return peak


def never_rerun(chain: Chain, op: int) -> bool:
    """Whether a forward op makes nothing that a recomputation could need (mutations included)."""
    return all(value in chain.always for value in chain.graph.ops[op].writes)


class SkipReads:
    """What the options of one block read of skip values, by rank among those it makes or that enter."""

    def __init__(self, chain: Chain, skips: tuple[SkipValue, ...], binding: BlockBinding, index: int) -> None:
        self._ops, self._binding = chain.graph.ops, binding
        self._made = [v.value for v in skips if v.producer == index]
        self._entering = [v.value for v in skips if index in v.readers]
        self._in_steps = {v for ops in binding.steps for op in ops for v in self._ops[op].reads}
        block = chain.blocks[index]
        self.forward_time = sum(self._ops[op].time for op in block.forward if not never_rerun(chain, op))

    def unread(self, option: Option) -> frozenset[int]:
        """Skip values made here that stay as the option's forward left them, unread."""
        left = {self._binding.values[d] for d in option.idle}
        return frozenset(rank for rank, value in enumerate(self._made) if value in left)

    def rerun_only(self, option: Option) -> bool:
        """Whether the option saves what the backward must not read as the first forward left it."""
        return self._binding.problem.rerun_only(option)

    def read(self, option: Option) -> frozenset[int]:
        """Skip values entering here that the option's backward reads."""
        again = {self._binding.ops[c] for cs in option.recompute for c in cs}
        read = self._in_steps.union(*(self._ops[op].reads for op in again)) if self._entering else ()
        return frozenset(rank for rank, value in enumerate(self._entering) if value in read)
