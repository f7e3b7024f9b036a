"""Searches go as far as a plan can win back: counted work, the same in every run."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridremat
from hybridremat.blocks import cpsat_search, curtailed
from hybridremat.blocks.curtailed import curtailed_options, options_within, seconds_of, shares
from hybridremat.blocks.epsilon_constraint import explore_rectangles
from hybridremat.blocks.pareto import enumerate_options
from hybridremat.blocks.types import LOADING, BackwardStep, BlockProblem, ForwardOp
from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.planning import stages
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.planner import plan_graph
from hybridremat.sequence import effort
from hybridremat.sequence.effort import MOST, PlanningEffort, SearchBound, power_of_two
from hybridremat.sequence.exchange.search import Exchange
from hybridremat.sequence.polish.search import Polish
from support.brute_blocks import SOLVES, blocks, figures_of
from support.examples import examples
from support.nets import transformer
from support.quick_planning import CAPTURE
from support.training import small, train, train_plain
from support.wrapping import HOW, wrap


def chain_of(count: int) -> BlockProblem:
    """Ops in a row, of different times, each read by the backward."""
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), 3 + c % 5, 0) for c in range(count))
    steps = tuple(BackwardStep((c,), 8, 0, 8) for c in reversed(range(count)))
    return BlockProblem((8,) * count, ops, steps, frozenset({count - 1}), 8)


@pytest.fixture
def bounded(monkeypatch):
    """The bounds that users have; tests of other things plan with little effort as it is."""
    monkeypatch.setattr(effort, "CAPTURE", CAPTURE)


@examples(100)
@given(problem=blocks(), seconds=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3]))
def test_options_that_little_work_finds_are_options_with_their_exact_figures(problem, seconds) -> None:
    found = curtailed_options(problem, seconds)
    assert not all(problem.rerun_only(option) for option in found.options)
    for every, solo in ((found.options, False), (found.solo, True)):
        for option in every:
            early, peak = set(option.optional_forward), max(option.forward_peak, option.backward_peak)
            exact = figures_of(problem, set(option.saved), early, [*option.recompute], solo, option.idle)
            assert exact == (option.saved_bytes, peak, option.time)


@pytest.mark.full_effort
def test_much_work_finds_all_options_and_little_work_is_little(monkeypatch) -> None:
    problem = chain_of(14)
    assert options_within(problem, inf) == curtailed_options(problem, 100.0) == enumerate_options(problem)
    swept = []
    explore = curtailed.pareto.explore_peak_limits

    def counted(surface, *, limits, **how):
        explore(surface, limits=limits, **how)
        swept.append((surface.sweeps, surface.lattice.work))

    monkeypatch.setattr(curtailed.pareto, "explore_peak_limits", counted)
    seconds = seconds_of(problem) / 4
    few = curtailed_options(problem, seconds)
    ((sweeps, work),) = swept
    assert few.options and sweeps * work <= 1.5 * seconds * curtailed.ENTRIES_A_SECOND
    monkeypatch.setattr(curtailed, "solved_options", lambda *_: pytest.fail("CP-SAT"))
    assert curtailed_options(chain_of(60), 1e-3).options  # too large for sweeps, and for a model of CP-SAT


def test_what_is_allowed_for_blocks_goes_to_small_ones_first() -> None:
    small_one, middle, large = chain_of(6), chain_of(12), chain_of(14)
    costs = [seconds_of(each) for each in (small_one, middle, large)]
    assert costs == sorted(costs)
    every = [small_one, middle, large, small_one]
    assert shares([every], 2 * sum(costs)) == ((0,), {})
    chains, share = shares([every], costs[0] + costs[1] + costs[2] / 3)
    assert chains == (0,) and set(share) == {large}
    assert 0 < share[large] <= costs[2] / 3
    # the chain of less work comes first, and one for which nothing is left is not solved
    assert shares([[large], [small_one]], 2 * costs[0] + 4 * curtailed.CHAIN_OF_PAIR)[0] in ((1,), (0, 1))
    assert shares([[large] * 9, [small_one]], costs[0] + 4 * curtailed.CHAIN_OF_PAIR) == ((1,), {})


def test_work_follows_what_it_can_win(bounded) -> None:
    graph = transformer(2)
    found = PlanningEffort.of(graph, 100_000_000)
    assert found.step == 0.125 and found.capture == power_of_two(found.capture)
    assert found.seconds(0.0) == found.capture and found.seconds(0.2) == 25.0 and found.seconds(1) == MOST
    short = PlanningEffort.of(graph, 20_000_000)
    assert short.seconds(0.0) == short.capture and short.seconds(5.0) == 2 * short.capture
    bound = SearchBound(found, 100_000_000, 60_000_000)
    assert bound.left(100_000_000) == found.seconds(0.4) > bound.left(100_000_000, 95_000_000)
    bound.spend(3.0)
    assert bound.left(100_000_000) == found.seconds(0.4) - 3.0
    assert bound.left(60_000_000) == max(0.0, found.capture - 3.0)


def uneven(layers, scale):
    """Layers of different times; ``scale``: nanoseconds of one unit."""
    graph = transformer(layers)
    return replace(graph, ops=tuple(replace(op, time=(op.time + 7 * op.id % 31) * scale) for op in graph.ops))


def searched(graph, share, monkeypatch, **how):
    """The time of a plan under a share of the plain peak, and the work of its searches by kind."""
    spent = {"polish": 0.0, "exchange": 0}
    polish, exchange = Polish.__call__, Exchange.__call__

    def polished(self, schedule):
        found = polish(self, schedule)
        spent["polish"] += self.spent
        return found

    def exchanged(self, *given):
        before = self.simulations
        found = exchange(self, *given)
        spent["exchange"] += before - self.simulations
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Polish, "__call__", polished)
        patch.setattr(Exchange, "__call__", exchanged)
        limit = int(share * step_memory(graph, plain_schedule(graph)).peak)
        frontier = plan_graph(graph, cache=OptionCache(), workers=1, limit=limit, **how)
        return frontier.choose(limit, None).time, spent


@pytest.mark.slow
@pytest.mark.full_effort
def test_a_short_step_is_searched_less_and_a_long_one_as_before(monkeypatch) -> None:
    monkeypatch.setattr(effort, "CAPTURE", 0.01)
    monkeypatch.setattr(effort, "CAPTURE_OF_OP", 0.0)
    for scale in (1, 1_000_000):
        graph = uneven(6, scale)
        whole, most = searched(graph, 0.75, monkeypatch)
        found, spent = searched(graph, 0.75, monkeypatch, bounded=True)
        assert searched(graph, 0.75, monkeypatch, bounded=True) == (found, spent)  # plans repeat
        if scale == 1:
            assert spent["exchange"] < most["exchange"] and spent["polish"] == 0.0
            assert whole <= found <= 1.1 * whole
        else:
            assert found == whole and spent == most


@pytest.mark.full_effort
def test_a_limit_that_little_work_finds_nothing_for_is_looked_at_whole(bounded, monkeypatch, caplog) -> None:
    """And the least limit that a plan reports is one for which there is a plan."""
    model, batch = small("mlp")
    thorough = hybridremat.plan(model, kwargs=batch, memory_limit="100%", planning_budget="unlimited", **HOW)
    nothing = "hybridremat.planning.stages.shares"
    monkeypatch.setattr(nothing, lambda chains, _: ((0,), dict.fromkeys(chains[0], 0.0)))
    quick = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW)
    assert quick.least_peak >= thorough.least_peak
    again = hybridremat.plan(model, kwargs=batch, memory_limit=quick.least_peak, **HOW)
    assert again.needed <= quick.least_peak
    with caplog.at_level(logging.INFO, "hybridremat"):
        tight = hybridremat.plan(model, kwargs=batch, memory_limit=thorough.least_peak, **HOW)
    assert tight.needed <= thorough.least_peak
    assert quick.least_peak == thorough.least_peak or "solved whole" in caplog.text


@pytest.mark.full_effort
def test_a_limit_below_a_bound_is_refused_without_the_whole_search(bounded, monkeypatch, caplog) -> None:
    model, batch = small("mlp")
    thorough = hybridremat.plan(model, kwargs=batch, memory_limit="100%", planning_budget="unlimited", **HOW)
    usual = stages.shares

    def nothing_at_first(chains, seconds):
        second = seconds == effort.WHOLE * effort.FOR_BLOCKS
        return usual(chains, seconds) if second else ((0,), dict.fromkeys(chains[0], 0.0))

    monkeypatch.setattr(stages, "shares", nothing_at_first)
    proven = thorough.certified().certificate.least_bound
    for limit, whole in ((proven // 2, False), (thorough.least_peak * 49 // 50, True)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "hybridremat"), pytest.raises(InfeasibleLimitError) as refused:
            hybridremat.plan(model, kwargs=batch, memory_limit=limit, **HOW)
        assert ("solved whole" in caplog.text) == whole
        assert ("least feasible limit that was found" in str(refused.value)) != whole
        kept = hybridremat.plan(model, kwargs=batch, memory_limit=refused.value.least, **HOW)
        assert kept.needed <= refused.value.least
    least = hybridremat.plan(model, kwargs=batch, memory_limit=proven // 2, on_infeasible="least", **HOW)
    assert least.needed <= 1.01 * thorough.least_peak


class _Outputs(torch.nn.Module):
    """Cheap ops in a row, each with an output: no cut between them, so they are one block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 32))

    def forward(self, x):
        outputs = [x * self.weight]
        for _ in range(30):
            outputs.append(torch.sigmoid(torch.sin(outputs[-1])))
        return sum(each.square().mean() for each in outputs), outputs


@pytest.mark.full_effort
def test_a_block_of_many_cheap_ops_is_not_worth_a_model_of_cp_sat(bounded, monkeypatch) -> None:
    monkeypatch.setattr(curtailed, "solved_options", lambda *_: pytest.fail("CP-SAT"))
    model, batch = _Outputs(), {"x": torch.randn(16, 32)}
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW)
    expected = train_plain(model, batch, loss_in=lambda out: out[0])
    planned = wrap(model, batch, plan.needed)
    trained = train(planned, batch, loss_in=lambda out: out[0])
    assert expected.differences(trained) == [] and max(trained.peaks) <= plan.needed


@pytest.mark.slow
def test_models_of_cp_sat_that_take_long_to_load_are_solved_a_few_times(monkeypatch) -> None:
    """Deterministic seconds do not count what a solve takes before it searches."""
    problem = chain_of(12)
    assert enumerate_options(problem, SOLVES).solves > 10
    monkeypatch.setattr(cpsat_search, "MOST_LOADING", LOADING * len(problem.ops) * len(problem.steps))
    found = enumerate_options(problem, SOLVES)
    assert found.options and found.solves <= 4
    within = explore_rectangles(problem, SOLVES, solo=False, seconds=0.0)
    assert within.options and within.solves == 1
