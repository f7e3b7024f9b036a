"""Frontiers and batch sizes of compiled steps. The lowering is made up, but for the last test."""

from __future__ import annotations

import shutil

import pytest
import torch

import hybridremat
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.lowered_memory import LoweredStep
from hybridremat.graph.memory import step_memory
from support.training import Mlp, small, train
from support.wrapping import HOW

OWN, LEAN = 0.9, 0.8  # of the counted bytes


def make(batch):
    torch.manual_seed(0)
    return Mlp(width=32, layers=4), {"x": torch.randn(8 * batch, 32)}


@pytest.fixture
def lowerings(monkeypatch):
    """The schedules that are lowered."""
    runs = []

    def lower(_, step, schedule, *, lean=False, plain=False):
        runs.append((schedule, lean, plain))
        peak = int((LEAN if lean else OWN) * step_memory(step.graph, schedule).peak)
        return LoweredStep(EmittedMemory(peak, peak, 0))

    monkeypatch.setattr("hybridremat.compiler.inductor.Inductor.lowered", lower)
    return runs


def test_a_frontier_has_the_points_that_were_lowered(lowerings):
    model, batch = make(4)
    found = hybridremat.frontier(model, kwargs=batch, compiler="inductor", **HOW)
    assert 2 < len(found.points) <= len(lowerings) <= 13
    assert len(set(lowerings)) == len(lowerings)
    peaks = [point.peak for point in found.points]
    times = [point.overhead for point in found.points]
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times), reverse=True)
    assert found.points[-1].overhead <= 0
    assert found.checkpointed is None


def test_a_plan_of_a_frontier_is_that_of_wrap(lowerings):
    model, batch = make(4)
    asked = {"kwargs": batch, "compiler": "inductor", **HOW}
    found = hybridremat.frontier(model, **asked)
    limit = (found.least.peak + found.plain_peak) // 2
    before = len(lowerings)
    point, plan = found.at(memory_limit=limit), found.plan(memory_limit=limit)
    assert len(lowerings) <= before + 8  # those of at are not lowered again
    assert point.overhead == plan.overhead
    assert point.peak == plan.predicted_peak <= limit
    assert plan.overhead <= min(p.overhead for p in found.points if p.peak <= limit)
    alone = hybridremat.plan(model, memory_limit=limit, **asked)
    assert abs(alone.overhead - plan.overhead) <= 0.001
    least = found.plan(max_overhead=found.least.overhead)
    assert least.predicted_peak == found.least.peak
    with pytest.raises(hybridremat.InfeasibleLimitError, match=str(found.least.peak)):
        found.plan(memory_limit=1000)


def test_an_overhead_that_the_limit_does_not_allow_says_what_it_takes(lowerings):
    model, batch = make(4)
    found = hybridremat.frontier(model, kwargs=batch, compiler="inductor", **HOW)
    with pytest.raises(hybridremat.InfeasibleLimitError, match="both") as caught:
        found.plan(memory_limit=found.least.peak, max_overhead=0.001)
    plan = found.plan(memory_limit=caught.value.least, max_overhead=0.001)
    assert plan.predicted_peak == caught.value.least > found.least.peak


@pytest.mark.slow
def test_the_largest_batch_is_that_whose_least_code_fits(lowerings):
    limit = 60_000
    found = hybridremat.max_batch_size(make, limit, compiler="inductor", **HOW)
    fits, beyond = (_least(make(batch)) for batch in (found.batch_size, found.batch_size + 1))
    assert fits <= limit < beyond
    assert found.plan.compiler == "inductor"
    assert found.plan.needed <= limit
    plain, next_plain = (_plain(make(found.plain_batch_size + more)) for more in (0, 1))
    assert plain <= limit < next_plain
    uncompiled = hybridremat.max_batch_size(make, limit, **HOW)
    assert 0 < uncompiled.plain_batch_size <= found.plain_batch_size
    assert 0 < uncompiled.batch_size <= found.batch_size


def _least(made):
    model, batch = made
    return hybridremat.frontier(model, kwargs=batch, compiler="inductor", **HOW).least.peak


def _plain(made):
    model, batch = made
    return hybridremat.frontier(model, kwargs=batch, compiler="inductor", **HOW).plain_peak


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
def test_a_point_of_a_frontier_runs_with_the_memory_it_says():
    model, batch = small("mlp")
    found = hybridremat.frontier(model, kwargs=batch, compiler="inductor", **HOW)
    measured = found.measured(model, kwargs=batch, count=2, progress=False).measurements
    assert len(measured) == 3
    assert all(each.agrees for each in measured)
    assert measured[0].peak == pytest.approx(found.plain_peak, rel=0.02)
    plan = found.plan(memory_limit=found.points[-2].peak)
    hybridremat.wrap(model, kwargs=batch, plan=plan)
    assert max(train(model, batch, steps=2).peaks) == plan.predicted_peak
