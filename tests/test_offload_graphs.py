"""Moves in steps of several graphs: the numbers of plain training, in the memory that was promised."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.sequence.offload.link import Link
from support.sized_steps import tokens
from support.training import Transformer, train, train_plain
from support.wrapping import HOW


@pytest.fixture(autouse=True)
def link(monkeypatch):
    """So fast that whatever may move does, rather than to be computed again."""
    monkeypatch.setattr("hybridremat.planning.moving.NOMINAL", Link(1e15, 1e15, latency=0))


class Broken(nn.Module):
    """Layers with what PyTorch cannot capture between them."""

    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
            if float(x.detach().sum()) > 1e9:
                raise ValueError("it diverges")
        return {"loss": x.pow(2).mean()}


def broken():
    torch.manual_seed(0)
    return Broken(), {"x": torch.randn(512, 32)}


def units():
    torch.manual_seed(0)
    return Transformer(2, 16), tokens(4, 40)


KINDS = {
    "breaks": (broken, {"graph_breaks": "plan"}),
    "units": (units, {"units": "blocks.*"}),
}


def stores(model):
    return model._compiled_call_impl.context.store._stores.values()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_plain_training(kind, tmp_path):
    make, how = KINDS[kind]
    model, batch = make()
    plain = train_plain(copy.deepcopy(model), batch)
    without = hybridremat.plan(model, kwargs=batch, memory_limit="60%", **HOW, **how)
    hybridremat.wrap(model, kwargs=batch, memory_limit="60%", offload=f"file:{tmp_path}", **HOW, **how)
    plan = hybridremat.get_plan(model)
    moves = [len(plan.parts[number].schedule.moves) for number in plan.places]
    assert sum(moves) and plan.overhead == 0.0 < without.overhead
    assert f"moves           {sum(moves)} values" in " ".join(str(plan).splitlines())
    trained = train(model, batch)
    assert plain.differences(trained) == []
    assert max(trained.peaks) <= plan.predicted_peak <= plan.needed <= plan.memory_limit
    if kind == "units":  # no code between its graphs takes any
        assert {*trained.peaks} == {plan.predicted_peak}
    runs = {number: plan.places.count(number) for number in range(len(plan.parts))}
    assert plan.host_bytes == sum(runs[n] * each.host_bytes for n, each in enumerate(plan.parts))
    sizes = {each.host_bytes for each in plan.parts if each.host_bytes}
    assert {each.size for each in stores(model)} == sizes
    plan.save(tmp_path / "plan.json")
    assert hybridremat.Plan.load(tmp_path / "plan.json") == plan


def test_all_graphs_share_the_host_memory(tmp_path):
    model, batch = broken()
    how = {"graph_breaks": "plan", "offload": f"file:{tmp_path}", **HOW}
    free = hybridremat.plan(model, kwargs=batch, memory_limit="60%", **how)
    assert free.overhead == 0.0
    half = hybridremat.wrap(
        copy.deepcopy(model), kwargs=batch, memory_limit="60%", host_memory_limit=free.host_bytes // 2, **how
    )
    plan = hybridremat.get_plan(half)
    assert 0 < plan.host_bytes <= free.host_bytes // 2 and plan.overhead > 0.0
    plain = train_plain(copy.deepcopy(model), batch)
    assert plain.differences(train(half, batch)) == []
    twice = hybridremat.plan(
        model, kwargs=batch, memory_limit="100%", host_memory_limit=free.host_bytes, forwards=2, **how
    )
    assert 0 < 2 * twice.host_bytes <= free.host_bytes


def test_nothing_moves_that_need_not(tmp_path):
    model, batch = broken()
    how = {"graph_breaks": "plan", "offload": f"file:{tmp_path}", **HOW}
    shares = "110%", "85%", "60%"
    host = [hybridremat.plan(model, kwargs=batch, memory_limit=each, **how).host_bytes for each in shares]
    assert host == sorted(host) and host[0] == 0 < host[1] < host[2]


@pytest.mark.everyday
def test_a_model_with_breaks_is_planned_without_a_word(tmp_path):
    model, batch = broken()
    with pytest.warns(hybridremat.GraphBreakWarning):
        hybridremat.wrap(model, kwargs=batch, memory_limit="60%", offload=f"file:{tmp_path}", **HOW)
    assert hybridremat.get_plan(model).host_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_moves_reach_below_the_least_without(kind, tmp_path):
    make, how = KINDS[kind]
    model, batch = make()
    away = {"offload": f"file:{tmp_path}"}
    bare, moved = (least(model, batch, **how, **more) for more in ({}, away))
    assert moved < 0.95 * bare
    plain = train_plain(copy.deepcopy(model), batch)
    hybridremat.wrap(model, kwargs=batch, memory_limit=moved, **HOW, **how, **away)
    trained = train(model, batch)
    assert plain.differences(trained) == [] and max(trained.peaks) <= moved


def least(model, batch, **how):
    with pytest.raises(hybridremat.InfeasibleLimitError) as caught:
        hybridremat.plan(model, kwargs=batch, memory_limit=1000, **HOW, **how)
    return caught.value.least


def test_a_plan_that_takes_more_host_memory_than_there_is_is_refused(tmp_path):
    model, batch = broken()
    how = {"graph_breaks": "plan", "offload": f"file:{tmp_path}"}
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="60%", **HOW, **how)
    less = plan.host_bytes - 1
    assert max(part.host_bytes for part in plan.parts) < less
    with pytest.raises(hybridremat.OffloadError, match="host_memory_limit= is"):
        hybridremat.wrap(model, kwargs=batch, plan=plan, host_memory_limit=less, progress=False, **how)
