"""Which recomputations are decided on at once: those near the ops that need them, a stretch of the forward.

All pairs of a stage of the backward and an earlier op are too many, and most lead nowhere: an op runs again
for what a stage needs, a few ops away from it. A *window* takes ops that follow each other until their pairs
are as many as a search holds; the next one begins in its middle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hybridremat.graph.joint import JointGraph, Phase
from hybridremat.sequence.checkmate.stages import Stages
from hybridremat.sequence.polish.program import Runs

Size = tuple[int, int]
"""Of a window: ops between a stage's new op and what may run again for it, and pairs."""

DEEP: Final[tuple[Size, ...]] = ((8, 400), (8, 1_000), (12, 1_000))
"""Small ones end soon."""

WIDE: Final[tuple[Size, ...]] = ((3, 3_000),)
"""The whole graph of most models at once."""


@dataclass(frozen=True)
class Window:
    """Ops that are decided on, and in which stages they may run again."""

    ops: frozenset[int]
    runs: Runs


def windows(stages: Stages, given: Runs, near: int, most: int) -> list[Window]:
    """The windows of a schedule, the last ops first; ``given``: what runs again in it."""
    runs = _near_runs(stages, near)
    counts = Counter(op for _, op in runs)
    ops = [op for op in stages.order if counts[op]]
    return [_window(chosen, runs, given) for chosen in _stretches(ops, counts, most)][::-1]


def _near_runs(stages: Stages, ops: int) -> Runs:
    """Pairs of a stage of the backward and an op that may run again in it, near the new op."""
    found: set[tuple[int, int]] = set()
    for stage in range(stages.forward, len(stages)):
        near = _sources(stages.graph, stages.order[stage], ops)
        found.update((stage, op) for op in near.intersection(stages.again[stage]))
    return frozenset(found)


def _sources(graph: JointGraph, op: int, count: int) -> set[int]:
    """What an op is made of, some ops back, without ops of the backward."""
    found: set[int] = set()
    last = {op}
    for _ in range(count):
        made = (graph.values[value].producer for each in last for value in graph.ops[each].reads)
        last = {each for each in made if each is not None and graph.ops[each].phase is not Phase.BACKWARD}
        last -= found
        found |= last
    return found


def _stretches(ops: list[int], counts: Counter[int], most: int) -> Iterator[frozenset[int]]:
    start = end = 0
    while end < len(ops):
        taken, end = 0, start
        while end < len(ops) and (end == start or taken + counts[ops[end]] <= most):
            taken += counts[ops[end]]
            end += 1
        yield frozenset(ops[start:end])
        start = max(start + 1, (start + end) // 2)


def _window(ops: frozenset[int], near: Runs, given: Runs) -> Window:
    return Window(ops, frozenset(each for each in near | given if each[1] in ops))
