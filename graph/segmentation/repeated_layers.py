"""Layers that repeat in the forward: those of a Transformer, the blocks of one ResNet stage.

Two groups of ops are alike if their ops have the same kernels, costs and bytes. A repetition with period
P is a run of groups each alike to the one P before it. Blocks cut at the same places of each period are equal
in canonical form, so that one solve serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridremat.graph.joint import JointGraph
from hybridremat.graph.segmentation.forward_order import OpGroups

MAX_PERIOD = 256
"""Longest period looked for, in groups."""

MAX_REPETITIONS = 8
"""Most repetitions looked for."""

MIN_REPETITION = 8
"""Least number of groups of a repetition: below this there is little to share."""


@dataclass(frozen=True)
class Repetition:
    """Groups ``start``…``stop − 1``, in which group k is alike to group k − ``period``."""

    start: int
    stop: int
    period: int


def group_kinds(graph: JointGraph, forward_ops: tuple[int, ...], groups: OpGroups) -> tuple[int, ...]:
    """A number for every group, equal for groups that are alike."""
    numbers: dict[tuple[object, ...], int] = {}
    kinds = []
    for first, stop in zip(groups.start, groups.start[1:], strict=False):
        ops = [graph.ops[op] for op in forward_ops[first:stop]]
        kind = tuple(
            (
                op.target,
                op.time,
                op.temp,
                op.recomputable,
                tuple(graph.values[value].bytes for value in op.reads),
                tuple(graph.values[value].bytes for value in op.writes),
            )
            for op in ops
        )
        kinds.append(numbers.setdefault(kind, len(numbers)))
    return tuple(kinds)


def find_repetitions(kinds: tuple[int, ...]) -> tuple[Repetition, ...]:
    """Disjoint repetitions, longest first; each holds at least two whole periods."""
    remaining = np.array(kinds, dtype=np.int64)
    found: list[Repetition] = []
    while len(found) < MAX_REPETITIONS:
        longest = _longest_repetition(remaining)
        if longest is None:
            break
        found.append(longest)
        # Numbers that occur once: the repetition is spent.
        remaining[longest.start : longest.stop] = -1 - np.arange(longest.start, longest.stop)
    return tuple(found)


def _longest_repetition(kinds: NDArray[np.int64]) -> Repetition | None:
    """The longest repetition; of equal ones that of the shortest period, then the first."""
    best: Repetition | None = None
    for period in range(1, min(MAX_PERIOD, len(kinds) // 2) + 1):
        start, length = _longest_run(kinds[period:] == kinds[:-period])
        covered = length + period
        if (
            length >= period
            and covered >= MIN_REPETITION
            and (best is None or covered > best.stop - best.start)
        ):
            best = Repetition(start, start + covered, period)
    return best


def _longest_run(alike: NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the longest run of True, the first of several."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], alike.astype(np.int8), [0]))))
    starts, stops = edges[::2], edges[1::2]
    if not starts.size:
        return 0, 0
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest] - starts[longest])
