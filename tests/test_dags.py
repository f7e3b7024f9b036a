"""Graphs that are no models: schedules against their own replay, and against the optimum on tiny ones."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridremat
from hybridremat.errors import DagError, InfeasibleLimitError, LimitError
from hybridremat.sequence.dag_runs import Dag, Runs
from support.examples import examples


@st.composite
def dags(draw, most=7):
    count = draw(st.integers(2, most))
    edges = [(u, v) for v in range(count) for u in range(v) if draw(st.integers(0, 2)) == 0]
    figures = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    return count, edges, draw(figures), draw(figures)


def replayed(steps, edges, sizes):
    """The most bytes that are there: an output is there until the last that reads this version has run."""
    makers = {}
    for maker, reader in edges:
        makers.setdefault(reader, set()).add(maker)
    last, latest = list(range(len(steps))), {}
    for now, op in enumerate(steps):
        for maker in makers.get(op, ()):
            last[latest[maker]] = now  # a KeyError: it has not run
        latest[op] = now
    alive = ([sizes[op] for n, op in enumerate(steps) if n <= now <= last[n]] for now in range(len(steps)))
    return max(map(sum, alive))


def optimum(count, edges, sizes, times, budget):
    """The least time of any schedule, by Dijkstra over what has run and what is there; None if none fits."""
    makers = [{u for u, v in edges if v == op} for op in range(count)]
    sinks = frozenset(range(count)) - {u for u, _ in edges}
    queue, best = [(0, 0, frozenset(), frozenset())], {}
    number = 0
    while queue:
        spent, _, done, there = heapq.heappop(queue)
        if done == sinks:
            return spent
        if best.get((done, there), spent + 1) <= spent:
            continue
        best[done, there] = spent
        for op in range(count):
            if op in there or op in done or not makers[op] <= there:
                continue
            if sum(sizes[each] for each in there | {op}) > budget:
                continue
            after = there if op in sinks else there | {op}
            now_done = done | ({op} & sinks)
            for gone in subsets(after):
                number += 1
                heapq.heappush(queue, (spent + times[op], number, now_done, after - gone))
    return None


def subsets(items):
    found = [frozenset()]
    for item in items:
        found += [each | {item} for each in found]
    return found


@given(dags(most=5), st.integers(40, 110))
@examples(60, deadline=None)
def test_schedules_run_fit_and_are_no_faster_than_the_optimum(dag, share):
    count, edges, sizes, times = dag
    budget = max(1, share * replayed(range(count), edges, sizes) // 100)
    best = optimum(count, edges, sizes, times, budget)
    try:
        plan = hybridremat.plan_dag(range(count), edges, sizes, times, budget)
    except InfeasibleLimitError as error:
        assert error.limit == budget < error.least
        if best is not None:
            assert hybridremat.plan_dag(range(count), edges, sizes, times, error.least).budget == error.least
        return
    assert set(plan.steps) == set(range(count))
    assert replayed(plan.steps, edges, sizes) == plan.peak <= budget
    assert sum(times[op] for op in plan.steps) == plan.time
    assert best is not None
    assert plan.time >= best


def layered(count, seed):
    """Random layers of ops; each reads some of the two layers before."""
    drawn = random.Random(seed)
    layers = [list(range(start, min(count, start + 8))) for start in range(0, count, 8)]
    edges = set()
    for number, layer in enumerate(layers[1:], 1):
        before = layers[number - 1] + (layers[number - 2] if number > 1 else [])
        edges |= {(maker, op) for op in layer for maker in drawn.sample(before, 2)}
    sizes, times = ([drawn.randrange(1, 100) for _ in range(count)] for _ in range(2))
    return sorted(edges), sizes, times


@pytest.mark.parametrize(
    ("count", "seed", "budget", "starts", "most"),
    [
        (24, 9, "50%", 1, 0.0),  # by order alone
        (24, 8, "50%", 5, 0.0),  # 0.019 from one start
        (24, 11, "55%", 1, 0.0),  # 0.09 where room is made in one level
        (40, 13, "50%", 1, 0.18),  # 0.198 where nothing else makes room for what is left out
        (60, 13, "60%", 1, 0.08),  # nothing where room is made at one place alone
        (40, 10, "50%", 1, 0.02),  # nothing where only single executions run again
    ],
)
def test_orders_and_recomputations_fit_budgets_that_the_given_order_does_not(
    count, seed, budget, starts, most, monkeypatch
):
    monkeypatch.setattr("hybridremat.sequence.dag.STARTS", starts)
    edges, sizes, times = layered(count, seed)
    plain = replayed(range(count), edges, sizes)
    found = hybridremat.plan_dag(range(count), edges, sizes, times, budget)
    assert replayed(found.steps, edges, sizes) == found.peak <= found.budget < plain
    assert found.overhead <= most
    assert found == hybridremat.plan_dag(range(count), edges, sizes, times, budget)


@pytest.fixture
def few_simulations(monkeypatch):
    monkeypatch.setattr("hybridremat.sequence.dag.STARTS", 1)
    for name in ("MOVES", "EXCHANGES"):
        monkeypatch.setattr(f"hybridremat.sequence.dag.{name}", 20)


@pytest.mark.usefixtures("few_simulations")
def test_a_search_ends_with_what_it_has_when_its_time_is_over():
    edges, sizes, times = layered(20, 4)
    graph = range(20), edges, sizes, times, "55%"
    with pytest.raises(InfeasibleLimitError, match="none was found in planning_budget=1e-09"):
        hybridremat.plan_dag(*graph, planning_budget=1e-9)
    assert hybridremat.plan_dag(*graph, planning_budget="1h") == hybridremat.plan_dag(*graph)
    with pytest.raises(LimitError, match="planning_budget='soon' is no time"):
        hybridremat.plan_dag(*graph, planning_budget="soon")


@pytest.mark.usefixtures("few_simulations")
def test_it_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr("hybridremat.planning.progress.SOON", 0.0)
    edges, sizes, times = layered(20, 4)
    hybridremat.plan_dag(range(20), edges, sizes, times, "55%")
    said = capsys.readouterr().err
    assert "making room" in said
    assert "leaving executions out" in said
    hybridremat.plan_dag(range(20), edges, sizes, times, "55%", progress=False)
    assert not capsys.readouterr().err


def test_an_op_runs_again_where_no_order_fits():
    # a large value is read first and last, and cheap to make again
    ops, edges = ["big", "a", "b", "c"], [("big", "a"), ("a", "b"), ("b", "c"), ("big", "c")]
    times = {"big": 1, "a": 5, "b": 5, "c": 5}
    plan = hybridremat.plan_dag(ops, edges, bytes=[10, 6, 4, 1], times=times, budget=16)
    assert plan.steps == ("big", "a", "b", "big", "c")
    assert (plan.peak, plan.plain_peak, plan.overhead) == (16, 20, 1 / 16)


def test_a_networkx_graph_has_edges_and_figures():
    graph = nx.DiGraph([("a", "b"), ("b", "c")])
    for node in graph:
        graph.nodes[node].update(out=4, takes=2)
    plan = hybridremat.plan_dag(graph, bytes="out", times="takes")
    assert (plan.steps, plan.peak, plan.time) == (("a", "b", "c"), 8, 6)


def test_a_training_step_is_planned_as_one():
    forward, backward = [f"f{n}" for n in range(6)], [f"b{n}" for n in reversed(range(6))]
    edges = [*pairwise(forward), *pairwise(backward)]
    edges += [(f"f{n}", f"b{n}") for n in range(6)]
    ops = [*forward, *backward]
    how = {"bytes": [10] * 12, "times": [1] * 12}
    plan = hybridremat.plan_dag(ops, edges, **how, budget="60%", backward=backward)
    assert replayed(plan.steps, edges, dict.fromkeys(ops, 10)) == plan.peak <= plan.budget
    assert 0 < plan.overhead < 0.6
    assert [each for each in plan.steps if each in backward] == backward


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"edges": [("a", "b"), ("b", "c"), ("c", "b")]}, "'b' -> 'c' -> 'b'"),
        ({"edges": [("a", "d")]}, "names 'd', which is no op"),
        ({"ops": ["a", "b", "a"]}, "two ops are named 'a'"),
        ({"ops": []}, "no ops"),
        ({"ops": nx.Graph([("a", "b")]), "edges": ()}, "no direction"),
        ({"bytes": [1, -1, 1]}, "bytes of 'b' are -1"),
        ({"bytes": [1, 1.5, 1]}, "bytes of 'b' are 1.5"),
        ({"times": {"a": 1, "b": 1}}, "times of 'c' are None"),
        ({"times": [1, 1]}, "2 figures for 3 ops"),
        ({"times": "time"}, "give a networkx DiGraph"),
        ({"backward": ["x"]}, "'x', which is no op"),
        ({"backward": (each for each in ["x"])}, "'x', which is no op"),
        ({"backward": 3}, "backward= are no names of ops"),
        ({"ops": None}, "ops= are no names of ops"),
        ({"ops": [["a"], "b", "c"]}, "unhashable"),
        ({"ops": ["a", None, "c"]}, "an op None"),
        ({"edges": None}, "no pairs"),
        ({"edges": [("a",)]}, "no pairs"),
        ({"edges": [("a", "b", 2)]}, "no pairs"),
        ({"edges": [{"a", "b"}]}, "no pairs"),
        ({"edges": [("a", [])]}, "unhashable"),
        ({"bytes": None}, "give a list in the order of the ops"),
        ({"bytes": {"a", "b", "c"}}, "give a list in the order of the ops"),
        ({"bytes": {"a": 1, "b": 1, "c": 1, "d": 1}}, "'d', which is no op"),
        ({"bytes": [1, 1, 2**62]}, "give them in larger units"),
        ({"times": [1, 1, 10**330]}, "give them in larger units"),
        ({"backward": ["a"]}, "'b' runs behind 'a' of the backward"),
    ],
)
def test_bad_graphs_are_typed_errors(given, says):
    usual = {"ops": ["a", "b", "c"], "edges": [("a", "b")], "bytes": [1, 1, 1], "times": [1, 1, 1]}
    with pytest.raises(DagError, match=says):
        hybridremat.plan_dag(**{**usual, **given})


def test_figures_may_be_arrays_large_or_zero():
    ops, edges = range(4), np.array([(0, 1), (1, 2), (2, 3), (0, 3)])
    sizes = np.array([10, 6, 4, 1]) * 2**56
    plan = hybridremat.plan_dag(ops, edges, sizes, np.array([1, 5, 5, 5]), 16 * 2**56)
    assert (plan.steps, plan.peak, plan.budget) == ((0, 1, 2, 0, 3), 2**60, 2**60)
    nothing = hybridremat.plan_dag(ops, edges, [0] * 4, [0] * 4)
    assert (nothing.steps, nothing.peak, nothing.overhead) == ((0, 1, 2, 3), 0, 0.0)


def test_what_would_wait_instead_counts_where_room_is_looked_for():
    # 20 outputs whose inputs would wait, more than are tried one by one, and a source of 5 bytes
    rows = range(20)
    edges = [(("in", n), ("out", n)) for n in rows] + [(("out", n), ("use", n)) for n in rows]
    edges += [(("use", n), ("use", n + 1)) for n in rows[:-1]] + [(("use", 19), "wide"), ("wide", "small")]
    edges += [("small", ("last", n)) for n in rows] + [(("out", n), ("last", n)) for n in rows]
    edges += [("source", ("use", 0)), ("source", ("last", 0))]
    ops = [*((kind, n) for n in rows for kind in ("in", "out")), "source", *(("use", n) for n in rows)]
    ops += ["wide", "small", *(("last", n) for n in rows)]
    size = {"in": 10, "out": 11, "use": 1, "last": 0, "source": 5, "wide": 99, "small": 0}
    sizes = {op: size[op if isinstance(op, str) else op[0]] for op in ops}
    times = {op: 100 if op[0] == "in" else 1 for op in ops}
    plan = hybridremat.plan_dag(ops, edges, sizes, times, 20 * 11 + 1 + 99 + 5 - 5)
    assert plan.time == plan.plain_time + 1
    assert replayed(plan.steps, edges, sizes) == plan.peak <= plan.budget


def test_room_may_save_time_too():
    # what is made again later leaves an execution that nobody reads
    edges = [(1, 3), (2, 3), (4, 5), (0, 6), (5, 6), (0, 7), (2, 7), (3, 7), (4, 7), (6, 7)]
    sizes = [30, 9, 1, 1, 30, 9, 0, 0]
    plan = hybridremat.plan_dag(range(8), edges, sizes, [1] * 8, 67)
    assert replayed(plan.steps, edges, sizes) == plan.peak <= 67


def test_a_training_step_that_does_not_fit_says_what_is_enough():
    edges = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 4), (1, 5), (2, 3), (3, 4), (4, 5)]
    step = {"ops": range(6), "edges": edges, "bytes": [9, 1, 2, 3, 1, 9], "times": [0, 2, 1, 0, 1, 2]}
    with pytest.raises(InfeasibleLimitError, match="no schedule fits budget 14 B") as caught:
        hybridremat.plan_dag(**step, budget=14, backward=[5])
    assert hybridremat.plan_dag(**step, budget=caught.value.least, backward=[5]).peak == caught.value.least


def test_a_budget_below_the_largest_op_names_it():
    with pytest.raises(InfeasibleLimitError, match="'b' takes 9 bytes with what it reads") as caught:
        hybridremat.plan_dag(["a", "b"], [("a", "b")], [4, 5], [1, 1], 8)
    assert (caught.value.limit, caught.value.least) == (8, 9)


@given(dags(), st.randoms(use_true_random=False))
@examples(100, deadline=None)
def test_executions_that_move_come_and_go_still_compute_everything(dag, drawn):
    count, edges, sizes, times = dag
    reads = tuple(tuple(sorted(maker for maker, reader in edges if reader == op)) for op in range(count))
    runs, order = Runs.once(Dag(tuple(sizes), tuple(times), reads)), np.arange(count)
    for _ in range(12):
        there = runs.there(order)
        steps = [runs.ops[run] for run in order.tolist()]
        assert set(steps) == set(range(count))
        assert replayed(steps, edges, sizes) == there.level.max()
        assert runs.time == sum(times[op] for op in steps)
        run = drawn.randrange(len(runs.ops))
        kind = drawn.choice(("move", "again", "leave out"))
        behind = [int(there.place[reader]) for reader in runs.readers[run]]
        if kind == "move":
            to = drawn.randrange(len(runs.ops))
            changed = runs.moved(order, there, run, to) if to != there.place[run] else None
            order = order if changed is None else changed
        elif kind == "again" and behind and max(behind) > there.place[run] + 1:
            new, inserted = runs.made_again(order, there, run, int(there.place[run]) + 1)
            assert new.ops[-1] == runs.ops[run]
            runs, order = new.without_unread(inserted)
        elif kind == "leave out" and runs.again:
            runs, order = runs.left_out(order, drawn.choice(runs.again))


def test_an_execution_again_stays_behind_what_reads_the_one_before():
    dag = Dag((1, 1, 1, 1), (1, 1, 1, 1), ((), (0,), (0,), (1, 2)))
    runs, order = Runs.once(dag), np.arange(4)
    runs, order = runs.made_again(order, runs.there(order), 0, 1)
    assert [runs.ops[run] for run in order] == [0, 1, 0, 2, 3]
    assert runs.moved(order, runs.there(order), int(order[2]), 1) is None
