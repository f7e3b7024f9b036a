"""Successive halving: who has a turn when, who is out, and when the planned schedule gives way."""

from collections import Counter

import pytest

from hybridremat.runtime.halving import LEAST_STEPS, MOST, Figure, Halving, contestants, turns_of_rounds


def run(halving, seconds):
    """The schedules that had turns, in order, where each takes ``seconds(number, turn)``."""
    order = []
    while halving.winner is None:
        number = halving.next
        order.append(number)
        if halving.note(seconds(number, len(halving.times[number]))):
            halving.halve(halving.own_figures())
    return order


@pytest.mark.parametrize(("steps", "count"), [(4, 2), (10, 3), (20, 5), (22, 6), (28, 8), (500, MOST)])
def test_as_many_take_turns_as_have_two_in_each_round(steps, count):
    assert contestants(steps) == count


@pytest.mark.parametrize("steps", range(LEAST_STEPS, 60))
def test_no_more_steps_are_taken_than_given_and_hardly_fewer(steps):
    for count in range(2, contestants(steps) + 1):
        order = run(Halving(count, steps), lambda number, _: 1.0 + number)
        assert steps - 1 <= len(order) <= steps
        assert min(turns_of_rounds(count, steps)) >= 2


def test_the_slower_half_of_the_others_is_out_after_each_round():
    halving = Halving(8, 28)
    order = run(halving, lambda number, _: [5.0, 9.0, 3.0, 8.0, 1.0, 7.0, 2.0, 6.0][number])
    assert Counter(order[:16]) == dict.fromkeys(range(8), 2)
    assert Counter(order[16:24]) == dict.fromkeys((0, 4, 6, 2), 2)
    assert Counter(order[24:]) == dict.fromkeys((0, 4), 2)
    assert halving.winner == 4
    assert halving.figures[1] == Figure(9.0, 0.0)


def test_turns_are_in_rotation_and_each_has_every_place_of_an_even_number():
    halving = Halving(2, 8)
    assert run(halving, lambda *_: 1.0) == [0, 1, 1, 0, 0, 1, 1, 0]


def test_the_slowest_planned_schedule_is_compared_to_the_end():
    halving = Halving(5, 20)
    order = run(halving, lambda number, _: 1.0 + (number == 0))
    assert order.count(0) == 6
    assert halving.winner not in (0, None)


@pytest.mark.parametrize(("faster", "winner"), [(0.97, 0), (0.9, 1)])
def test_the_planned_one_stays_unless_another_is_faster_by_more_than_the_noise(faster, winner):
    halving = Halving(2, 8)
    noisy = [1.05, 1.0, 1.3, 1.2]
    run(halving, lambda number, turn: noisy[turn] * (faster if number else 1.0))
    assert halving.winner == winner


def test_equal_schedules_leave_the_plan_as_it_is():
    halving = Halving(4, 20)
    run(halving, lambda *_: 1.0)
    assert halving.winner == 0


def test_one_slow_turn_does_not_count():
    halving = Halving(3, 12)
    run(halving, lambda number, turn: 50.0 if (number, turn) == (2, 0) else [3.0, 2.0, 1.0][number])
    assert halving.winner == 2
