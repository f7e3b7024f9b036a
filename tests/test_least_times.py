"""Rows of the chain program's table: the least of many ways, against every way at every slot."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.sequence.dynamic_program import EXACT_TICKS, tick_of
from hybridremat.sequence.least_times import CheckpointWays, OptionWays, TimeRows
from support.examples import examples
from support.long_chains import long_chain

FORWARD = 3


@st.composite
def rows_of_times(draw: st.DrawFn, slots: int) -> list[float]:
    """Times that never grow: infinite at first, then falling in some places."""
    start, time = draw(st.integers(0, slots)), draw(st.integers(20, 60))
    falls = draw(st.dictionaries(st.integers(0, slots - 1), st.integers(0, 4), max_size=12))
    row: list[float] = []
    for slot in range(slots):
        time -= falls.get(slot, 0)
        row.append(inf if slot < start else float(max(time, 0)))
    return row


def entry(row: list[float], slot: int) -> float:
    return row[min(slot, len(row) - 1)]


@examples(300)
@given(st.data(), st.sampled_from([3, 40, 300]))
def test_no_way_is_missed_and_none_made_up(data: st.DataObject, slots: int) -> None:
    filled = data.draw(st.lists(rows_of_times(slots), min_size=1, max_size=4))
    rows = TimeRows(len(filled) + 1, slots)
    for number, row in enumerate(filled):
        rows.fill(number, np.array(row, np.float32), FORWARD)
    number, shift = st.integers(0, len(filled) - 1), st.integers(-5, slots // 2)
    extra = st.integers(0, slots)
    options = data.draw(st.lists(st.tuples(number, shift, extra, st.integers(0, 9)), max_size=6))
    splits = data.draw(st.lists(st.tuples(number, shift, number, shift, extra), max_size=6))
    options = [(r, s, max(s, 0) + more, time) for r, s, more, time in options]
    splits = [(r, s, q, t, max(s, t, 0) + more) for r, s, q, t, more in splits]
    rows.fill_least(
        len(filled),
        OptionWays(*(column(options, i) for i in range(3)), column(options, 3).astype(np.float32)),
        CheckpointWays(*(column(splits, i) for i in range(5))),
        FORWARD,
    )
    found = rows.times[-1]
    assert (rows.after_forward[-1] == found + FORWARD).all()
    for slot in range(slots):
        ways = [entry(filled[r], slot - s) + time for r, s, least, time in options if slot >= least]
        ways += [
            entry(filled[r], slot - s) + entry(filled[q], slot - t) + FORWARD
            for r, s, q, t, least in splits
            if slot >= least
        ]
        assert found[slot] == min(ways, default=inf), slot


def column(ways: list[tuple[int, ...]], place: int) -> np.ndarray:
    return np.array([way[place] for way in ways], np.int64)


@pytest.mark.parametrize("blocks", [1, 40])
def test_ticks_are_nanoseconds_while_these_are_exact(blocks: int) -> None:
    problem = long_chain(blocks)
    assert tick_of(problem) == 1
    slowest = 10 * blocks  # 5 ns forward, 5 ns of the slower option
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridremat.sequence.dynamic_program.EXACT_TICKS", slowest - 1)
        assert tick_of(problem) == 2
        patch.setattr("hybridremat.sequence.dynamic_program.EXACT_TICKS", slowest)
        assert tick_of(problem) == 1
    assert 4 * EXACT_TICKS <= 1 << 24
