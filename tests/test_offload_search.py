"""Schedules with moves: what the search returns, and what no schedule with moves beats."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import Schedule, plain_schedule
from hybridremat.graph.pins import Pins
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload import exchange, search
from hybridremat.sequence.offload.bound import offload_bound
from hybridremat.sequence.offload.exchange import Exchanges
from hybridremat.sequence.offload.link import Link
from hybridremat.sequence.offload.moved import with_moves
from hybridremat.sequence.offload.search import fastest_placed, offloading
from hybridremat.sequence.pool import Pool
from hybridremat.sequence.search import Goal, Level
from support.examples import examples
from support.moves import chains, every_move, mirrored

MIB = 1 << 20


def large(graph):
    """The graph with values of as many MiB as it has bytes, and microseconds for nanoseconds."""
    values = tuple(replace(value, bytes=value.bytes * MIB) for value in graph.values)
    return replace(graph, values=values, ops=tuple(replace(op, time=op.time * 1000) for op in graph.ops))


GRAPHS = chains(most=4).map(large)
LINKS = st.builds(
    Link, out=st.sampled_from([5e11, 2e12]), back=st.sampled_from([5e11, 1e12]), latency=st.just(10)
)


def schedules(graph):
    """The plain schedule, and those in which some forward ops run again right before they are read."""
    plain = plain_schedule(graph)
    split = plain.num_forward
    for again in itertools.product((False, True), repeat=split):
        steps = list(plain.steps[:split])
        for op in plain.steps[split:]:
            (read,) = (value for value in graph.ops[op].reads if value < split)
            first = next((n for n in range(read, -1, -1) if not again[n]), -1)
            steps += [*range(first + 1, read + 1), op]
        yield Schedule(tuple(steps), split)


def every_step(judge):
    """All of them with all moves."""
    for schedule in schedules(judge.graph):
        waiting = judge.simulate.waiting(schedule)
        for picked in itertools.product(*(tuple(every_move(w, schedule.num_forward)) for w in waiting)):
            yield judge(replace(schedule, moves=tuple(each for each in picked if each)))


@given(GRAPHS, LINKS, st.integers(30, 90))
@examples(15)
def test_no_schedule_with_moves_beats_the_bound(graph, link, share):
    judge = Judge(graph, link=link)
    plain = judge(plain_schedule(graph))
    limit = plain.peak * share // 100
    fitting = [each.time for each in every_step(judge) if each.needs <= limit]
    if fitting:
        assert offload_bound(judge, limit, plain.schedule) <= min(fitting)


@given(GRAPHS, LINKS, st.integers(30, 100))
@examples(30)
def test_what_the_search_returns_fits_and_is_as_it_says(graph, link, share):
    judge = Judge(graph, link=link)
    pool = Pool.of(map(judge, schedules(graph)))
    plain = judge(plain_schedule(graph))
    limit = plain.peak * share // 100
    found = offloading(judge, pool, Goal(limit, plain.peak))
    best = found.under(limit)
    assert found.base == pool.base
    assert all(judge(each.schedule).time == each.time for each in found.points)
    placed = [each for point in pool.points if (each := with_moves(judge, point, limit))]
    assert [each.time for each in fastest_placed(judge, pool, limit, 3)] == sorted(p.time for p in placed)[:3]
    assert (best is None) == (not placed)
    if best is not None:
        assert best.time <= min(each.time for each in placed) and judge.allows(best.schedule)
        least = min((each.time for each in every_step(judge) if each.needs <= limit), default=0)
        assert least <= best.time


def test_without_a_link_the_pool_stays_as_it_is():
    judge = Judge(large(mirrored([10, 10, 10, 10])))
    pool = Pool.of([judge(plain_schedule(judge.graph))])
    goal = Goal(pool.points[0].peak * 8 // 10, pool.points[0].peak, Level.QUICK)
    assert offloading(judge, pool, goal) is pool
    assert len(offloading(replace(judge, link=Link(1e12, 1e12)), pool, goal).points) == 2


def test_nothing_is_exchanged_where_nothing_can_be_gained(monkeypatch):
    monkeypatch.delattr(search, "Exchanges")
    judge = Judge(large(mirrored([10, 10, 10, 10])), link=Link(1e15, 1e15, latency=0))
    plain = judge(plain_schedule(judge.graph))
    found = offloading(judge, Pool.of([plain]), Goal(plain.peak * 8 // 10, plain.peak))
    best = found.under(plain.peak * 8 // 10)
    assert best is not None and best.time == plain.time and best.schedule.moves


def test_what_is_to_be_saved_stays_and_the_host_has_a_limit():
    graph = large(mirrored([10, 10, 10, 10]))
    link = Link(1e12, 1e12)
    judge = Judge(graph, link=link)
    plain = judge(plain_schedule(graph))
    moved = with_moves(judge, plain, plain.peak - MIB)
    assert moved is not None and moved.host == 10 * MIB and len(moved.schedule.moves) == 1
    stays = moved.schedule.moves[0].value
    pinned = with_moves(replace(judge, pins=Pins(must_save=frozenset({stays}))), plain, plain.peak - MIB)
    assert pinned is not None and all(move.value != stays for move in pinned.schedule.moves)
    assert with_moves(replace(judge, host_limit=10 * MIB - 1), plain, plain.peak - MIB) is None
    assert with_moves(replace(judge, host_limit=10 * MIB), plain, plain.peak - MIB) == moved


@given(GRAPHS, LINKS, st.integers(30, 90), st.integers(1, 40))
@examples(20)
def test_exchanges_go_on_where_they_were(graph, link, share, few):
    """By a few at a time they lead where many lead, in as many trials, and each is faster or none."""
    judge = Judge(graph, link=link)
    pool = Pool.of(map(judge, schedules(graph)))
    goal = Goal(pool.points[-1].peak * share // 100, pool.points[-1].peak)
    for start in fastest_placed(judge, pool, goal.limit, 2):
        whole, bits = (Exchanges(judge, goal, start) for _ in range(2))
        tried, times = whole.go_on(10**6), [start.time]
        parts = []
        while not bits.ended:
            parts.append(bits.go_on(few))
            times.append(bits.best.time)
        assert whole.ended and bits.best == whole.best and sum(parts) == tried and max(parts) <= few
        assert times == sorted(times, reverse=True) and bits.best.needs <= goal.limit


@given(GRAPHS, LINKS, st.integers(30, 90))
@examples(20)
def test_moves_that_take_too_long_are_none(graph, link, share):
    judge = Judge(graph, link=link)
    plain = judge(plain_schedule(graph))
    limit = plain.peak * share // 100
    found = with_moves(judge, plain, limit)
    if found is not None:
        assert with_moves(judge, plain, limit, most=found.time) == found
        assert with_moves(judge, plain, limit, most=found.time - 1) is None


def test_what_is_made_again_is_tried_before_what_stays(monkeypatch):
    """What stays has another move for it: first tried is what promises to save the link some time."""
    judge = Judge(large(mirrored([10, 10, 10, 10])), link=Link(1e11, 1e11))
    plain = judge(plain_schedule(judge.graph))
    limit, seen = plain.peak * 7 // 10, []

    def placed(_judge, point, _limit, stays, _most):
        seen.append((len(point.schedule.steps), len(stays)))

    monkeypatch.setattr(exchange, "with_moves", placed)
    (start,) = fastest_placed(judge, Pool.of([plain]), limit, 1)
    assert Exchanges(judge, Goal(limit, plain.peak), start).go_on(99) == len(seen)
    assert [stays for _, stays in seen] == sorted(stays for _, stays in seen)
    assert {steps - len(plain.schedule.steps) > 0 for steps, stays in seen if not stays} == {True}
    assert sum(stays for _, stays in seen) == len(start.schedule.moves)
