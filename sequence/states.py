"""The states (s, t, dying skip values) of the table: a row for each that can come up, equal ones shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from hybridremat.sequence.chain_problem import ChainProblem
from hybridremat.sequence.skip_liveness import NO_SKIPS, SkipLiveness, SkipSet
from hybridremat.sequence.transitions import Transitions

MOST_ROWS: Final = 6000
"""Rows of a chain with skip values (2–4 s); beyond, these are charged as if they were held to the end."""

MOST_CHECKPOINTS: Final = 2_000_000
"""Checkpoints looked at to find those rows (some 2 s)."""

SubChain = tuple[int, int, SkipSet]
"""Blocks s…t and the skip values that die there."""

States = dict[tuple[int, int], set[SkipSet]]


def table_rows(problem: ChainProblem) -> tuple[ChainProblem, Mapping[SubChain, int]]:
    """The chain and its rows; without skip values if these would make too many."""
    if problem.skip_values:
        states = _states(Transitions(problem, unit=1), len(problem))
        rows = _row_numbers(problem, states) if states else {}
        if rows and max(rows.values()) < MOST_ROWS:
            return problem, rows
        problem = replace(problem, skip_values=())
    return problem, _row_numbers(problem, _states(Transitions(problem, unit=1), len(problem)) or {})


def _row_numbers(problem: ChainProblem, states: States) -> dict[SubChain, int]:
    """A row for each sub-chain that can come up, shorter ones first; equal ones share it."""
    keys = _row_keys(problem)
    skips = SkipLiveness(problem)
    interned: dict[object, int] = {}
    return {
        (s, t, dying): interned.setdefault((keys[s][t], skips.signature(s, t, dying)), len(interned))
        for s in reversed(range(len(problem)))
        for t in range(s, len(problem))
        for dying in sorted(states[s, t])
    }


def _states(transitions: Transitions, length: int) -> States | None:
    """The sets of skip values that can die in each (s,t), from the whole chain inwards; None if too many."""
    states: States = {
        (s, t): set() if transitions.skips.any else {NO_SKIPS}
        for s in range(length)
        for t in range(s, length)
    }
    if not transitions.skips.any:
        return states
    states[0, length - 1].add(NO_SKIPS)
    looked_at = 0
    for s in range(length):
        for t in reversed(range(s + 1, length)):
            looked_at += (t - s) * len(states[s, t])
            if looked_at > MOST_CHECKPOINTS:
                return None
            for dying in states[s, t]:
                states[s + 1, t] |= transitions.rests(s, t, dying)
                at_checkpoints = transitions.dying_at_checkpoints(s, t, dying)
                for j, later, earlier in zip(range(s + 1, t + 1), *at_checkpoints, strict=True):
                    states[j, t].add(later)
                    states[s, j - 1].add(earlier)
    return states


def _row_keys(problem: ChainProblem) -> list[list[int]]:
    """A number for each (s,t) such that equal numbers have equal rows."""
    length = len(problem)
    interned: dict[object, int] = {}
    classes: dict[object, int] = {}
    skips = SkipLiveness(problem)
    block_class = [
        classes.setdefault((block, problem.gradient_bytes[i + 1], skips.pattern(i)), len(classes))
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
