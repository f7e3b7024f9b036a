"""Skip values, which may die before the blocks that hold them are through: long skips, residual branches.

A value that enters a block is held until that block's backward is done. If it only crosses the block, or the
block's backward does not read it, it may be freed sooner. A chain that knows such values gets their bytes
back.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hybridremat.graph.segmentation.chain import Chain

MOST_SKIP_VALUES: Final = 4
"""Skip values at any one boundary, the largest: sets of them are enumerated."""

LEAST_SHARE: Final = 500
"""Bytes of a skip value: at least this part of all forward values that blocks hand on."""


@dataclass(frozen=True)
class SkipValue:
    """A value of ``bytes`` made in block ``producer``, read by the later blocks ``readers`` (ascending)."""

    value: int
    bytes: int
    producer: int
    readers: tuple[int, ...]


def skip_values(chain: Chain) -> tuple[SkipValue, ...]:
    """The skip values of ``chain`` that are worth knowing, by value."""
    crossing = set[int]().union(*chain.boundary) - chain.always
    least = sum(chain.graph.values[v].bytes for v in crossing) // LEAST_SHARE
    found = [skip for skip in _candidates(chain) if skip.bytes >= max(1, least)]
    carried = [0] * len(chain.boundary)
    chosen = []
    for skip in sorted(found, key=lambda s: (-s.bytes, s.value)):
        places = range(skip.producer + 1, skip.readers[-1] + 1)
        if all(carried[place] < MOST_SKIP_VALUES for place in places):
            chosen.append(skip)
            for place in places:
                carried[place] += 1
    return tuple(sorted(chosen, key=lambda s: s.value))


def _candidates(chain: Chain) -> list[SkipValue]:
    """Every value that some block passes on without reading it, or reads in its forward alone."""
    ops = chain.graph.ops
    readers: dict[int, list[int]] = {}
    unread = set()
    for index, block in enumerate(chain.blocks):
        backward = {v for op in block.backward for v in ops[op].reads}
        entering = chain.boundary[index] - chain.always
        for value in backward.union(*(ops[op].reads for op in (*block.forward, *block.optional))) & entering:
            readers.setdefault(value, []).append(index)
            if value not in backward:
                unread.add(value)
    first: dict[int, int] = {}
    for place, boundary in enumerate(chain.boundary):
        first.update(dict.fromkeys(boundary - first.keys(), place))
    found = []
    for value, blocks in readers.items():
        producer = first[value] - 1
        if value in unread or any(b - a > 1 for a, b in pairwise((producer, *blocks))):
            found.append(SkipValue(value, chain.graph.values[value].bytes, producer, tuple(blocks)))
    return found
