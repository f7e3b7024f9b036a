"""Units of the solver's model: exact memory, and some 10,000 time units to a block.

The memory unit is the sizes' greatest common divisor: CP-SAT is as fast on exact bytes as on 20,000 coarse
units (measured on the blocks of GPT-2 and ResNet-50), and nothing lies beyond a limit by rounding alone. Only
enormous blocks are coarser; then sizes are rounded up, so that a schedule which fits in units fits in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from hybridremat.blocks.types import BackwardStep, BlockProblem

MEMORY_UNITS = 10**11
TIME_UNITS = 10_000


@dataclass(frozen=True)
class Scale:
    """A block's sizes in memory units (``unit`` bytes) and times in time units (``tick`` nanoseconds)."""

    unit: int
    tick: int
    value_units: tuple[int, ...]
    temp_units: tuple[int, ...]
    time_units: tuple[int, ...]
    steps: tuple[BackwardStep, ...]
    gradient_in_units: int
    most_units: int

    def floor(self, limit: int) -> int:
        """A limit of ``limit`` bytes in units, rounded down and capped at what a block can ever need."""
        return max(0, min(limit // self.unit, self.most_units))


def scale_block(problem: BlockProblem) -> Scale:
    """Choose the units of ``problem`` and convert its sizes."""
    temps = [op.temp for op in problem.ops]
    gradients = [x for s in problem.steps for x in (s.during, s.tail, s.after)] + [problem.gradient_in]
    most = sum(problem.value_bytes) + max(temps, default=0) + max(gradients)
    unit = max(most // MEMORY_UNITS, gcd(*problem.value_bytes, *temps, *gradients), 1)
    tick = max(1, sum(op.time for op in problem.ops) // TIME_UNITS)

    def up(size: int) -> int:
        return -(-size // unit)

    steps = tuple(BackwardStep(s.reads, up(s.during), up(s.tail), up(s.after)) for s in problem.steps)
    values = tuple(map(up, problem.value_bytes))
    return Scale(
        unit=unit,
        tick=tick,
        value_units=values,
        temp_units=tuple(map(up, temps)),
        time_units=tuple(max(1, round(op.time / tick)) if op.time else 0 for op in problem.ops),
        steps=steps,
        gradient_in_units=up(problem.gradient_in),
        most_units=2 * sum(values) + up(max(temps, default=0)) + up(max(gradients)),
    )
