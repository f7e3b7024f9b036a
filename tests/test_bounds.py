"""Bounds of time and peak: never more than a schedule reaches, and the optimum where it can be enumerated."""

from __future__ import annotations

from itertools import chain as chained
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Phase, ops_by_parts, plain_schedule
from hybridremat.sequence.bounds.certificate import MANY, THOROUGH, least_peak_bound, time_bound
from hybridremat.sequence.bounds.integer import integer_bound
from hybridremat.sequence.bounds.linear_program import LinearProgram
from hybridremat.sequence.bounds.moments import Moments, choose_moments, moments_at
from hybridremat.sequence.bounds.relaxation import PhaseLimits, peak_program, time_program
from hybridremat.sequence.bounds.search import MOST_OPS, least_time
from support.examples import examples
from support.extreme_schedules import extreme_schedule
from support.joint_graphs import joint_graphs
from support.naive_memory import naive_profile
from support.nets import Net, chain
from support.tiny_steps import fastest_by_enumeration, in_two_ways, tiny_steps

MORE = 1
"""Executions beyond one of each op in the schedules that are enumerated."""


def assert_bounds(graph: JointGraph, moments: Moments, peak: int, time: int) -> None:
    """No bound is beyond what a schedule of this peak and time reaches."""
    limits = PhaseLimits(peak, peak)
    searched = least_time(graph, limits)
    assert searched is not None and searched <= time
    relaxed = time_program(graph, moments, limits)
    assert relaxed.lower_bound() <= integer_bound(relaxed, 1.0) <= searched
    assert peak_program(graph, moments, peak).lower_bound() <= peak
    assert least_peak_bound(graph, plain_schedule(graph)) <= peak


@given(tiny_steps(), st.data())
@examples(60, deadline=None)
def test_search_and_relaxation_never_claim_more_than_a_schedule_reaches(
    graph: JointGraph, data: st.DataObject
) -> None:
    level = data.draw(st.lists(st.integers(0, 3), min_size=len(graph.ops), max_size=len(graph.ops)))
    moments = choose_moments(graph, level, data.draw(st.integers(1, len(graph.ops))))
    for peak, time in fastest_by_enumeration(graph, len(graph.ops) + MORE):
        assert_bounds(graph, moments, peak, time)


@given(in_two_ways(tiny_steps()))
@examples(40, deadline=None)
def test_bounds_count_the_better_of_two_ways_to_run_an_op(graph: JointGraph) -> None:
    """Schedules run one way or the other; the search may even change between them."""
    moments = choose_moments(graph, [1] * len(graph.ops))
    can = [op.id for op in graph.ops if op.variants]
    for parted in chained.from_iterable(combinations(can, number) for number in range(len(can) + 1)):
        for peak, time in fastest_by_enumeration(ops_by_parts(graph, parted), len(graph.ops)):
            assert_bounds(graph, moments, peak, time)


def test_bounds_of_small_graphs_are_optima() -> None:
    """Of instances and limits, at least 95 % (what is enumerated has few executions more than ops)."""
    pairs: list[bool] = []

    @given(tiny_steps())
    @examples(40, 12, derandomize=True, deadline=None, database=None)
    def count(graph: JointGraph) -> None:
        for peak, time in fastest_by_enumeration(graph, len(graph.ops) + MORE):
            pairs.append(time_bound(graph, PhaseLimits(peak, peak), plain_schedule(graph)) == time)

    count()
    assert len(pairs) >= 10
    assert sum(pairs) >= 0.95 * len(pairs)


@given(joint_graphs(), st.integers(0, 1000), st.sampled_from((0.0, 0.3, 1.0)))
@examples(60, deadline=None)
def test_no_schedule_of_a_random_graph_beats_the_bounds(graph: JointGraph, seed: int, share: float) -> None:
    schedule = extreme_schedule(graph, seed, share)
    peak = max(naive_profile(graph, schedule))
    time = sum(graph.ops[op].time for op in schedule.steps)
    if not any(op.phase is Phase.BACKWARD for op in graph.ops):
        return
    assert time_bound(graph, PhaseLimits(peak, peak), schedule) <= time
    assert least_peak_bound(graph, schedule) <= peak


def test_a_gradient_may_be_written_over_and_made_again() -> None:
    """Only the last version of a gradient stays: its reader takes the place of an earlier one."""
    net = Net()
    net.op(Phase.FORWARD, [net.input()], [1], time=1)
    (gradient,) = net.op(Phase.BACKWARD, [net.input(0, tangent=True)], [4], time=3)
    net.op(Phase.BACKWARD, [gradient], [4], time=5, overwrites=(gradient,))
    net.gradients = {gradient}
    assert_optima(net.joint(), [(4, 12), (8, 9)])


def test_a_released_output_may_be_written_over_once_it_is_made_again() -> None:
    """Its first version is the caller's, a later one is not."""
    net = Net()
    (output,) = net.op(Phase.FORWARD, [net.input()], [4], time=1)
    (gradient,) = net.op(
        Phase.BACKWARD, [net.input(0, tangent=True), output], [4], time=3, overwrites=(output,)
    )
    net.gradients = {gradient}
    assert_optima(net.joint(released_outputs=frozenset({output})), [(4, 5), (8, 4)])


def test_a_held_output_takes_nothing_before_it_is_made() -> None:
    """It can be made last, when what takes most is gone."""
    net = Net()
    (large,) = net.op(Phase.FORWARD, [net.input()], [8], time=1)
    (small,) = net.op(Phase.FORWARD, [large], [1], time=1)
    (held,) = net.op(Phase.FORWARD, [net.input()], [4], time=1)
    net.op(Phase.BACKWARD, [net.input(0, tangent=True), small], [1], time=1)
    net.held = {held}
    assert_optima(net.joint(), [(9, 4)])


