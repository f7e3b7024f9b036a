"""Sweeps of a lattice: their kinds of numbers, and the memory that they share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.blocks.decode import decode
from hybridremat.blocks.lattice import Lattice
from hybridremat.blocks.scale import scale_block
from hybridremat.blocks.scratch import Scratch
from hybridremat.blocks.sweep import NARROW, WIDE, Sweep, Sweeper, Word
from hybridremat.blocks.types import BackwardStep, BlockProblem, ForwardOp
from support.brute_blocks import blocks


def swept(sweeper: Sweeper, lattice: Lattice, limits: np.ndarray) -> tuple[Sweep, list[list[object]]]:
    """A sweep, and for each limit the times and what runs again, set by set; None where nothing fits."""
    sweep = sweeper.sweep(limits)
    sets = np.arange(sweep.times.size // len(limits))
    found: list[list[object]] = []
    for place, times in enumerate(sweep.times.reshape(-1, len(limits)).T.tolist()):
        fits = [int(each) for each in sets if times[each] < sweep.word.infeasible]
        decoded = decode(lattice, sweep, fits, [place] * len(fits))
        runs = dict(zip(fits, decoded.runs.T.tolist(), strict=True))
        found.append([(times[each], runs[each]) if each in runs else None for each in sets.tolist()])
    return sweep, found


@given(problem=blocks())
def test_narrow_numbers_find_what_wide_ones_find_and_nothing_is_left_behind(problem: BlockProblem) -> None:
    lattice = Lattice(problem, scale_block(problem))
    limits = np.linspace(0, lattice.scale.most_units, 7).astype(np.int64)
    narrow, wide = Sweeper(lattice, Scratch()), Sweeper(lattice, Scratch(), (WIDE,))
    for some in (limits, limits[2:5], limits[:1], limits):  # one after the other in the same memory
        sweep, found = swept(narrow, lattice, some)
        assert sweep.word is NARROW and found == swept(wide, lattice, some)[1]


@given(problem=blocks(), infeasible=st.integers(1, 60))
def test_a_word_holds_the_times_with_those_of_the_forward(problem: BlockProblem, infeasible: int) -> None:
    lattice = Lattice(problem, scale_block(problem))
    limits = np.linspace(0, lattice.scale.most_units, 7).astype(np.int64)
    word = replace(NARROW, infeasible=infeasible)
    sweep, found = swept(Sweeper(lattice, Scratch(), (word, WIDE)), lattice, limits)
    assert found == swept(Sweeper(lattice, Scratch(), (WIDE,)), lattice, limits)[1]
    most = int(np.where(sweep.times < sweep.word.infeasible, sweep.times, 0).max())
    assert most + sum(lattice.scale.time_units) < sweep.word.infeasible


def again_and_again(steps: int) -> BlockProblem:
    """A block whose steps need, in turn, two values of a row of ops that cannot both be held."""
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), 1000, 0) for c in range(9))
    turns = tuple(BackwardStep((8 if j % 2 else 4,), 0, 0, 0) for j in range(steps))
    return BlockProblem((10,) * 9, ops, turns, frozenset({8}), 0)


@pytest.mark.parametrize("word", [NARROW, replace(NARROW, infeasible=2**14)])
def test_times_beyond_a_word_are_found_in_a_wider_one(word: Word) -> None:
    lattice = Lattice(again_and_again(16), scale_block(again_and_again(16)))
    limits = np.array([2, lattice.scale.most_units])
    sweep, found = swept(Sweeper(lattice, Scratch(), (word, WIDE)), lattice, limits)
    wide, same = swept(Sweeper(lattice, Scratch(), (WIDE,)), lattice, limits)
    assert found == same and sweep.word is WIDE
    assert int(np.where(wide.times < WIDE.infeasible, wide.times, 0).max()) > word.infeasible
