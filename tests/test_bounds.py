"""Bounds of time and peak: never more than a schedule reaches, and the optimum where it can be enumerated."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Phase, plain_schedule
from hybridremat.sequence.bounds.certificate import least_peak_bound, time_bound
from hybridremat.sequence.bounds.linear_program import LinearProgram
from hybridremat.sequence.bounds.moments import choose_moments, moments_at
from hybridremat.sequence.bounds.relaxation import PhaseLimits, peak_program, time_program
from hybridremat.sequence.bounds.search import least_time
from support.examples import examples
from support.extreme_schedules import extreme_schedule
from support.joint_graphs import joint_graphs
from support.naive_memory import naive_profile
from support.nets import Net, chain
from support.tiny_steps import fastest_by_enumeration, tiny_steps

MORE = 1
"""Executions beyond one of each op in the schedules that are enumerated."""


@given(tiny_steps())
@examples(60, deadline=None)
def test_search_and_relaxation_never_claim_more_than_a_schedule_reaches(graph: JointGraph) -> None:
    moments = choose_moments(graph, [1] * len(graph.ops))
    for peak, time in fastest_by_enumeration(graph, len(graph.ops) + MORE):
        limits = PhaseLimits(peak, peak)
        searched = least_time(graph, limits)
        assert searched is not None and searched <= time
        assert time_program(graph, moments, limits).lower_bound() <= searched
        assert peak_program(graph, moments, peak).lower_bound() <= peak


def test_bounds_of_small_graphs_are_optima() -> None:
    """Of instances and limits, at least 95 % (what is enumerated has few executions more than ops)."""
    pairs: list[bool] = []

    @given(tiny_steps())
    @examples(40, derandomize=True, deadline=None, database=None)
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
    graph = net.joint()
    (tight, again), *others = fastest_by_enumeration(graph, len(graph.ops) + MORE)
    assert (tight, again) == (4, 12) and others == [(8, 9)]
    moments = choose_moments(graph, [1] * len(graph.ops))
    limits = PhaseLimits(tight, tight)
    assert least_time(graph, limits) == again
    assert time_program(graph, moments, limits).lower_bound() <= again
    assert peak_program(graph, moments, tight).lower_bound() <= tight


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
        return
    values = st.integers(-(3 << 40), 9 << 40)
    assert program.proven_by([data.draw(values) for _ in program.limits]) <= optimum
    assert program.lower_bound() <= optimum


def test_a_fraction_is_rounded_down() -> None:
    """Three variables of cost one, at least half of their sum two: one and a half is the optimum."""
    program = LinearProgram()
    variables = [program.variable(cost=1) for _ in range(3)]
    program.at_most([(each, -2) for each in variables], -3)
    assert program.lower_bound() == 1
