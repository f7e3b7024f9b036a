"""The exact memory of schedules: cases computed by hand, and a naive replay that asks who is read when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Op, Phase, Schedule, Value, plain_schedule
from hybridremat.graph.memory import (
    MemorySimulator,
    ScheduleError,
    schedule_flops,
    schedule_time,
    step_memory,
)
from support.examples import examples
from support.naive_memory import naive_profile, naive_saved
from support.random_steps import random_step, small_graph


def test_plain_step_by_hand() -> None:
    graph = small_graph(gradients=frozenset({5}))
    memory = step_memory(graph, plain_schedule(graph))
    # a; a + b + temporary; a + b + c; a + tangent + gradient
    assert memory.profile == (10, 130, 70, 18)
    assert (memory.peak, memory.peak_at, memory.saved) == (130, 1, 10)


def test_recomputed_value_is_not_held_between() -> None:
    graph = small_graph(held_outputs=frozenset({3}), gradients=frozenset({5}))
    memory = step_memory(graph, Schedule((0, 1, 2, 0, 3), 3))
    # a; a + b + temporary; b + c; c + a again + tangent; c + a + tangent + gradient
    assert memory.profile == (10, 130, 60, 53, 58)
    assert memory.saved == 40


def test_released_output_lives_to_the_end_of_the_forward() -> None:
    graph = small_graph(released_outputs=frozenset({1}))
    memory = step_memory(graph, Schedule((0, 1, 2, 0, 3), 3))
    assert memory.profile == (10, 130, 70, 13, 18)
    assert memory.saved == 0


def test_first_version_of_an_output_and_last_of_a_gradient_stay() -> None:
    graph = small_graph(held_outputs=frozenset({1}), gradients=frozenset({1}))
    memory = step_memory(graph, Schedule((0, 0, 1, 0, 3), 3))
    # the middle version dies after b, the others stay
    assert memory.profile == (10, 20, 140, 10 + 10 + 3, 10 + 10 + 3 + 5)


def test_generator_state_is_kept_until_the_last_replay() -> None:
    ops = (
        Op(0, "drop", Phase.FORWARD, (), (0,), random=True),
        Op(1, "mid", Phase.FORWARD, (), (1,)),
        Op(2, "back", Phase.BACKWARD, (0,), (2,)),
    )
    values = (Value(0, 10, 0), Value(1, 1, 1), Value(2, 1, 2))
    graph = JointGraph(ops, values, rng_state_bytes=7)
    assert step_memory(graph, Schedule((0, 1, 2), 2)).profile == (10, 11, 11)
    again = step_memory(graph, Schedule((0, 1, 0, 2), 2))
    # with one more state while it replays
    assert again.profile == (17, 8, 10 + 2 * 7, 11)
    assert again.saved == 7


def donating_graph(**roles: object) -> JointGraph:
    """Input → a (10) → b (10) → c (10), each may overwrite what it reads; d (10) may overwrite c and b."""
    ops = (
        Op(0, "a", Phase.FORWARD, (0,), (1,)),
        Op(1, "b", Phase.FORWARD, (1,), (2,), temp=3, overwrites=(1,)),
        Op(2, "c", Phase.FORWARD, (2,), (3,), overwrites=(2,)),
        Op(3, "d", Phase.BACKWARD, (2, 3), (4,), overwrites=(3, 2)),
    )
    values = (Value(0, 7, None), *(Value(v, 10, v - 1) for v in range(1, 5)))
    return JointGraph(ops, values, **roles)  # type: ignore[arg-type]


def test_an_op_writes_over_what_dies_with_it() -> None:
    simulate = MemorySimulator(donating_graph())
    plain = plain_schedule(donating_graph())
    assert simulate.overwritten(plain) == {1: 1, 3: 3}  # b is read again
    assert simulate(plain).profile == (10, 13, 20, 20)
    again = Schedule((0, 1, 2, 0, 1, 2, 3), 3)
    assert simulate.overwritten(again) == {1: 1, 2: 2, 4: 1, 6: 3}  # of two the first
    assert simulate(again).profile == (10, 13, 10, 10, 13, 20, 20)


@pytest.mark.parametrize("role", ["held_outputs", "released_outputs"])
def test_an_output_is_never_written_over(role: str) -> None:
    graph = donating_graph(**{role: frozenset({1})})
    assert MemorySimulator(graph).overwritten(plain_schedule(graph)) == {3: 3}
    recomputed = Schedule((0, 1, 2, 0, 1, 3), 3)
    assert MemorySimulator(graph).overwritten(recomputed) == {2: 2, 4: 1, 5: 3}  # the second version may be


def test_an_output_that_the_last_forward_op_reads_is_not_written_over() -> None:
    graph = donating_graph(released_outputs=frozenset({2}))
    assert MemorySimulator(graph).overwritten(Schedule((0, 1, 2, 0, 1, 3), 3)) == {1: 1, 4: 1, 5: 3}


def test_a_gradient_is_never_written_over() -> None:
    graph = donating_graph(gradients=frozenset({3}))
    assert MemorySimulator(graph).overwritten(Schedule((0, 1, 2, 1, 2, 3), 3)) == {2: 2, 3: 1, 5: 2}


def test_reading_what_was_not_computed_is_refused() -> None:
    graph = small_graph()
    with pytest.raises(ScheduleError, match=r"step 1 \(c\) reads b, which was not computed before"):
        step_memory(graph, Schedule((0, 2), 2))
    with pytest.raises(ScheduleError, match=r"step 0 \(b\) reads a"):
        step_memory(graph, Schedule((1, 0), 2))


def test_empty_schedule() -> None:
    memory = step_memory(small_graph(), Schedule((), 0))
    assert (memory.peak, memory.saved, memory.profile) == (0, 0, ())


def test_time_and_flops_count_every_execution() -> None:
    graph = small_graph()
    assert schedule_time(graph, Schedule((0, 1, 2, 0, 3), 3)) == 1112
    assert schedule_flops(graph, Schedule((0, 1, 2, 0, 3), 3)) == 8


@examples(300)
@given(st.integers(0, 10**9))
def test_replay_agrees_with_the_naive_one(seed: int) -> None:
    graph, schedule = random_step(seed)
    memory = MemorySimulator(graph)(schedule)
    profile = naive_profile(graph, schedule)
    assert list(memory.profile) == profile
    assert memory.peak == max(profile) == profile[memory.peak_at]
    assert memory.saved == naive_saved(graph, schedule)
