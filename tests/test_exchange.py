"""Exchanges: every changed schedule computes the same, keeps limit and pins, and takes no more time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Phase, Schedule, plain_schedule
from hybridremat.graph.memory import MemorySimulator, schedule_time
from hybridremat.graph.pins import NO_PINS, Pins, obeys
from hybridremat.sequence.bounds.certificate import time_bound
from hybridremat.sequence.bounds.relaxation import PhaseLimits
from hybridremat.sequence.dead_code import DeadCodeElimination
from hybridremat.sequence.exchange.edits import Edits, Versions
from hybridremat.sequence.exchange.search import Exchange
from hybridremat.sequence.judge import Judge
from support.examples import examples
from support.extreme_schedules import extreme_schedule
from support.joint_graphs import joint_graphs
from support.judges import AllowsOne
from support.naive_memory import naive_profile
from support.nets import Net, dear_and_cheap
from support.same_steps import assert_computes_the_same


def exchange(graph: JointGraph, limit: int, pins: Pins = NO_PINS, simulations: int = 60) -> Exchange:
    return Exchange(Judge(graph, pins), limit, simulations)


@given(joint_graphs(), st.integers(0, 1000), st.sampled_from((0.3, 0.7, 1.0)))
@examples(60, deadline=None)
def test_exchanges_keep_the_limit_and_save_time(graph: JointGraph, seed: int, share: float) -> None:
    start = extreme_schedule(graph, seed, share)
    limit = max(naive_profile(graph, start))
    saved = frozenset(op.id for op in graph.ops if start.steps.count(op.id) == 1 and op.id % 3 == 0)
    pins = Pins(must_save=frozenset(op for op in saved if op in start.steps[: start.num_forward]))
    found, origin = exchange(graph, limit, pins)(start)
    assert origin == 0
    assert_computes_the_same(graph, found, start)
    assert max(naive_profile(graph, found)) <= limit
    assert schedule_time(graph, found) <= schedule_time(graph, start)
    assert obeys(graph, found, pins)
    assert exchange(graph, limit, pins)(start) == (found, 0)


@given(joint_graphs(), st.integers(0, 1000))
@examples(60, deadline=None)
def test_each_edit_computes_the_same(graph: JointGraph, seed: int) -> None:
    schedule = extreme_schedule(graph, seed, 0.5)
    edits, versions = Edits(graph), Versions(graph, schedule.steps)
    split, end = schedule.num_forward, len(schedule.steps)
    done: set[int] = set()
    for now, op in enumerate(schedule.steps):
        if now >= split and op in done:
            changed = edits.without(schedule, edits.only_for(schedule, versions, now))
            assert_computes_the_same(graph, changed, schedule)
        done.add(op)
    for version in versions:
        places = [read for read in version.reads if read >= split]
        if places and (ops := edits.made_again(versions, version.value, places[-1])) is not None:
            changed = edits.inserted(schedule, ops, places[-1])
            assert_computes_the_same(graph, changed, schedule)
        for to in range(max(split, version.birth + 1), min(end, version.birth + 4)):
            if to not in version.reads and (moved := edits.advanced(schedule, versions, version, to)):
                assert sorted(moved.steps) == sorted(schedule.steps)
                assert_computes_the_same(graph, moved, schedule)
        first = min(version.reads, default=len(schedule.steps))
        for to in {first, *range(version.birth + 2, min(first, version.birth + 5))}:
            if moved := edits.postponed(schedule, versions, version, to):
                assert sorted(moved.steps) == sorted(schedule.steps)
                assert_computes_the_same(graph, moved, schedule)


@given(joint_graphs(), st.integers(0, 1000), st.floats(0, 1))
@examples(100, deadline=None)
def test_what_is_only_for_an_execution_is_what_is_dead_without_it(
    graph: JointGraph, seed: int, share: float
) -> None:
    remove_dead = DeadCodeElimination(graph)
    schedule = remove_dead(extreme_schedule(graph, seed, share))
    edits, done = Edits(graph), set[int]()
    versions = edits.versions(schedule)
    for now, op in enumerate(schedule.steps):
        if now >= schedule.num_forward and op in done:
            steps = (*schedule.steps[:now], *schedule.steps[now + 1 :])
            slowly = remove_dead(Schedule(steps, schedule.num_forward))
            assert edits.without(schedule, edits.only_for(schedule, versions, now)) == slowly
        done.add(op)


def test_what_draws_numbers_or_must_run_once_is_not_moved() -> None:
    def moved(**fields: bool) -> tuple[Schedule | None, Schedule | None]:
        net = Net()
        first, *_ = net.op(Phase.BACKWARD, [net.input(0, tangent=True)], [1])
        made, *_ = net.op(Phase.BACKWARD, [first], [1], **fields)
        other, *_ = net.op(Phase.BACKWARD, [first], [1])
        net.op(Phase.BACKWARD, [other, made], [1])
        graph = net.joint()
        schedule = Schedule((0, 1, 2, 3), 0)
        edits, versions = Edits(graph), Versions(graph, schedule.steps)
        produced = {version.value: version for version in versions}
        postponed = edits.postponed(schedule, versions, produced[made], produced[made].reads[0])
        return postponed, edits.advanced(schedule, versions, produced[first], 1)

    assert [step is not None for step in moved()] == [True, True]
    assert moved(random=True) == moved(recomputable=False) == moved(mutates=True) == (None, None)


def test_a_dear_recomputation_is_exchanged_for_a_cheap_one() -> None:
    graph, kept_cheap = dear_and_cheap()
    limit = max(naive_profile(graph, kept_cheap))
    assert limit < max(naive_profile(graph, plain_schedule(graph)))
    found, _ = exchange(graph, limit)(kept_cheap)
    assert schedule_time(graph, found) == schedule_time(graph, kept_cheap) - 990
    assert max(naive_profile(graph, found)) <= limit


def test_what_does_not_obey_is_not_taken() -> None:
    graph, start = dear_and_cheap()
    limit = max(naive_profile(graph, start))
    free = exchange(graph, limit)
    stubborn = Exchange(AllowsOne(graph, allowed=start), limit, 60)
    assert free(start) != (start, 0)
    assert stubborn(start, [plain_schedule(graph)]) == (start, 0)


def test_a_schedule_beyond_the_limit_is_brought_under_it() -> None:
    net = Net()
    value = net.input()
    for _ in range(8):
        value = net.layer("layer", [value], 100, time=10)
    net.derive(value)
    graph = net.joint()
    plain = extreme_schedule(graph, 0, 0.0)
    worst = extreme_schedule(graph, 0, 1.0)
    limit = max(naive_profile(graph, plain)) - 100
    assert max(naive_profile(graph, worst)) <= limit
    found, origin = exchange(graph, limit)(worst, [plain])
    assert origin == 1
    assert schedule_time(graph, found) == schedule_time(graph, plain) + 10
    assert time_bound(graph, PhaseLimits(limit, limit), found) <= schedule_time(graph, found)


def test_a_gradient_that_nobody_reads_is_made_behind_the_highest_point() -> None:
    net = Net()
    (kept,) = net.op(Phase.FORWARD, [net.input()], [100], time=1000)
    tangent = net.input(0, tangent=True)
    net.backward([tangent], 100, gradient=True)
    (large,) = net.op(Phase.BACKWARD, [tangent], [300])
    small = net.backward([large], 1)
    net.backward([small, kept], 1)
    graph = net.joint()
    again = Schedule((0, 1, 2, 3, 0, 4), 1)
    found, _ = exchange(graph, max(naive_profile(graph, again)))(again)
    assert found == Schedule((0, 2, 3, 1, 4), 1)


def test_what_takes_next_to_no_time_is_left_out_at_last() -> None:
    net = Net()
    x = net.input()
    small, large = net.layer("small", [x], 10, time=30), net.layer("large", [x], 100, time=100_000)
    net.derive(net.layer("join", [small, large], 10))
    graph = net.joint()
    once = plain_schedule(graph)
    maker = graph.values[small].producer
    steps = (*once.steps[: once.num_forward], maker, *once.steps[once.num_forward :])
    assert exchange(graph, 10**9)(Schedule(steps, once.num_forward))[0] == once


def test_nothing_is_tried_beyond_the_effort() -> None:
    net = Net()
    value = net.input()
    for _ in range(8):
        value = net.layer("layer", [value], 100)
    net.derive(value)
    graph = net.joint()
    worst = extreme_schedule(graph, 0, 1.0)
    limit = MemorySimulator(graph)(worst).peak
    assert exchange(graph, limit, simulations=0)(worst) == (worst, 0)
