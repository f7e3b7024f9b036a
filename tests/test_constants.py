"""Constants of captured graphs take their bytes once, also where a step is captured again while it runs."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from torch import nn

from hybridremat.compiler.constants import share_constants
from support.training import train
from support.wrapping import least_limit, wrap


class Noting(nn.Module):
    """Changes its own Python state in its first step, so that its second one is captured again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.dropout, self.kind = nn.Dropout(0.1), None

    def forward(self, x):
        self.kind = self.kind or "regression"
        scale, shifts = torch.tensor(2.0), torch.tensor([0.0, -0.0] * 16)
        for layer in self.layers:
            x = self.dropout(layer(x).relu()) * scale + shifts
        return x.pow(2).mean()


@pytest.mark.parametrize("settings", [{}, {"dynamic": False}], ids=str)
def test_a_step_that_is_captured_again_keeps_its_limit(settings):
    torch.manual_seed(0)
    model, batch = Noting(), {"x": torch.randn(64, 32)}
    plain = train(copy.deepcopy(model), batch)
    limit = least_limit(model, batch, **settings)
    wrap(model, batch, limit, **settings)
    captures = model._compiled_call_impl.captures
    trained = train(model, batch)
    assert model._compiled_call_impl.captures > captures
    assert plain.differences(trained) == []
    assert max(trained.peaks) <= limit


def test_memory_of_other_libraries_is_nobody_elses_constant():
    first, second = (numpy.ones(4, dtype="float32") for _ in range(2))

    @torch._dynamo.allow_in_graph
    def scaled(x):
        return x * torch.as_tensor(first) + torch.as_tensor(second)

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return scaled(self.layer(x)).pow(2).mean()

    model, x = Reading(), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    wrap(model, {"x": x}, "100%")
    for _ in range(3):
        assert torch.equal(model(x=x), plain(x))
        second += 1


def test_constants_are_shared_by_their_bits():
    nan = torch.tensor([float("nan"), 1.0])
    values = [torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(0), nan, torch.tensor([0.0])]
    made = []
    for value in [*values, *map(torch.clone, values)]:
        graph = torch.fx.Graph()
        graph.output(graph.get_attr("value"))
        module = torch.fx.GraphModule({"value": value}, graph)
        share_constants(module)
        made.append(module.value)
    assert [each is value for each, value in zip(made, values * 2, strict=True)] == [True] * 10
