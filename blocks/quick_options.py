"""Some options of a block in a few milliseconds, where no time is left to find the best ones.

What is saved goes by one figure of each value: the time to make it again, alone, by its bytes. The values
above a threshold are saved, and the others made again when a backward step first reads them, from what is
there then, and kept until their last reader. The simulator counts each option exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from hybridremat.blocks.pareto import nondominated
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BlockProblem, Option, OptionSet

THRESHOLDS: Final = 24
"""At most: blocks have fewer values, as a rule."""


def quick_options(problem: BlockProblem) -> OptionSet | None:
    """Options from one that saves all that its backward reads to one that saves as little as it can.

    Returns
    -------
    OptionSet or None
        ``solo`` has one option or none. None if no option was found that serves the first run of the block.
    """
    options = [found for saved in _choices(problem) if (found := _option(problem, saved)) is not None]
    if all(problem.rerun_only(option) for option in options):
        return None
    alone = _option(problem, frozenset(), solo=True)
    return OptionSet(nondominated(options, problem), () if alone is None else (alone,), len(options))


def _choices(problem: BlockProblem) -> Iterator[frozenset[int]]:
    """What to save: all values that may be, then fewer and fewer."""
    producer = problem.producers()
    worth = {
        value: problem.ops[op].time / max(1, problem.value_bytes[value])
        for value, op in producer.items()
        if value not in problem.never_saved
    }
    levels = sorted(set(worth.values()))
    for level in levels[:: max(1, -(-len(levels) // THRESHOLDS))]:
        yield frozenset(value for value, each in worth.items() if each >= level)
    yield frozenset()


def _option(problem: BlockProblem, saved: Collection[int], *, solo: bool = False) -> Option | None:
    """The option that saves these values, and what cannot be made again; None if there is none."""
    kept = set(saved)
    while True:
        recompute = _made_again(problem, kept | (set() if solo else problem.outputs))
        runs = {op for ops in recompute for op in ops}
        once = {op for op in runs if not problem.ops[op].recomputable and not problem.ops[op].optional}
        more = {value for op in once for value in problem.ops[op].writes} - kept
        if solo and once:
            return None
        if not more:
            break
        kept |= more
    producer = problem.producers()
    early = set() if solo else {producer[value] for value in kept if problem.ops[producer[value]].optional}
    try:
        return simulate_option(problem.for_rerun, kept, early, recompute, solo=solo)
    except ValueError:  # an optional op that runs early reads what the forward does not make, for one
        return None


def _made_again(problem: BlockProblem, there: Collection[int]) -> list[list[int]]:
    """For each backward step the ops that make what it reads and what is not there, in order."""
    producer, known = problem.producers(), set(there)
    every: list[list[int]] = []
    for step in problem.steps:
        pending, ops = [value for value in step.reads if value not in known], set[int]()
        while pending:
            op = producer[pending.pop()]
            if op not in ops:
                ops.add(op)
                pending += [value for value in problem.ops[op].reads if value not in known]
        every.append(sorted(ops))
        known |= {value for op in ops for value in problem.ops[op].writes}
    return every
