"""Options of one block used for another of the same ops and other sizes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from hybridremat.blocks.pareto import block_structure, enumerate_options, reuse_options
from hybridremat.blocks.types import BackwardStep, BlockProblem, ForwardOp, Option
from support.brute_blocks import SWEEPS, blocks
from support.examples import examples


def twice_the_block(problem: BlockProblem) -> BlockProblem:
    """All bytes doubled, times as they are."""
    return replace(
        problem,
        value_bytes=tuple(2 * size for size in problem.value_bytes),
        ops=tuple(replace(op, temp=2 * op.temp) for op in problem.ops),
        steps=tuple(BackwardStep(s.reads, 2 * s.during, 2 * s.tail, 2 * s.after) for s in problem.steps),
        gradient_in=2 * problem.gradient_in,
    )


def twice_the_bytes(option: Option) -> Option:
    return replace(
        option,
        saved_bytes=2 * option.saved_bytes,
        forward_peak=2 * option.forward_peak,
        backward_peak=2 * option.backward_peak,
    )


def assert_doubled(problem: BlockProblem) -> int:
    """No option is lost and all figures are doubled; the number of options that save something."""
    known = enumerate_options(problem, SWEEPS)
    larger = twice_the_block(problem)
    assert block_structure(larger) == block_structure(problem)
    found = reuse_options(larger, known)
    assert sorted(found.options, key=repr) == sorted(map(twice_the_bytes, known.options), key=repr)
    assert sorted(found.solo, key=repr) == sorted(map(twice_the_bytes, known.solo), key=repr)
    return len(found.options)


def test_a_block_of_twice_the_sizes_has_as_many_options() -> None:
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), 3 + c, c % 2) for c in range(5))
    steps = tuple(BackwardStep((4 - j, 3 - j), 9 + j, 0, 5) for j in range(4))
    assert assert_doubled(BlockProblem((4, 3, 7, 2, 6), ops, steps, frozenset({4}), 6)) > 3


@given(blocks())
@examples(60)
def test_no_option_of_a_random_block_is_lost(problem: BlockProblem) -> None:
    assert_doubled(problem)
