"""Frontiers at many sizes from one capture: each is what that size's own capture gives."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hybridremat
from hybridremat.cli.main import main
from hybridremat.compiler import capture
from hybridremat.errors import CaptureError, InputError, LimitError
from hybridremat.planning import planner
from support.examples import examples
from support.sized_steps import HOW, rows, tokens
from support.training import Mlp, Transformer


def make():
    torch.manual_seed(0)
    return Mlp(32, 3)


@pytest.fixture(scope="module")
def found():
    return hybridremat.frontier(make(), kwargs=rows(64), dynamic=True, **HOW)


@pytest.fixture
def captures(monkeypatch):
    made, compile_step = [], capture.compile_step

    def counted(*args, **kwargs):
        made.append(args)
        return compile_step(*args, **kwargs)

    for module in ("pipeline", "sized_capture"):
        monkeypatch.setattr(f"hybridremat.planning.{module}.compile_step", counted)
    return made


@examples(4)
@given(st.integers(2, 200))
def test_a_frontier_at_a_size_is_that_of_its_own_capture(found, batch):
    there = found.at_sizes(batch=batch)
    alone = hybridremat.frontier(make(), kwargs=rows(batch), **HOW)
    assert there == alone and there.sizes == {"batch": batch}


def test_a_frontier_that_is_sent_is_of_its_own_sizes(found):
    sent = pickle.loads(pickle.dumps(found))  # noqa: S301 - its own
    assert sent == found and sent.sizes == {}
    assert sent.plan(memory_limit="80%") == found.plan(memory_limit="80%")
    with pytest.raises(InputError, match="of one shape"):
        sent.at_sizes(batch=20)


def test_nothing_is_captured_again(captures, monkeypatch):
    torch.manual_seed(0)
    found = hybridremat.frontier(Transformer(1, 16), kwargs=tokens(3, 24), dynamic=True, **HOW)
    assert found.sizes == {"batch": 3, "length": 24}
    assert found.at_sizes(length=31).at_sizes(batch=2).sizes == {"batch": 2, "length": 31}
    plan = found.plan(memory_limit="80%")
    monkeypatch.delattr(planner, "plan_graph")  # what the frontier has is known at other sizes
    assert plan.at(length=20).sizes == {"batch": 3, "length": 20}
    assert len(captures) == 1


def test_its_plans_run_and_are_planned_at_other_sizes(found, tmp_path):
    plan = found.plan(memory_limit="70%")
    alone = hybridremat.frontier(make(), kwargs=rows(64), **HOW).plan(memory_limit="70%")
    assert (plan.schedule, plan.needed, plan.fingerprint) == (alone.schedule, alone.needed, alone.fingerprint)
    limits = [plan.at(batch=batch).memory_limit for batch in (20, 64)]
    assert limits == [plan.memory_limit] * 2
    assert [row.needed <= row.memory_limit for row in plan.curve(batch=[9, 33]).rows] == [True, True]
    plan.save(tmp_path / "plan.json")
    model = hybridremat.wrap(make(), kwargs=rows(40), plan=tmp_path / "plan.json", **HOW)
    assert hybridremat.get_plan(model).memory_limit == plan.memory_limit
    slower = found.at_sizes(batch=90).plan(max_overhead=0.1)
    assert slower.sizes == {"batch": 90} and slower.at(batch=64).overhead <= 0.1


@pytest.mark.parametrize(
    ("sizes", "says"), [({"width": 3}, "batch"), ({"batch": 0}, "≥ 1"), ({"batch": 1}, "own")]
)
def test_sizes_that_it_cannot_have_are_refused(found, sizes, says):
    with pytest.raises(InputError, match=says):
        found.at_sizes(**sizes)


def test_without_a_capture_for_all_sizes_it_says_how_to_have_one():
    found = hybridremat.frontier(make(), kwargs=rows(8), **HOW)
    assert found.sizes == {}
    with pytest.raises(InputError, match="dynamic=True"):
        found.at_sizes(batch=3)
    assert found.plan(memory_limit="100%").sizes == {}


class Loop(nn.Module):
    """Another graph at each length."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(x.shape[0]):
            x = self.layer(x)
        return x.sum()


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"kwargs": {"x": torch.ones(3, 4)}}, CaptureError, "Loop cannot be captured for all sizes"),
        ({"kwargs": {"x": torch.ones(1, 1)}}, CaptureError, "cannot be captured for all sizes"),
        ({"kwargs": rows(4), "compiler": "inductor"}, LimitError, "inductor"),
        ({"kwargs": rows(4), "graph_breaks": "plan"}, LimitError, "graph_breaks"),
        ({"kwargs": rows(4), "dynamic": "yes"}, LimitError, "dynamic='yes'"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_so_is_refused(given, error, says):
    model = Loop() if given["kwargs"]["x"].shape[1] == 4 else nn.Linear(1, 1)
    with pytest.raises(error, match=says):
        hybridremat.frontier(model, **{"dynamic": True, **given, **HOW})


def test_the_command_takes_it(capsys, tmp_path):
    lines = ["import torch", "def net():", "    return torch.nn.Linear(8, 8), (torch.ones(4, 8),), {}"]
    (tmp_path / "sized_net.py").write_text("\n".join(lines), encoding="utf-8")
    given = ["frontier", f"{tmp_path / 'sized_net.py'}:net", "--cost-model", "flops", "-q", "--dynamic"]
    assert main([*given, "true"]) == 0
    assert "plain step" in capsys.readouterr().out
    assert main([*given, "maybe"]) == 2
    assert "--dynamic" in capsys.readouterr().err