def assert_optima(graph: JointGraph, front: list[tuple[int, int]]) -> None:
    """What enumeration finds is ``front``; the search finds it too, and no relaxation claims more."""
    assert fastest_by_enumeration(graph, len(graph.ops) + MORE) == front
    for moments in (choose_moments(graph, [1] * len(graph.ops), n + 1) for n in range(len(graph.ops))):
        for peak, time in front:
            assert least_time(graph, PhaseLimits(peak, peak)) == time
            assert_bounds(graph, moments, peak, time)


def test_a_chain_has_to_recompute_what_does_not_fit() -> None:
    """Twelve layers of 10 bytes, at most eight values at a time: some of the layers run twice."""
    graph = chain(12)
    assert len(graph.ops) > 16  # too large to be searched: it is the relaxation's bound
    plain = plain_schedule(graph)
    once = sum(graph.ops[op].time for op in plain.steps)
    most = max(naive_profile(graph, plain))
    assert time_bound(graph, PhaseLimits(most, most), plain) == once
    bounds = [time_bound(graph, PhaseLimits(limit, limit), plain) for limit in (80, 60, 40)]
    assert once + 300 <= bounds[0] <= bounds[1] <= bounds[2]
    assert 30 <= least_peak_bound(graph, plain) <= 80


def test_a_bound_that_is_not_near_is_searched_for_in_whole_numbers() -> None:
    """Where the relaxation keeps a part of a value, CP-SAT proves more: never more than is so."""
    graph = chain(12)
    assert len(graph.ops) > MOST_OPS
    more = 0
    for seed, share in product(range(4), (0.5, 0.8, 1.0)):
        schedule = extreme_schedule(graph, seed, share)
        limit = max(naive_profile(graph, schedule))
        few, much = (time_bound(graph, PhaseLimits(limit, limit), schedule, e) for e in (MANY, THOROUGH))
        assert few <= much <= sum(graph.ops[op].time for op in schedule.steps)
        more += few < much
    assert more


def test_moments_come_in_the_order_of_their_dependencies() -> None:
    graph = chain(6)
    moments = choose_moments(graph, [op.id for op in graph.ops], 5)
    assert len(moments.ops) == 5 and list(moments.ops) == sorted(moments.ops)
    phases = [graph.ops[op].phase for op in moments.ops]
    assert moments.forward == phases.count(Phase.FORWARD)
    assert Phase.BACKWARD in phases
    for place, op in enumerate(moments.ops):
        assert moments.earliest[op] == moments.latest[op] == place + 1
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            assert moments.latest[op.id] <= moments.forward
        else:
            assert moments.earliest[op.id] >= moments.forward
    alone = moments_at(graph, [graph.phase_ops(Phase.BACKWARD)[-1]])
    assert alone.stages == 2 and set(alone.earliest) == {0, 1}


@st.composite
def programs(draw) -> LinearProgram:
    """A few binary variables under a few rows."""
    program, number = LinearProgram(), draw(st.integers(1, 5))
    coefficient = st.integers(-9, 9)
    for _ in range(number):
        program.variable(cost=draw(coefficient))
    for _ in range(draw(st.integers(0, 4))):
        columns = draw(st.sets(st.integers(0, number - 1)))
        program.at_most([(column, draw(coefficient)) for column in sorted(columns)], draw(coefficient))
    return program


def integer_optimum(program: LinearProgram) -> int | None:
    rows = list(zip(program._rows, program._columns, program._coefficients, strict=True))
    best = None
    for point in product((0, 1), repeat=len(program.cost)):
        left = [0] * len(program.limits)
        for row, column, coefficient in rows:
            left[row] += coefficient * point[column]
        if all(a <= b for a, b in zip(left, program.limits, strict=True)):
            cost = sum(c * x for c, x in zip(program.cost, point, strict=True))
            best = cost if best is None else min(best, cost)
    return best


@given(programs(), st.data())
@examples(100, deadline=None)
def test_any_dual_values_prove_a_bound(program: LinearProgram, data: st.DataObject) -> None:
    optimum = integer_optimum(program)
    if optimum is None:
        with pytest.raises(ValueError, match="no solution"):
            integer_bound(program, 1.0)
        return
    assert integer_bound(program, 1.0) == optimum
    values = st.integers(-(3 << 40), 9 << 40)
    assert program.proven_by([data.draw(values) for _ in program.limits]) <= optimum
    assert program.lower_bound() <= optimum


def test_a_fraction_is_rounded_down() -> None:
    """Three variables of cost one, at least half of their sum two: one and a half is the optimum."""
    program = LinearProgram()
    variables = [program.variable(cost=1) for _ in range(3)]
    program.at_most([(each, -2) for each in variables], -3)
    assert program.lower_bound() == 1


def test_numbers_that_are_too_large_to_search_are_relaxed() -> None:
    program = LinearProgram()
    large = program.variable(0, 1 << 40, cost=1 << 40)
    program.at_most([(large, -1)], -5)
    assert 0 < integer_bound(program, 1.0) <= 5 << 40


def test_a_negative_dual_value_proves_nothing() -> None:
    """The least of x from 0 to 10 where x ≤ 5 is 0; a row's dual value of −1 would make it 5."""
    program = LinearProgram()
    program.at_most([(program.variable(0, 10, cost=1), 1)], 5)
    assert program.proven_by([-(1 << 40)]) == 0


def test_a_row_that_always_holds_does_not_make_the_solver_careless() -> None:
    """Its accuracy is relative to all limits: beside a large one, anything passes for solved."""
    program = LinearProgram()
    variables = [program.variable(cost=100) for _ in range(3)]
    program.at_most([], 10**9)
    program.at_most([(each, -2) for each in variables], -3)
    assert program.lower_bound() >= 148
