"""Checkmate: the optimum of its kind of schedule, found by enumeration; what is rounded computes the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridremat
from hybridremat.errors import GraphSizeError
from hybridremat.graph.joint import JointGraph, Phase, Schedule, plain_schedule
from hybridremat.graph.memory import schedule_time
from hybridremat.sequence.checkmate.exact import solve
from hybridremat.sequence.checkmate.program import CheckmateProgram
from hybridremat.sequence.checkmate.rounding import at_least, at_random, rounded
from hybridremat.sequence.checkmate.stages import even_stages, one_op_stages
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.strategies import checkmate
from hybridremat.sequence.strategies.checkmate import CHECKMATE
from hybridremat.sequence.strategies.checkmate_lp import CHECKMATE_LP
from hybridremat.sequence.strategies.whole_graph import Found, WholeGraph, WholeGraphSearch
from support.examples import examples
from support.extreme_schedules import extreme_schedule
from support.joint_graphs import joint_graphs
from support.naive_memory import naive_profile
from support.nets import Net, chain
from support.tiny_steps import fastest_by_enumeration, tiny_steps
from support.training import small, train, train_plain
from support.wrapping import HOW

MORE = 2
"""Executions beyond one of each op in the schedules that are enumerated."""


def without_writing_over(graph: JointGraph) -> JointGraph:
    """The graph as Checkmate counts it."""
    return replace(graph, ops=tuple(replace(op, overwrites=()) for op in graph.ops))


def is_frontier_advancing(graph: JointGraph, schedule: Schedule) -> bool:
    """Each stage makes some earlier ops again, in the plain order and each once, and then its new op."""
    order = plain_schedule(graph).steps
    stages: list[list[int]] = [[]]
    for op in schedule.steps:
        if len(stages) > len(order):
            return False
        stages[-1].append(order.index(op))
        if op == order[len(stages) - 1]:
            stages.append([])
    forward = len(graph.phase_ops(Phase.FORWARD))
    again = [place for stage, places in enumerate(stages[:-1]) for place in places if place != stage]
    return (
        len(stages) == len(order) + 1
        and stages[-1] == []
        and all(places == sorted(set(places)) and places[-1] == now for now, places in enumerate(stages[:-1]))
        and schedule.num_forward == sum(map(len, stages[:forward]))
        and all(graph.ops[order[place]].phase is not Phase.BACKWARD for place in again)
    )


def fastest_of_the_kind(graph: JointGraph) -> list[tuple[int, int]]:
    """Peak and least time of the frontier-advancing schedules that are enumerated; none beats another."""
    return fastest_by_enumeration(graph, len(graph.ops) + MORE, only=partial(is_frontier_advancing, graph))


@given(tiny_steps())
@examples(60, deadline=None)
def test_checkmate_finds_the_optimum_of_its_kind(drawn: JointGraph) -> None:
    graph = without_writing_over(drawn)
    stages = one_op_stages(graph)
    front = fastest_of_the_kind(graph)
    once = sum(op.time for op in graph.ops)
    for peak, time in front:
        found = solve(CheckmateProgram(stages, peak))
        assert found.proved and found.schedule is not None
        assert max(naive_profile(graph, found.schedule)) <= peak
        assert schedule_time(graph, found.schedule) == once + found.bound <= time
        if len(found.schedule.steps) <= len(graph.ops) + MORE:
            assert is_frontier_advancing(graph, found.schedule)
            assert once + found.bound == time
    least = solve(CheckmateProgram(stages, front[-1][0], least_peak=True))
    assert least.proved and least.schedule is not None
    assert max(naive_profile(graph, least.schedule)) <= least.bound <= front[0][0]
    assert solve(CheckmateProgram(stages, least.bound - 1)).schedule is None


def assert_a_step(graph: JointGraph, schedule: Schedule) -> None:
    """What is read was made; new ops run once each in the plain order; nothing runs twice that must not."""
    made: set[int] = set()
    for now, op in enumerate(graph.ops[step] for step in schedule.steps):
        assert all(v in made or graph.values[v].producer is None for v in op.reads)
        assert (now >= schedule.num_forward) or op.phase is not Phase.BACKWARD
        assert now not in range(schedule.num_forward) or op.phase is Phase.FORWARD
        made.update(op.writes)
    assert tuple(dict.fromkeys(schedule.steps)) == plain_schedule(graph).steps
    for op in graph.ops:
        runs = schedule.steps.count(op.id)
        assert runs == 1 or (op.recomputable and not op.mutates and op.phase is not Phase.BACKWARD)


@given(joint_graphs(), st.integers(1, 30), st.floats(0, 1), st.integers(0, 1000))
@examples(80, deadline=None)
def test_whatever_is_kept_the_rest_is_made_again(
    graph: JointGraph, count: int, share: float, seed: int
) -> None:
    stages = even_stages(graph, count)
    assert stages.starts[-1] == len(graph.ops) and (len(stages) <= count + 1 or count == 1)
    values = [(stage, value.id) for stage in range(count) for value in graph.values]
    kept = {(stage, value): (value * 37 + stage * seed) % 101 / 100 for stage, value in values}
    for keeps in (at_least(share, kept), at_random(seed, kept)):
        schedule = rounded(stages, keeps)
        assert_a_step(graph, schedule)
        runs, held = stages.decisions(schedule)
        for stage, value in held:
            producer = graph.values[value].producer
            assert producer is not None and stages.first[producer] < stage
            assert keeps(stage, value) or stages.lasts(value, stage) or stage == len(stages)
        assert len(runs) == len(schedule.steps) - len(graph.ops)
    assert rounded(stages, lambda *_: True) == plain_schedule(graph)


@pytest.mark.slow
@given(joint_graphs(), st.integers(0, 100))
@examples(20, deadline=None)
def test_points_keep_their_figures_and_the_limit_is_searched_for(graph: JointGraph, percent: int) -> None:
    points = WholeGraphSearch(CHECKMATE_LP, Judge(graph))
    front = points.least()
    least, plain = front[0].peak, front[-1].peak
    limit = least + (plain - least) * percent // 100
    for point in (*front, *points.under(limit)):
        assert_a_step(graph, point.schedule)
        assert point.peak == max(naive_profile(graph, point.schedule))
        assert point.time == schedule_time(graph, point.schedule)


def test_what_a_gradient_of_the_forward_needs_may_run_again_at_the_end() -> None:
    net = Net()
    (first,) = net.op(Phase.FORWARD, [net.input()], [10], time=1)
    (gradient,) = net.op(Phase.FORWARD, [first], [10], time=1)
    net.op(Phase.FORWARD, [net.input()], [1], time=1)
    value = net.input(0, tangent=True)
    for workspace in (0, 25, 0):
        (value,) = net.op(Phase.BACKWARD, [value], [1], time=1, temp=workspace)
    net.gradients = {gradient}
    graph = net.joint()
    front = fastest_of_the_kind(graph)
    assert front == [(27, 8), (37, 6)]
    for peak, time in front:
        found = solve(CheckmateProgram(one_op_stages(graph), peak))
        assert found.schedule is not None and schedule_time(graph, found.schedule) == time


@pytest.mark.parametrize("strategy", [CHECKMATE.name, CHECKMATE_LP.name])
def test_what_a_policy_pins_is_recomputed(strategy: str) -> None:
    model, batch = small("mlp")
    pins = {"layers.1": "must_recompute"}
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="80%", strategy=strategy, policy=pins, **HOW)
    assert plan.predicted_peak <= plan.memory_limit and plan.overhead > 0


@pytest.mark.slow
def test_more_memory_is_never_slower_in_one_frontier() -> None:
    model, batch = small("mlp")
    found = hybridremat.frontier(model, kwargs=batch, strategy="checkmate", **HOW)
    shares = [0.55, 0.57, 0.59, 0.61, 0.63, 0.9]
    plans = [found.plan(memory_limit=int(share * found.plain_peak)) for share in shares]
    overheads = [plan.overhead for plan in plans]
    assert overheads == sorted(overheads, reverse=True)
    alone = hybridremat.plan(model, kwargs=batch, memory_limit="60%", strategy="checkmate", **HOW)
    rounded_alone = hybridremat.plan(model, kwargs=batch, memory_limit="60%", strategy="checkmate-lp", **HOW)
    assert alone.overhead <= rounded_alone.overhead


def test_what_is_proved_is_for_the_limit_that_was_asked_for() -> None:
    """A search under less, because schedules need more than it counts, proves nothing under the limit."""
    graph = chain(4)
    plain, asked = plain_schedule(graph), []

    class Search:
        def under(self, limit: int) -> Found:
            asked.append(limit)
            return Found([plain], least_time=1000 - limit)

        def least(self, known: int) -> Found:
            return Found([plain])

    points = WholeGraphSearch(WholeGraph("counted", lambda _: Search()), Judge(graph))
    (found,) = points.under(10)
    assert found == replace(points.least()[0], least_time=990)
    needs = max(naive_profile(graph, plain))
    assert asked[:2] == [10, 10 - (needs - 10)] and len(asked) > 2
    assert found.least_time == 990


def test_what_was_found_for_one_limit_goes_for_all() -> None:
    """A search finds the fast schedule under the small limit alone."""
    graph = chain(6)
    fast, slow = extreme_schedule(graph, 0, 0.3), extreme_schedule(graph, 0, 1.0)
    peaks = [max(naive_profile(graph, each)) for each in (fast, slow)]
    assert schedule_time(graph, fast) < schedule_time(graph, slow)

    class Search:
        def under(self, limit: int) -> Found:
            return Found([fast if limit == max(peaks) else slow])

        def least(self, known: int) -> Found:
            return Found([slow])

    points = WholeGraphSearch(WholeGraph("forgetful", lambda _: Search()), Judge(graph))
    assert fast in [each.schedule for each in points.under(max(peaks))]
    assert fast in [each.schedule for each in points.under(max(peaks) + 1)]


def test_nothing_is_made_again_before_it_updates_its_buffers() -> None:
    """A normalization that runs after the update of one of its statistics would spoil the other's."""
    net = Net()
    statistics = [net.input(1), net.input(1)]
    normal, *new = net.op(Phase.FORWARD, [net.input(), *statistics], [8, 1, 1])
    for buffer, updated in zip(statistics, new, strict=True):
        net.op(Phase.FORWARD, [buffer, updated], [], mutates=True, recomputable=False)
    last, *_ = net.op(Phase.FORWARD, [normal], [8])
    net.op(Phase.BACKWARD, [net.input(8, tangent=True), normal, last], [8])
    graph = net.joint()
    stages = one_op_stages(graph)
    assert [0 in again for again in stages.again] == [False, False, False, True, True]
    for keeps in (lambda *_: False, lambda *_: True):
        steps = rounded(stages, keeps).steps
        assert 0 not in steps[1 : steps.index(2)]


