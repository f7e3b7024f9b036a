"""What a search promises: schedules that the judge allows under the limit, and a pool that loses nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import schedule_time
from hybridremat.graph.pins import Pins
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.planner import plan_graph
from hybridremat.sequence.exchange import improve
from hybridremat.sequence.exchange.improve import exchanges
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import OutsideMemory, PhasePeaks
from hybridremat.sequence.polish.improve import polishing
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.search import Goal, Level, search_all
from hybridremat.sequence.strategies.checkmate_lp import CHECKMATE_LP
from hybridremat.sequence.strategies.hybrid import HYBRID
from hybridremat.sequence.strategies.whole_graph import WholeGraphSearch
from support.examples import examples
from support.extreme_schedules import extreme_schedule
from support.joint_graphs import joint_graphs
from support.naive_memory import naive_profile
from support.nets import transformer

SEARCHES = {
    "exchanges": lambda judge: exchanges,
    "polishing": lambda judge: polishing,
    "checkmate-lp": lambda judge: WholeGraphSearch(CHECKMATE_LP, judge),
}


def pool_of(judge: Judge, seed: int) -> Pool:
    """Some schedules of a graph, and the plain one."""
    schedules = [plain_schedule(judge.graph)]
    schedules += [extreme_schedule(judge.graph, seed + n, n / 4) for n in range(5)]
    allowed = [each for each in schedules if judge.allows(each)]
    return Pool.of([replace(judge(each), chain=0) for each in dict.fromkeys(allowed)])


@pytest.mark.full_effort
@pytest.mark.parametrize("name", SEARCHES)
@examples(25, deadline=None)
@given(graph=joint_graphs(), seed=st.integers(0, 99), share=st.floats(0, 1), data=st.data())
def test_a_search_returns_what_its_judge_allows_and_the_limit(name, graph, seed, share, data) -> None:
    forward = [op.id for op in graph.ops if op.recomputable]
    saved = data.draw(st.sets(st.sampled_from(forward), max_size=2)) if forward else set()
    outside = OutsideMemory(data.draw(st.integers(0, 40)), data.draw(st.integers(1, 2)))
    judge = Judge(graph, Pins(frozenset(saved), frozenset()), outside)
    pool = pool_of(judge, seed)
    if not pool.points:
        return
    least, most = pool.points[0].needs, pool.points[-1].needs
    goal = Goal(limit := int(least + share * (most - least)), most)
    found = SEARCHES[name](judge)(judge, pool, goal)
    assert found.base == pool.base
    before, after = pool.under(limit), found.under(limit)
    assert before is not None and after is not None and after.time <= before.time
    for point in found.points:
        if point in pool.points:
            continue
        assert judge.allows(point.schedule) and point.needs <= limit
        profile = naive_profile(graph, point.schedule)
        assert point.peak == max(profile) and point.time == schedule_time(graph, point.schedule)
        assert point.phases.peak == point.peak and point.needs == judge.needs(point.schedule)
    for point in pool.points:
        assert any(each.needs <= point.needs and each.time <= point.time for each in found.points)


@pytest.mark.full_effort
@pytest.mark.parametrize("level", Level)
def test_a_plan_is_searched_for_by_all_of_a_strategy_and_others_by_what_is_worth_it(level) -> None:
    called = []

    def noted(search):
        def run(judge, pool, goal):
            found = search(judge, pool, goal)
            called.append((search.__name__, found is pool))
            return found

        return run

    graph = transformer(3)
    frontier = plan_graph(graph, cache=OptionCache(), workers=1)
    limit = frontier.candidates[len(frontier.candidates) // 2].needs
    goal = Goal(limit, frontier.plain_peak, level)
    search_all(map(noted, HYBRID.searches), frontier.judge, frontier.pool, goal)
    assert [name for name, _ in called] == ["exchanges", "polishing"]
    assert called[0][1] == (level is Level.REST)
    assert called[1][1] or level >= Level.FULL


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1), st.integers(0, 13))
def test_a_pool_tells_the_fastest_under_a_limit_and_the_next_faster_ones(figures, limit) -> None:
    schedule = plain_schedule(transformer(1))
    points = [SchedulePoint(PhasePeaks(n, 0, 0), t, 0, schedule, n) for n, t in figures]
    pool = Pool.of(points)
    fitting = [time for needs, time in figures if needs <= limit]
    found = pool.under(limit)
    assert (None if found is None else found.time) == min(fitting, default=None)
    times = sorted({each.time for each in pool.points if each.time < limit}, reverse=True)
    assert [each.time for each in pool.faster(limit, 2)] == times[:2]
    assert pool.with_points(points) == pool


def test_exchanges_come_down_to_the_limit_from_higher_ones(monkeypatch) -> None:
    limits = []

    class Noted(improve.Exchange):
        def __post_init__(self) -> None:
            limits.append(self.limit)
            super().__post_init__()

    monkeypatch.setattr(improve, "Exchange", Noted)
    frontier = plan_graph(transformer(2), cache=OptionCache(), workers=1)
    limit = frontier.candidates[len(frontier.candidates) // 3].needs
    exchanges(frontier.judge, frontier.pool, Goal(limit, frontier.plain_peak))
    assert limits == [*improve.higher_limits(limit, frontier.plain_peak), limit]
