"""The block simulator on hand-made blocks, with figures worked out by hand."""

from __future__ import annotations

import pytest

from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BackwardStep, BlockProblem, ForwardOp

# x → a (10) → b (4, temporary 3) → y (6); the backward reads b, then a.
CHAIN = BlockProblem(
    value_bytes=(10, 4, 6),
    ops=(ForwardOp((), (0,), 7, 0), ForwardOp((0,), (1,), 5, 3), ForwardOp((1,), (2,), 2, 0)),
    steps=(BackwardStep((1,), during=8, tail=0, after=5), BackwardStep((0,), during=9, tail=0, after=2)),
    outputs=frozenset({2}),
    gradient_in=6,
)


def test_save_everything() -> None:
    option = simulate_option(CHAIN, (0, 1), (), ((), ()))
    assert (option.saved_bytes, option.forward_peak, option.backward_peak, option.time) == (20, 20, 22, 0)
    assert option.saved == (0, 1, 2)


def test_recompute_everything() -> None:
    option = simulate_option(CHAIN, (), (), ((0, 1), (0,)))
    # Forward: a, b and the temporary. Backward: a + b + temporary + gradient_in.
    assert (option.saved_bytes, option.forward_peak, option.backward_peak, option.time) == (6, 17, 23, 19)


def test_keeping_a_recomputed_value_is_cheaper_in_time() -> None:
    option = simulate_option(CHAIN, (), (), ((0, 1), ()))
    assert (option.backward_peak, option.time) == (23, 12)


def test_solo_neither_makes_nor_keeps_the_output() -> None:
    option = simulate_option(CHAIN, (), (), ((0, 1), ()), solo=True)
    assert (option.saved_bytes, option.forward_peak, option.backward_peak, option.time) == (0, 0, 23, 12)
    assert option.saved == ()


def test_a_value_nobody_reads_later_is_not_saved() -> None:
    option = simulate_option(CHAIN, (0, 1), (), ((), (0,)))
    assert option.saved == (1, 2)
    assert option.saved_bytes == 10


def test_held_forward_lives_to_the_end_of_the_forward_only() -> None:
    held = BlockProblem(CHAIN.value_bytes, CHAIN.ops, CHAIN.steps, CHAIN.outputs, 6, frozenset({0}))
    option = simulate_option(held, (), (), ((0, 1), ()))
    assert (option.forward_peak, option.saved_bytes) == (20, 6)


def test_an_output_is_not_written_over_by_its_last_reader() -> None:
    ops = (ForwardOp((), (0,), 1, 0), ForwardOp((0,), (1,), 1, 0, overwrites=(0,)))
    steps = (BackwardStep((1,), during=0, tail=0, after=0),)
    for outputs, peak in ((frozenset({0}), 20), (frozenset[int](), 10)):
        problem = BlockProblem((10, 10), ops, steps, outputs, 0)
        assert simulate_option(problem, (1,), (), ((),)).forward_peak == peak


def test_tail_runs_when_the_step_has_dropped_what_it_read() -> None:
    steps = (BackwardStep((0,), during=1, tail=5, after=5),)
    problem = BlockProblem((10,), (ForwardOp((), (0,), 1, 0),), steps, frozenset(), 0)
    assert simulate_option(problem, (0,), (), ((),)).backward_peak == 11


def test_optional_op_costs_time_in_either_phase() -> None:
    ops = (ForwardOp((), (0,), 1, 0), ForwardOp((0,), (1,), 4, 0, optional=True))
    problem = BlockProblem((10, 2), ops, (BackwardStep((1,), 0, 0, 0),), frozenset(), 0)
    early = simulate_option(problem, (1,), (1,), ((),))
    late = simulate_option(problem, (0,), (), ((1,),))
    assert (early.saved_bytes, early.time) == (2, 4)
    assert (late.saved_bytes, late.time) == (10, 4)


@pytest.mark.parametrize(
    ("saved", "recompute", "message"),
    [
        ((), ((), ()), "reads value 1, which is not alive"),
        ((0,), ((2,), ()), "reads value 1, which is not alive"),
        ((0, 1), ((),), "1 lists of recomputations for 2 backward steps"),
        ((7,), ((), ()), "saved value 7 does not exist"),
        ((0, 1), ((9,), ()), "op 9 does not exist"),
    ],
)
def test_invalid_choices(
    saved: tuple[int, ...], recompute: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_option(CHAIN, saved, (), recompute)


def test_ops_that_must_not_run_twice() -> None:
    ops = (ForwardOp((), (0,), 1, 0, recomputable=False),)
    problem = BlockProblem((10,), ops, (BackwardStep((0,), 0, 0, 0),), frozenset(), 0)
    with pytest.raises(ValueError, match="op 0 must not run more than once"):
        simulate_option(problem, (), (), ((0,),))
    with pytest.raises(ValueError, match="op 0 must not run more than once"):
        simulate_option(problem, (), (), ((0,),), solo=True)


def test_forward_ops_are_not_optional_and_solo_saves_nothing() -> None:
    with pytest.raises(ValueError, match="op 0 is not optional"):
        simulate_option(CHAIN, (0, 1), (0,), ((), ()))
    with pytest.raises(ValueError, match="solo option saves nothing"):
        simulate_option(CHAIN, (0,), (), ((), ()), solo=True)
