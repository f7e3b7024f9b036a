"""Planning that ends by the clock: what was found by then is exact, keeps its limit, and says its gap."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given

import hybridremat
from hybridremat.blocks.pareto import enumerate_options
from hybridremat.blocks.quick_options import quick_options
from hybridremat.blocks.solve import solve_blocks
from hybridremat.blocks.types import BackwardStep, BlockProblem, ForwardOp
from hybridremat.cli import main as cli
from hybridremat.errors import LimitError
from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.planning import planner
from hybridremat.planning.option_cache import OptionCache
from hybridremat.sequence.frontier import look_near
from hybridremat.units import parse_seconds
from support.brute_blocks import blocks, figures_of
from support.examples import examples
from support.training import small, train, train_plain
from support.wrapping import HOW, three_limits, wrap

AT_ONCE = Deadline(0.0)


@pytest.fixture(autouse=True)
def _own_options(monkeypatch):
    """With a deadline blocks are solved in other processes, with full effort: not for other tests to find."""
    monkeypatch.setattr(planner, "OPTIONS", OptionCache())


# x → a (10) → b (4, temporary 3) → y (6); the backward reads b, then a.
CHAIN = BlockProblem(
    value_bytes=(10, 4, 6),
    ops=(ForwardOp((), (0,), 7, 0), ForwardOp((0,), (1,), 5, 3), ForwardOp((1,), (2,), 2, 0)),
    steps=(BackwardStep((1,), during=8, tail=0, after=5), BackwardStep((0,), during=9, tail=0, after=2)),
    outputs=frozenset({2}),
    gradient_in=6,
)


def test_a_deadline_passes_when_its_time_is_up_and_its_shares_before() -> None:
    now = [5.0]
    deadline = Deadline(10.0, clock=lambda: now[0])
    half = deadline.share(0.5)
    assert deadline and not deadline.passed and deadline.left == 10 and half.left == 5
    now[0] = 11.0
    assert half.passed and half.left == 0 and deadline.left == 4
    assert deadline.share(0.5).passed
    now[0] = 15.0
    assert deadline.passed
    assert not NO_DEADLINE and not NO_DEADLINE.passed and not NO_DEADLINE.share(0.5).passed


@pytest.mark.parametrize(
    "given, seconds", [(10, 10), (0.5, 0.5), ("10s", 10), ("1.5 min", 90), ("500 MS", 0.5), (".5h", 1800)]
)
def test_times_are_read(given: float | str, seconds: float) -> None:
    assert parse_seconds(given, name="planning_budget") == pytest.approx(seconds)


@pytest.mark.parametrize("given", [0, -1, "10", "0s", "ten", "10d", True, float("inf"), float("nan"), [1]])
def test_what_is_no_time_is_refused_before_anything_is_done(given: object) -> None:
    model, batch = small("mlp")
    with pytest.raises(LimitError, match=r'planning_budget=.* give seconds .*, or "unlimited"\.$'):
        wrap(model, batch, planning_budget=given)


@examples(150)
@given(blocks())
def test_quick_options_are_options_with_their_exact_figures(problem) -> None:
    found = quick_options(problem)
    if found is None:
        return
    best = enumerate_options(problem)
    for every, solo in ((found.options, False), (found.solo, True)):
        for option in every:
            early, peak = set(option.optional_forward), max(option.forward_peak, option.backward_peak)
            exact = figures_of(problem, set(option.saved), early, [*option.recompute], solo, option.idle)
            assert exact == (option.saved_bytes, peak, option.time)
    if best.unproved == 0 and best.options:
        assert min(each.time for each in found.options) >= min(each.time for each in best.options)
    if not any(op.optional for op in problem.ops) and not problem.never_saved:
        assert found.options[0].time == 0  # all that is read is saved


def test_quick_options_go_from_all_that_is_read_to_as_little_as_can_be() -> None:
    found = quick_options(CHAIN)
    assert found is not None
    assert {(option.saved, option.time) for option in found.options} >= {((0, 1, 2), 0), ((2,), 12)}
    assert [option.time for option in found.solo] == [12]


def test_blocks_that_are_not_solved_in_time_have_quick_options_that_are_not_kept() -> None:
    cache = OptionCache()
    assert solve_blocks([CHAIN], deadline=AT_ONCE) == {}
    hurried = cache.solve([CHAIN], 1, lambda *_: None, "auto", AT_ONCE)
    assert hurried == {CHAIN: quick_options(CHAIN)}
    assert cache.solve([CHAIN], 1, lambda *_: None) == solve_blocks([CHAIN], workers=1)


class Looked:
    """Points at slots, in the order in which they are looked at."""

    def __init__(self, count: int) -> None:
        self.slots: list[int] = []
        self.needs = {slot: 10 * slot for slot in range(count)}

    def __call__(self, slot: int):
        self.slots.append(slot)
        return type("Point", (), {"needs": self.needs[slot]})


def test_in_no_time_the_least_memory_and_what_just_fits_are_looked_at() -> None:
    looked = Looked(200)
    base = look_near(range(200), looked, [(990, 1004)], AT_ONCE)
    assert [point.needs for point in base] == [0]
    assert {0, 99, 100, 101} <= set(looked.slots) and len(looked.slots) <= 20


@pytest.mark.parametrize("name", [pytest.param("transformer", marks=pytest.mark.slow), "running"])
@pytest.mark.parametrize("budget", [1e-9, "5s"])
def test_a_step_that_is_planned_in_no_time_trains_as_the_plain_one(name: str, budget: float | str) -> None:
    plain = train_plain(*small(name))
    for limit in three_limits(*small(name), planning_budget=budget)[:2]:
        model, batch = small(name)
        wrap(model, batch, limit, planning_budget=budget)
        plan = hybridremat.get_plan(model)
        assert plan.optimality_gap is not None and 0 <= plan.optimality_gap < 1
        trained = train(model, batch)
        assert not trained.differences(plain)
        assert max(trained.peaks) == plan.predicted_peak <= limit


def test_a_plan_made_in_time_leaves_nothing_behind_for_one_that_takes_its_time() -> None:
    model, batch = small("transformer")
    alone = hybridremat.plan(model, kwargs=batch, memory_limit="60%", **HOW)
    hybridremat.plan(model, kwargs=batch, memory_limit="60%", planning_budget=1e-9, **HOW)
    assert hybridremat.plan(model, kwargs=batch, memory_limit="60%", **HOW) == alone
    assert alone.optimality_gap is None


def test_the_command_line_takes_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    small_gpt = ["--set", "n_layer=1", "--set", "n_embd=32", "--set", "n_head=2", "--set", "vocab_size=64"]
    how = ["--limit", "70%", "--cost-model", "flops", "--json", "--planning-budget", "2s"]
    assert cli.main(["plan", "gpt2", *small_gpt, *how]) == 0
    assert json.loads(capsys.readouterr().out)["certificate"]["limit"] > 0


def test_quick_options_serve_a_block_that_must_not_save_everything() -> None:
    problem = replace(CHAIN, never_saved=frozenset({0}))
    found = quick_options(problem)
    assert found is not None and not any(problem.rerun_only(option) for option in found.options)
