"""Others' ways of moving: all that is saved, and blocks' inputs, each one ahead; no limit is asked for."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from tempfile import gettempdir

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridremat
from hybridremat.cli import main as cli
from hybridremat.graph.joint import Schedule, plain_schedule
from hybridremat.graph.memory import Waiting
from hybridremat.plans.request import MOVING
from hybridremat.sequence.decisions import block_decisions
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.link import Link
from hybridremat.sequence.strategies.one_ahead import STASH, one_ahead
from support.moves import mirrored
from support.naive_memory import naive_profile
from support.training import small, train, train_plain
from support.wrapping import HOW

SLOW = Link(1e6, 1e6)
"""So slow that nothing is worth a move, which these strategies do not ask."""


@pytest.fixture(autouse=True)
def link(monkeypatch):
    monkeypatch.setattr("hybridremat.planning.moving.NOMINAL", SLOW)


def how(strategy):
    return {"strategy": strategy, "offload": f"file:{gettempdir()}", **HOW}


@cache
def found(strategy):
    """The frontier of a small model, by a slow link."""
    model, batch = small("transformer")
    return hybridremat.frontier(model, kwargs=batch, **how(strategy))


@pytest.mark.parametrize(
    "strategy", [MOVING[0], *(pytest.param(each, marks=pytest.mark.slow) for each in MOVING[1:])]
)
def test_each_trains_as_plain_in_the_memory_that_it_says(strategy):
    model, batch = small("transformer")
    plain, least = train_plain(model, batch), found(strategy).least
    with pytest.raises(hybridremat.InfeasibleLimitError) as refused:
        found(strategy).plan(memory_limit=least.peak - 1)
    assert refused.value.least == least.peak
    hybridremat.wrap(model, kwargs=batch, memory_limit=least.peak, **how(strategy))
    plan = hybridremat.get_plan(model)
    trained = train(model, batch)
    assert plain.differences(trained) == []
    assert {*trained.peaks} == {plan.predicted_peak} == {least.peak} == {plan.least_peak}
    assert plan.schedule.moves and plan.overhead > 0 and plan.request.strategy == strategy
    assert found(strategy).points[-1].overhead == 0  # the plain step, in which nothing moves


def at_its_least(strategy):
    """The plan, its graph and its chain."""
    plan = found(strategy).plan(memory_limit=found(strategy).least.peak)
    return plan, plan.details.graph, plan.details.chain


def test_all_is_moved_but_what_the_last_block_makes():
    plan, graph, chain = at_its_least("offload-all")
    assert plan.schedule.steps == plain_schedule(graph).steps
    last = {value for op in chain.blocks[-1].forward for value in graph.ops[op].writes}
    waiting = [each for each in Judge(graph).simulate.waiting(plan.schedule, 1) if each.value not in last]
    smallest = min(graph.values[move.value].bytes for move in plan.schedule.moves)
    large = [each for each in waiting if each.bytes >= smallest]
    assert [move.value for move in plan.schedule.moves] == [each.value for each in large[:-STASH]]


def test_inputs_of_blocks_are_moved_and_blocks_run_again():
    plan, _, chain = at_its_least("offload-inputs")
    runs = [each.forward_runs for each in block_decisions(plan.details.decisions)]
    assert runs == [2] * (len(chain.blocks) - 1) + [1]
    inputs = set().union(*chain.boundary[1:-1])
    assert plan.schedule.moves and {move.value for move in plan.schedule.moves} <= inputs


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.integers(1, 4))
def test_no_more_than_the_stash_waits_beside_its_copies(sizes, stash):
    """In a chain where each value is read last when the next one is made."""
    graph = mirrored(sizes)
    judge, plain = Judge(graph, link=SLOW), plain_schedule(graph)
    waiting = judge.simulate.waiting(plain)
    moves = one_ahead(plain.num_forward, waiting, stash)
    assert [move.value for move in moves] == [each.value for each in waiting][: max(0, len(waiting) - stash)]
    schedule = Schedule(plain.steps, plain.num_forward, moves)
    assert max(naive_profile(graph, schedule)) == judge(schedule).peak
    for now in range(plain.num_forward):
        gone = [move for move in moves if move.free <= now]
        made = [each for each in waiting if each.birth < now]
        assert len(made) - len(gone) <= max(stash, 1) + 1
    for move, after in pairwise(moves):
        assert move.fetch == after.ready  # one reader before its own: what was made later is read earlier


def test_what_the_forward_reads_late_stays_until_then():
    waiting = [Waiting(0, 10, birth=0, last=5, first=9), Waiting(1, 10, birth=1, last=1, first=8)]
    (move,) = one_ahead(7, waiting, 1)
    assert (move.free, move.fetch, move.ready) == (6, 8, 9)


@pytest.mark.parametrize("strategy", MOVING)
def test_without_a_place_to_move_to_it_is_refused(strategy):
    model, batch = small("mlp")
    told = rf'strategy="{strategy}" moves .*offload="file:FOLDER"'
    with pytest.raises(hybridremat.OffloadError, match=told):
        hybridremat.plan(model, kwargs=batch, memory_limit="80%", strategy=strategy, **HOW)


def test_compare_has_them_where_values_may_move(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))\n"
        "    return model, {'input': torch.randn(4, 8)}\n"
    )
    monkeypatch.setattr("hybridremat.analysis.comparison.get_args", lambda _: ("plain", *MOVING))
    quick = ["--cost-model", "flops", "--workers", "1", "-q", "--limit", "100%"]
    for more, names in (([], ["plain"]), (["--offload", f"file:{tmp_path}"], ["plain", *MOVING])):
        assert cli.main(["compare", "nets.py:make", *quick, *more]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == names
