"""Which rows a table has: one for each sub-chain that can come up, equal ones shared."""

from __future__ import annotations

from hybridremat.sequence.endings import NOTHING, Ending, FarReaders
from hybridremat.sequence.moves import Moves
from hybridremat.sequence.problem import ChainProblem

SubChain = tuple[int, int, Ending]
"""Blocks s…t and the far values whose life ends there."""


def row_numbers(problem: ChainProblem) -> dict[SubChain, int]:
    """A row for each sub-chain that can come up, shorter ones first; equal ones share it."""
    keys = _row_keys(problem)
    moves = Moves(problem, unit=1)
    states = _states(moves, len(problem))
    interned: dict[object, int] = {}
    return {
        (s, t, ending): interned.setdefault((keys[s][t], moves.far.signature(s, t, ending)), len(interned))
        for s in reversed(range(len(problem)))
        for t in range(s, len(problem))
        for ending in sorted(states[s, t])
    }


def _states(moves: Moves, length: int) -> dict[tuple[int, int], set[Ending]]:
    """The sets of far values that can end in each (s,t), from the whole chain inwards."""
    states: dict[tuple[int, int], set[Ending]] = {
        (s, t): set() if moves.far.any else {NOTHING} for s in range(length) for t in range(s, length)
    }
    if not moves.far.any:
        return states
    states[0, length - 1].add(NOTHING)
    for s in range(length):
        for t in reversed(range(s + 1, length)):
            for ending in states[s, t]:
                states[s + 1, t] |= moves.rests(s, t, ending)
                ends = moves.split_ends(s, t, ending)
                for j, later, earlier in zip(range(s + 1, t + 1), *ends, strict=True):
                    states[j, t].add(later)
                    states[s, j - 1].add(earlier)
    return states


def _row_keys(problem: ChainProblem) -> list[list[int]]:
    """A number for each (s,t) such that equal numbers have equal rows."""
    length = len(problem)
    interned: dict[object, int] = {}
    classes: dict[object, int] = {}
    far = FarReaders(problem)
    block_class = [
        classes.setdefault((block, problem.gradient_bytes[i + 1], far.pattern(i)), len(classes))
        for i, block in enumerate(problem.blocks)
    ]
    keys = [[-1] * length for _ in range(length)]
    for s in reversed(range(length)):
        boundary, plain = problem.boundary_bytes[s], problem.plain_peak[s]
        for t in range(s, length):
            rest = keys[s + 1][t] if t > s else -1
            # the first forward (t = L−1) has terms of its own, by position
            place = s if t == length - 1 else -1
            key = (block_class[s], rest, place, boundary[s + 1 : t + 1], plain[s:t])
            keys[s][t] = interned.setdefault(key, len(interned))
    return keys
