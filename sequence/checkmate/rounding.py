"""Checkmate's two-phase rounding: which values the relaxation keeps, rounded, and then what has to run again.

Jain et al. 2020, section 5: what is kept (S) is rounded, and what runs again (R) is the least that this
needs, by one pass back through each stage. The deterministic rounding keeps what the relaxation keeps by some
share or more, the randomized one keeps each value with the probability that the relaxation gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from hybridremat.graph.joint import Schedule
from hybridremat.sequence.checkmate.stages import Stages

Keeps = Callable[[int, int], bool]
"""Whether a value is kept for the start of a stage."""


def at_least(share: float, kept: Mapping[tuple[int, int], float]) -> Keeps:
    """Keep what the relaxation keeps by this share or more."""
    return lambda stage, value: kept.get((stage, value), 0.0) >= share


def at_random(seed: int, kept: Mapping[tuple[int, int], float]) -> Keeps:
    """Keep each value with its probability; the same for the same seed."""
    drawn = np.random.default_rng(seed).random(len(kept)).tolist()
    chosen = {each for (each, share), number in zip(kept.items(), drawn, strict=True) if number < share}
    return lambda stage, value: (stage, value) in chosen


def rounded(stages: Stages, keeps: Keeps) -> Schedule:
    """The schedule in which these values are kept as long as they are needed, and the others made again.

    What must not run twice, and what stays in memory anyway, is kept whatever ``keeps`` says.
    """
    runs: list[list[int]] = []
    needed = _produced(stages, stages.graph.gradients)
    for stage in reversed(range(len(stages))):
        start, end = stages.starts[stage], stages.starts[stage + 1]
        for op in reversed(stages.order[start:end]):
            _make(stages, op, needed)
        again = []
        for op in reversed(stages.order[:start]):
            lost = needed.intersection(stages.graph.ops[op].writes)
            if any(not stages.lasts(value, stage) and not keeps(stage, value) for value in lost):
                again.append(op)
                _make(stages, op, needed)
        runs.append(again)
    return stages.schedule(runs[::-1])


def _make(stages: Stages, op: int, needed: set[int]) -> None:
    """Before an op runs, what it reads is needed, and what it makes is not."""
    needed.difference_update(stages.graph.ops[op].writes)
    needed.update(_produced(stages, stages.graph.ops[op].reads))


def _produced(stages: Stages, values: Iterable[int]) -> set[int]:
    return {value for value in values if stages.graph.values[value].producer is not None}
