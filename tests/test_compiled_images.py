"""Convolutions, compiled: Inductor lays images out anew, and has other workspaces for them."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import hybridremat
from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import capture, compile_step
from hybridremat.compiler.emit import emit
from hybridremat.compiler.inductor import Inductor
from hybridremat.compiler.lowered_memory import LoweredStep
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.private_inductor import lower_forward
from hybridremat.planning.context import PlanContext
from hybridremat.planning.pipeline import PlannedPartition
from hybridremat.planning.planner import step_frontier
from hybridremat.planning.settings import Settings
from support.training import FixedPlanner

transformers = pytest.importorskip("transformers")


def resnet():
    """Two gradients meet before each block, and the sum is read several times."""
    config = transformers.ResNetConfig(
        depths=[1, 2], hidden_sizes=[64, 128], embedding_size=16, num_labels=10
    )
    return transformers.ResNetForImageClassification(config).train()


@pytest.fixture(scope="module")
def step():
    """As Inductor decomposes it, with costs."""
    torch.manual_seed(0)
    planner, inductor = FixedPlanner(), Inductor("")
    backend = Backend(PlannedPartition(planner.choose, inductor), inner=inductor, build=False)
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 10, (2,))}
    model = resnet()
    capture(model, compile_step(model, backend), backend, (), batch).plan()
    return planner.step


@pytest.mark.quick_cases(1)
def test_inputs_that_are_saved_are_not_copied(step):
    """Of every weight Inductor would keep a copy, laid out for its convolution."""
    forward, _ = emit(step, plain_schedule(step.graph))
    inputs = forward.graph.find_nodes(op="placeholder")
    results = forward.graph.find_nodes(op="output")[0].args[0]
    given = [node.meta["val"] for node in inputs]
    sizes = {}
    for plain in (True, False):
        code = lower_forward(copy.deepcopy(forward), given, visible=(0, 1), lean=False, plain=plain)
        saved = [code.results[index] for index, node in enumerate(results) if node in inputs]
        assert len([result for result in saved if len(result.strides) == 4]) >= 10
        sizes[plain] = {result.size for result in saved}
    assert sizes[False] == {0}
    assert len(sizes[True]) > 1


@pytest.mark.slow
def test_all_of_the_limit_is_the_plain_step():
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 10, (2,))}
    model = hybridremat.wrap(resnet(), kwargs=batch, memory_limit="100%", compiler="inductor")
    plan = hybridremat.get_plan(model)
    assert plan.plain_code and plan.predicted_peak == plan.plain_peak
    measured = hybridremat.measure(model, kwargs=batch, repeats=1)
    assert measured.peak == plan.predicted_peak


@pytest.fixture(scope="module")
def frontier(step):
    settings = Settings(compiler="inductor", workers=1).validated(need_limit=False)
    return step_frontier(step, {}, PlanContext.of(settings))


@pytest.mark.slow
def test_the_frontier_counts_workspaces_as_they_are_laid_out(step, frontier):
    before, used = ([op.temp for op in each.graph.ops] for each in (step, frontier.judge.step))
    changed = {op.name for op, old, new in zip(step.graph.ops, before, used, strict=True) if old != new}
    assert {name.rstrip("_0123456789") for name in changed} == {"convolution", "convolution_backward"}


@pytest.mark.slow
def test_what_the_plan_stores_lean_code_stores(frontier, monkeypatch):
    """Gradients that meet: their sum is read several times, and its parts can die."""
    lean = frontier.point(0, lean=True)
    monkeypatch.setattr("hybridremat.graph.private_inductor._storing_ops", nullcontext)
    anew = frontier.judge.lower(frontier.judge.step, lean.schedule, lean=True)
    assert lean.peak < 0.9 * anew.memory.peak


def test_only_measured_workspaces_replace_others(step):
    laid_out = LoweredStep(None, {0: 12345}).laid_out(step)
    first, *others = laid_out.graph.ops
    assert first == replace(step.graph.ops[0], temp=12345)
    assert tuple(others) == step.graph.ops[1:]
