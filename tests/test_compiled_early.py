"""Gradients that leave in the backward of a compiled step: the numbers, the bytes, and whose buffer it is."""

from __future__ import annotations

import copy

import pytest
import torch

import hybridremat
from hybridremat.compiler import compiled_deliveries
from hybridremat.compiler.compiled_deliveries import as_ops
from hybridremat.compiler.deliveries import is_delivery
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.errors import DoubleBackwardError, EarlyGradientError, PlanError
from hybridremat.planning.breaks.planner import _require_code_as_planned
from hybridremat.sequence.outside_memory import PhasePeaks
from support.compiled import needs_compiler, nothing_kept_by_inductor
from support.early_gradients import trained
from support.training import small
from support.wrapping import HOW

COMPILED = {"gradients": "in_backward", "compiler": "inductor"} | HOW

pytestmark = [needs_compiler]


def sgd(parameters):
    """AdamW would make large steps of rounding errors."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def without_dropout(model):
    """Inductor draws other numbers."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
        elif isinstance(getattr(layer, "dropout", None), float):
            layer.dropout = 0.0


@pytest.fixture(autouse=True)
def _nothing_kept():
    with nothing_kept_by_inductor():
        yield


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("convnet", "transformer")]


@pytest.mark.parametrize("name", ["mlp", *SLOW])
def test_it_trains_as_plain_pytorch_within_rounding_at_its_least_limit(name):
    """The optimizer changes a parameter as soon as its gradient is there: nobody may read either then."""
    model, batch = small(name)
    without_dropout(model)
    plain = copy.deepcopy(model)
    expected, plain_peaks = trained(plain, batch, sgd(plain.parameters()), steps=4)
    optimizer = hybridremat.optimizer_in_backward(model, sgd)
    hybridremat.wrap(model, kwargs=batch, memory_limit=1, on_infeasible="least", **COMPILED)
    plan = hybridremat.get_plan(model)
    assert len(plan.details.graph.deliveries) > 4
    found, peaks = trained(model, batch, optimizer, steps=4)
    for key, value in expected.items():
        if key != "generator":
            assert torch.allclose(found[key], value, rtol=1e-3, atol=1e-3), key
    assert max(peaks[1:]) <= plan.predicted_peak < min(plain_peaks)
    assert plan.plain_peak > plan.predicted_peak
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_reads_a_parameter_comes_before_its_gradient_leaves(monkeypatch):
    found = []

    def noted(step, backward):
        as_ops(step, backward)
        found.append(backward)

    monkeypatch.setattr(compiled_deliveries, "as_ops", noted)
    model, batch = small("mlp")
    at_end = hybridremat.plan(model, kwargs=batch, memory_limit="100%", compiler="inductor", **HOW)
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **COMPILED)
    assert plan.plain_peak == at_end.plain_peak > plan.least_peak
    left = [node for node in found[-1].graph.nodes if is_delivery(node)]
    assert len(left) == len(list(model.parameters()))
    changed = [each for node in left for each in node.args[1]]
    # the weights of all layers but the first are read, to pass gradients on
    assert len(changed) == len(set(changed)) == len(model.layers) - 1
    assert all(each.op == "placeholder" for each in changed)


@pytest.mark.filterwarnings("ignore::hybridremat.errors.KeptGradientWarning")
def test_a_gradient_that_is_kept_is_not_written_over():
    """Its buffer is the caller's, though Inductor takes buffers that are done with for others."""
    torch.manual_seed(0)
    model, batch = small("mlp")
    at_end, early = copy.deepcopy(model), copy.deepcopy(model)
    hybridremat.wrap(at_end, kwargs=batch, memory_limit="100%", compiler="inductor", **HOW)
    hybridremat.wrap(early, kwargs=batch, memory_limit="100%", **COMPILED)
    for _ in range(2):  # the second adds to the first
        at_end(**batch).backward()
        early(**batch).backward()
    for mine, theirs in zip(early.parameters(), at_end.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert len({p.grad.untyped_storage().data_ptr() for p in early.parameters()}) == len(
        list(early.parameters())
    )


def test_what_needs_all_gradients_is_refused_as_op_by_op():
    model, batch = small("mlp")
    batch["x"].requires_grad_()
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **COMPILED)
    with pytest.raises(EarlyGradientError, match="asks for some alone"):
        model(**batch).backward(inputs=[batch["x"]])
    with pytest.raises(DoubleBackwardError):
        model(**batch).backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_code_that_takes_more_than_was_lowered_does_not_run():
    planned = PhasePeaks(forward=10, backward=20, between=5)
    _require_code_as_planned(planned, EmittedMemory(10, 20, 5))
    for more in ((11, 20, 5), (10, 21, 5), (10, 20, 6)):
        with pytest.raises(PlanError, match="has not been run"):
            _require_code_as_planned(planned, EmittedMemory(*more))


@pytest.mark.slow
def test_across_graph_breaks():
    from support.broken_nets import Reader
    from support.broken_nets import batch as reader_batch

    torch.manual_seed(0)
    model, given = Reader(64), reader_batch(rows=8, width=64)
    without_dropout(model)
    plain = copy.deepcopy(model)
    expected, _ = trained(plain, given, sgd(plain.parameters()), steps=3)
    optimizer = hybridremat.optimizer_in_backward(model, sgd)
    hybridremat.wrap(model, kwargs=given, memory_limit="100%", graph_breaks="plan", **COMPILED)
    found, peaks = trained(model, given, optimizer, steps=3)
    for key, value in expected.items():
        if key != "generator":
            assert torch.allclose(found[key], value, rtol=1e-3, atol=1e-3), key
    plan = hybridremat.get_plan(model)
    assert max(peaks[1:]) <= plan.predicted_peak < plan.plain_peak
