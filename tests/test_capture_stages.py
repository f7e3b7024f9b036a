"""AOTAutograd's two stages, called one by one: what lies between them changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._functorch.partitioners import default_partition

import hybridremat
from hybridremat.errors import CaptureError
from hybridremat.graph.private_joint import ExportedGraph
from support.compiled import needs_compiler
from support.training import small, train
from support.wrapping import HOW


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x).square().mean(), self.layers[0].weight * 2


def exported(model, x):
    """The exported graphs of a model, and what it returns then."""
    found = []

    def backend(module, inputs, **_):
        found.append(ExportedGraph(module, inputs))
        return module

    result = torch.compile(model, backend=backend, dynamic=False)(x)
    return found, result


def test_outputs_are_counted_as_aotautograd_counts_them_when_it_asks():
    model, x = Net(), torch.randn(4, 8)
    (graph,), _ = exported(model, x)

    class AskedError(Exception):
        pass

    def forward(module, given):
        raise AskedError

    pair = default_partition(graph.graph, [], num_fwd_outputs=graph.num_outputs)
    assert graph.has_backward
    with pytest.raises(AskedError):
        graph.compiled(pair, forward, forward)
    graph.num_outputs += 1
    with pytest.raises(CaptureError, match="another joint graph"):
        graph.compiled(None, forward, forward)


def test_a_graph_without_gradients_has_no_backward():
    with torch.no_grad():
        (graph,), _ = exported(Net().eval(), torch.randn(4, 8))
    assert not graph.has_backward


@pytest.mark.parametrize("how", [{}, pytest.param({"compiler": "inductor"}, marks=needs_compiler)], ids=str)
def test_wrapping_without_gradients_or_under_autocast_plans_the_training_step(how):
    model, batch = small("mlp")
    plain, under = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW, **how)
    with torch.autocast("cpu", torch.bfloat16):
        hybridremat.wrap(under, kwargs=batch, memory_limit="100%", **HOW, **how)
    if not how:
        expected = train(plain, batch)
        assert expected.differences(train(model, batch)) == []
        assert expected.differences(train(under, batch)) == []
    else:
        model(**batch).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_planning_draws_no_random_numbers():
    model, batch = small("transformer")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW)
    assert torch.equal(torch.rand(3), expected)
