"""Blocks that nothing was decided for (the plain step): what their part of the schedule takes."""

from __future__ import annotations

from collections.abc import Collection

from hybridremat.blocks import simulate_option
from hybridremat.blocks.types import BlockBinding, Option
from hybridremat.graph.joint import Schedule


def option_of_schedule(binding: BlockBinding, schedule: Schedule, crossing: Collection[int]) -> Option | None:
    """A block as a schedule runs it, with exact figures, as if it had been one of its options.

    Parameters
    ----------
    crossing
        Values (ids of the graph) that the backward reads as the forward left them.

    Returns
    -------
    Option | None
        None where the block cannot run so by itself: it reads what another block made again.
    """
    ops = {op: c for c, op in enumerate(binding.ops)}
    step_of = {op: j for j, group in enumerate(binding.steps) for op in group}
    ahead = frozenset(schedule.steps[: schedule.num_forward])
    again: list[list[int]] = [[] for _ in binding.steps]
    waiting: list[int] = []
    for op in schedule.steps[schedule.num_forward :]:
        if op in ops:
            waiting.append(ops[op])
        elif op in step_of:
            again[step_of[op]] += waiting
            waiting = []
    problem = binding.problem
    try:
        return simulate_option(
            problem,
            [d for d, value in enumerate(binding.values) if value in crossing],
            [c for op, c in ops.items() if op in ahead and problem.ops[c].optional],
            again,
        )
    except ValueError:
        return None
