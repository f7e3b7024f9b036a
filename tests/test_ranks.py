"""Several processes: one plan for equal ranks, errors on all of them, DistributedDataParallel around it all.

The processes run support/rank_cases.py once; each test looks at one thing that came of it.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch import distributed

import hybridremat
from hybridremat.graph.joint import JointGraph, Op, Phase, Value
from hybridremat.planning.rank_agreement import _memory_text, _with_maxima
from hybridremat.planning.ranks import Ranks
from support.processes import run_ranks, run_ranks_once
from support.rank_cases import MORE

OWN = 512  # bytes of small tensors that DistributedDataParallel makes in a step, in threads of its own


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks_once("support.rank_cases:whole", tmp_path_factory)


def test_one_plan_is_made_once(ranks):
    first, second = (rank["one plan"] for rank in ranks)
    assert first == second
    assert first["peak"] <= ranks[0]["errors"]["infeasible"][2]
    assert ranks[0]["solved"] > 0
    assert ranks[1]["solved"] == 0


@pytest.mark.parametrize("loop", ["usual", "accumulated"])
def test_training_in_ddp_equals_plain_ddp(ranks, loop):
    for rank in ranks:
        made = rank["training"][loop]
        assert made["different"] == []
        assert sum(peak > made["limit"] + OWN for peak in made["peaks"]) <= 1  # DDP rebuilds its buckets once
        assert max(made["peaks"]) <= made["limit"] + made["buckets"] + OWN


@pytest.mark.slow
def test_calls_that_stay_one_op_train_in_ddp_too(tmp_path):
    first, second = run_ranks("support.rank_cases:recurrent", tmp_path)
    assert first["plan"] == second["plan"]
    for made in (first["training"], second["training"]):
        assert made["different"] == []
        assert sum(peak > made["limit"] + OWN for peak in made["peaks"]) <= 1


@pytest.mark.slow
def test_what_moves_trains_in_ddp_too(tmp_path):
    for rank in run_ranks("support.rank_cases:moved", tmp_path):
        for made in rank.values():
            assert made["moves"] > 0 and made["different"] == []
        made = rank["units"]
        assert sum(peak > made["limit"] + OWN for peak in made["peaks"]) <= 1
        assert max(made["peaks"]) <= made["limit"] + made["buckets"] + OWN


def test_new_shapes_come_inside_ddp_on_each_rank_alone(ranks):
    for rank in ranks:
        made = rank["training"]["shapes"]
        assert made["different"] == []
        assert made["plans"] == [1, 2]  # before the other shape has come, and after


def test_an_infeasible_limit_is_told_to_all_with_its_figures(ranks):
    (kind, text, least), other = (rank["errors"]["infeasible"] for rank in ranks)
    assert kind == other[0] == "InfeasibleLimitError"
    assert least == other[2] > 0
    assert str(least) in text
    assert str(least) in other[1]


@pytest.mark.parametrize(
    ("case", "own_kind", "kind", "word"),
    [
        ("limit of one", "LimitError", "LimitError", "50 apples"),
        ("inputs of one", "InputError", "InputError", "fails on these inputs"),
        ("plan of one", "FileNotFoundError", "RankError", "no-such-plan.json"),
        ("bug of one", "ZeroDivisionError", "RankError", "ZeroDivisionError"),
    ],
)
def test_an_error_of_one_rank_ends_the_wrap_on_all(ranks, case, own_kind, kind, word):
    listener, own = (rank["errors"][case] for rank in ranks)
    assert listener[0] == kind
    assert word in listener[1]
    assert "Raised on rank 1" in listener[1]
    assert own[0] == own_kind
    assert "Rank" not in own[1]


def test_a_rank_waits_for_one_that_comes_late(tmp_path, monkeypatch, caplog):
    """Also where ranks meet at a file, whose store says in a type of its own that nothing has come."""
    monkeypatch.setattr("hybridremat.planning.ranks.PATIENCE", timedelta(seconds=0.3))
    here, there = (distributed.FileStore(str(tmp_path / "store"), 2) for _ in range(2))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(Ranks(0, 2, here).group, "k", "from 0")
        time.sleep(1.8)  # it counts in whole seconds
        second = Ranks(1, 2, there).group("k", "from 1")
        assert second.texts == first.result().texts == ("from 0", "from 1")
    assert "rank 0 has waited" in caplog.text


def test_a_rank_that_nobody_joins_gives_up_with_a_typed_error(tmp_path, monkeypatch):
    for name in ("PATIENCE", "TIMEOUT"):
        monkeypatch.setattr(f"hybridremat.planning.ranks.{name}", timedelta(seconds=0.3))
    with pytest.raises(hybridremat.RankError, match="the ranks could not reach each other"):
        Ranks(0, 2, distributed.FileStore(str(tmp_path / "store"), 2)).group("k", "from 0")


def test_a_rank_that_tries_again_after_another_has_failed_gets_its_error_again(tmp_path):
    here, there = (distributed.FileStore(str(tmp_path / "store"), 2) for _ in range(2))
    first, second = Ranks(0, 2, here), Ranks(1, 2, there)
    with ThreadPoolExecutor() as pool:
        told = pool.submit(second.fail, hybridremat.InputError("no such input"))
        for _ in range(2):
            with pytest.raises(hybridremat.InputError, match=r"no such input \(Raised on rank 1"):
                first.group("k", "from 0")
        told.result()


def test_ddp_goes_around_a_wrapped_model(ranks):
    for rank in ranks:
        kind, text, _ = rank["errors"]["inside out"]
        assert kind == "ModelError"
        assert "DistributedDataParallel(hybridremat.wrap(module" in text


def test_all_plan_with_the_most_that_any_machine_takes(ranks):
    here, there = (rank["others"]["other kernels"] for rank in ranks)
    assert here == there
    assert here["peak"] >= ranks[0]["others"]["other inputs"]["peak"] + MORE


def test_all_do_what_each_of_them_may():
    ops = (
        Op(0, "a", Phase.FORWARD, (), (0,), temp=1),
        Op(1, "b", Phase.FORWARD, (0,), (1,), temp=5, overwrites=(0,)),
    )
    here = JointGraph(ops, (Value(0, 10, 0), Value(1, 10, 1)))
    there = replace(here, ops=(replace(ops[0], temp=7), replace(ops[1], overwrites=())))
    agreed = _with_maxima(here, map(_memory_text, (here, there)))
    assert [(op.temp, op.overwrites) for op in agreed.ops] == [(7, ()), (5, ())]


def test_ranks_with_other_inputs_plan_for_themselves(ranks):
    first, second = (rank["others"]["other inputs"] for rank in ranks)
    assert first["fingerprint"] != second["fingerprint"]
    assert second["peak"] < first["peak"]
