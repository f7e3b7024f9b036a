"""Places in one block of host memory for all that moves in a step, first fit, the largest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hybridremat.graph.joint import Move

PAGE: Final = 4096
"""Bytes that each place is a multiple of."""


@dataclass(frozen=True)
class Arena:
    """The first byte of each move, and the bytes of the block."""

    offsets: tuple[int, ...]
    size: int


def arena(moves: Sequence[Move], sizes: Sequence[int]) -> Arena:
    """Places of moves of so many bytes: no two that are in host memory at one time share a byte.

    A move is there from the start of its copy out, right after its birth, until its copy back has ended.
    """
    placed: list[tuple[int, int, Move]] = []
    offsets = [0] * len(moves)
    for number in sorted(range(len(moves)), key=lambda each: (-sizes[each], each)):
        move, size = moves[number], -(-sizes[number] // PAGE) * PAGE
        at = 0
        for low, high, other in sorted(placed, key=lambda each: each[:2]):
            if other.ready < move.birth or move.ready < other.birth or high <= at:
                continue
            if at + size <= low:
                break
            at = high
        offsets[number] = at
        placed.append((at, at + size, move))
    return Arena(tuple(offsets), max((high for _, high, _ in placed), default=0))