def test_a_large_graph_is_refused_with_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small("mlp")
    monkeypatch.setattr(checkmate, "MOST_RUNS", 10)
    with pytest.raises(GraphSizeError, match=r'too large: .* 10 are possible\. strategy="checkmate-lp"'):
        hybridremat.plan(model, kwargs=batch, memory_limit="80%", strategy="checkmate", **HOW)


@pytest.mark.parametrize("strategy", [CHECKMATE.name, CHECKMATE_LP.name])
def test_plans_train_as_plain_and_say_what_is_proved(strategy: str, tmp_path) -> None:
    model, batch = small("mlp")
    expected = train_plain(model, batch)
    hybridremat.wrap(model, kwargs=batch, memory_limit="70%", strategy=strategy, **HOW)
    plan = hybridremat.get_plan(model)
    trained = train(model, batch)
    assert expected.differences(trained) == []
    assert max(trained.peaks) == plan.predicted_peak <= plan.memory_limit
    assert plan.overhead > 0 and any(block.recomputed for block in plan.blocks)
    proved = "checkmate       none of its schedules is faster under this limit" in str(plan)
    assert (plan.strategy_gap == 0.0) == proved == (strategy == "checkmate")
    plan.save(tmp_path / "plan.json")
    loaded = hybridremat.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.certified(progress=False).optimality_gap is not None


@pytest.mark.slow
def test_a_frontier_solves_for_any_limit_that_is_asked_for() -> None:
    model, batch = small("mlp")
    found = hybridremat.frontier(model, kwargs=batch, strategy="checkmate", **HOW)
    asked = (found.points[-2].peak + found.points[-3].peak) // 2
    plan = found.plan(memory_limit=asked)
    alone = hybridremat.plan(model, kwargs=batch, memory_limit=asked, strategy="checkmate", **HOW)
    assert (plan.overhead, plan.strategy_gap) == (alone.overhead, 0.0)
    assert plan.predicted_peak <= asked and alone.strategy_gap == 0.0
    assert found.plan(max_overhead=alone.overhead).strategy_gap is None  # no limit, nothing proved
