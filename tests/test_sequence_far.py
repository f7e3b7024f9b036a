"""Values that may die before the blocks that hold them are through, and what a chain gains by them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.segmentation.skip_values import MOST_SKIP_VALUES, SkipValue, skip_values
from hybridremat.sequence import states as rows
from hybridremat.sequence.backtrack import Backtracker
from hybridremat.sequence.chain_problem import BlockFigures, ChainProblem, OptionFigures, SoloFigures
from hybridremat.sequence.decisions import ForwardOption
from hybridremat.sequence.dynamic_program import chain_table
from support.examples import examples
from support.random_chains import training_chain

NONE: frozenset[int] = frozenset()


@examples(80)
@given(st.integers(0, 10**6))
def test_far_values_are_those_that_some_block_rides_over_or_reads_in_its_forward_alone(seed: int) -> None:
    chain = training_chain(seed)
    ops = chain.graph.ops
    found = skip_values(chain)
    for far in found:
        inside = [i for i, boundary in enumerate(chain.boundary) if far.value in boundary]
        blocks = [chain.blocks[i] for i in inside]
        everywhere = [
            [v for op in b.forward + b.optional + b.backward for v in ops[op].reads] for b in blocks
        ]
        backward = [[v for op in b.backward for v in ops[op].reads] for b in blocks]
        assert far.producer == inside[0] - 1
        assert far.readers == tuple(
            i for i, reads in zip(inside, everywhere, strict=True) if far.value in reads
        )
        assert any(far.value not in reads for reads in backward)
        assert far.bytes == chain.graph.values[far.value].bytes
    for boundary in chain.boundary:
        assert sum(far.value in boundary for far in found) <= MOST_SKIP_VALUES


def skipping_chain(*, idle: bool) -> ChainProblem:
    """Block 0 makes a skip of 10 bytes for the forward of block 2; blocks 1 and 2 need 20 in the backward."""
    held = OptionFigures(10, 10, 10, 0)
    left = OptionFigures(10, 10, 10, 3, frozenset({0}))
    inner, last = OptionFigures(0, 0, 20, 0), OptionFigures(0, 0, 20, 0)
    blocks = tuple(
        BlockFigures(options, (), 5, 0) for options in ((held, left) if idle else (held,), (inner,), (last,))
    )
    return ChainProblem(
        blocks=blocks,
        boundary_bytes=((0, 10, 10, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
        gradient_bytes=(0, 0, 0, 0),
        later_gradients=(0, 0, 0),
        plain_peak=((10, 10, 10), (0, 0, 0), (0, 0, 0)),
        skip_values=(SkipValue(0, 10, 0, (2,)),),
    )


def test_a_skip_that_nobody_needs_any_more_makes_room_for_the_blocks_between() -> None:
    def breakpoints(problem: ChainProblem) -> list[tuple[int, float]]:
        table = chain_table(problem, memory=40, slots=40)
        return [(slot, table.top[slot]) for slot in table.breakpoints()]

    # 3 ns to make the skip again; else block 0 runs again (5 ns); else nobody lets go of it
    assert breakpoints(skipping_chain(idle=True)) == [(20, 18), (30, 15)]
    assert breakpoints(skipping_chain(idle=False)) == [(20, 20), (30, 15)]
    assert breakpoints(replace(skipping_chain(idle=True), skip_values=())) == [(30, 15)]
    table = chain_table(skipping_chain(idle=True), memory=40, slots=40)
    assert Backtracker(table)(20)[0] == ForwardOption(0, 1)


@pytest.mark.parametrize("cap", ["MOST_ROWS", "MOST_CHECKPOINTS"])
def test_a_chain_of_too_many_rows_does_without_far_values(cap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = skipping_chain(idle=True)
    monkeypatch.setattr(rows, cap, 1)
    table = chain_table(problem, memory=40, slots=40)
    assert table.problem == replace(problem, skip_values=())
    assert (table.top == chain_table(replace(problem, skip_values=()), memory=40, slots=40).top).all()


@examples(40)
@given(st.integers(3, 8), st.booleans(), st.booleans(), st.integers(1, 4))
def test_equal_sub_chains_share_rows_with_far_values(
    count: int, idle: bool, touched: bool, size: int
) -> None:
    made = frozenset({0}) if idle else NONE
    option = OptionFigures(size + 2, size + 4, size + 5, 1, made, frozenset({0}) if touched else NONE)
    keep, drop = replace(option, saved=size + 6, time=0), replace(option, saved=size, time=4)
    inner = BlockFigures((keep, option, drop), (SoloFigures(size + 5, 6, option.read),), 5, 1)
    ends = [
        tuple(replace(o, read=NONE) for o in inner.options),
        tuple(replace(o, unread=NONE) for o in inner.options),
    ]
    first, last = (
        replace(inner, options=ends[0], solo=(SoloFigures(size + 5, 6),)),
        replace(inner, options=ends[1]),
    )
    problem = ChainProblem(
        blocks=(first, *(inner,) * (count - 2), last),
        boundary_bytes=tuple(tuple(size * (j > s) for j in range(count + 1)) for s in range(count)),
        gradient_bytes=(0, *(1,) * (count - 1), 0),
        later_gradients=tuple(count - 1 - t for t in range(count)),
        plain_peak=tuple(tuple(size + 3 + size * (k > s) for k in range(count)) for s in range(count)),
        skip_values=tuple(SkipValue(i, size, i, (i + 1,)) for i in range(count - 1)),
    )
    shared = chain_table(problem, memory=60, slots=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_row_keys", lambda p, _: np.arange(len(p) ** 2).reshape(len(p), len(p)))
        apart = chain_table(problem, memory=60, slots=60)
    assert shared.rows.by_state.keys() == apart.rows.by_state.keys()
    for sub_chain in shared.rows.by_state:
        assert (shared.row(*sub_chain) == apart.row(*sub_chain)).all()
