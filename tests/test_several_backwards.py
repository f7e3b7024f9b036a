"""A forward with two losses, and a backward for each: what the second one reads waits for the first."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.units import format_bytes
from support.training import allocated_peak

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


class Two(nn.Module):
    """A step of a generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = (
            nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))) for _ in range(2)
        )

    def forward(self, real, noise):
        made = self.generator(noise)
        told = (self.critic(made.detach()) - self.critic(real)).mean()
        return told, -self.critic(made).mean()


def two():
    torch.manual_seed(0)
    return Two(), {"real": torch.randn(256, 32), "noise": torch.randn(256, 32)}


def step(model, batch, retain=False):
    def run():
        first, second = model(**batch)
        first.backward(retain_graph=retain)
        second.backward()

    return run


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def test_one_graph_has_one_backward_unless_it_is_retained():
    model, batch = two()
    plain = copy.deepcopy(model)
    step(plain, batch)()
    hybridremat.wrap(model, kwargs=batch, memory_limit="60%", **HOW)
    with pytest.raises(hybridremat.DoubleBackwardError, match=r"\(first \+ second\)\.backward.*wrap_each"):
        step(model, batch)()
    model.zero_grad()
    step(model, batch, retain=True)()
    assert all(map(torch.allclose, gradients(plain), gradients(model)))


def test_units_of_two_backwards_are_counted_with_forwards_2():
    model, batch = two()
    plain = copy.deepcopy(model)
    step(plain, batch)()
    units = ["generator", "critic"]
    single = hybridremat.wrap_each(copy.deepcopy(model), units, kwargs=batch, memory_limit="100%", **HOW)
    with pytest.warns(hybridremat.OutstandingForwardWarning, match=r"forwards=2.*\(first \+ second\)"):
        step(single, batch)()
    assert all(map(torch.equal, gradients(plain), gradients(single)))
    hybridremat.wrap_each(model, units, kwargs=batch, memory_limit="120%", forwards=2, **HOW)
    plan = hybridremat.get_plan(model)
    assert allocated_peak(step(model, batch)) <= plan.needed <= plan.memory_limit
    assert all(map(torch.equal, gradients(plain), gradients(model)))


class Towers(nn.Module):
    """Three layers with what PyTorch cannot capture between them, and a loss or two of the last one."""

    losses = 1

    def __init__(self, layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            float(x.detach().sum())
        found = [x.square().mean(), x.abs().mean()]
        return found[0] if self.losses == 1 else tuple(found)


class Viewed(nn.Module):
    """Hands out a view of what it makes, which is no node of the graph's own, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return torch.tanh(self.linear(x)).unsqueeze(1)[:, 0]


LAYERS = {
    "linear": lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
    "running": lambda: nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 32), nn.ReLU()),
    "viewed": Viewed,
}


def towers(layer, losses, limit, **how):
    torch.manual_seed(0)
    model, batch = Towers(LAYERS[layer]), {"x": torch.randn(64, 32)}
    model.losses = losses
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **HOW, **how)
    return model, plain, batch


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("losses", [1, 2])
def test_a_second_backward_through_one_of_several_graphs_is_refused(layer, losses):
    model, plain, batch = towers(layer, losses, "100%", units="layers.*")

    def backwards(model, retain=False):
        found = model(**batch)
        first, second = (found, found) if losses == 1 else found
        first.backward(retain_graph=retain)
        after = [each.clone() for each in gradients(model)]
        return after, lambda: second.backward()

    after, again = backwards(model)
    with pytest.raises(hybridremat.DoubleBackwardError, match=r"\(first \+ second\)\.backward.*units="):
        again()
    assert all(map(torch.equal, after, gradients(model)))
    del again
    model.zero_grad()
    backwards(model, retain=True)[1](), backwards(plain, retain=True)[1]()
    assert all(map(torch.equal, gradients(plain), gradients(model)))


class Tasks(nn.Module):
    """Losses of several heads, each with a backward of its own."""

    breaks = False

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.layers, self.heads = nn.Sequential(*blocks), nn.ModuleList(nn.Linear(32, 1) for _ in range(3))

    def forward(self, x):
        features = self.layers(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return tuple(head(features).square().mean() for head in self.heads)


class BreakingTasks(Tasks):
    breaks = True


def one_by_one(model, batch):
    losses = model(**batch)
    for number, loss in enumerate(losses):
        model.zero_grad()
        loss.backward(retain_graph=number < 2)
    return gradients(model)


@pytest.mark.parametrize("how", [{}, {"dynamic": True}, {"offload": "file"}, {"rewrites": "none"}], ids=str)
@pytest.mark.parametrize("share", ["80%", "50%"])
def test_retained_graphs_are_planned_for_once_they_are_seen(share, how, tmp_path, caplog):
    how = {**how, "offload": f"file:{tmp_path}"} if "offload" in how else how
    model, batch = Tasks(), {"x": torch.randn(256, 32)}
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=batch, memory_limit=share, **HOW, **how)
    once = hybridremat.get_plan(model)
    one_by_one(model, batch)
    assert f"up to {format_bytes(once.saved_bytes)} beyond what the plan counts" in caplog.text
    one_by_one(model, batch)  # planned here
    model.zero_grad()
    assert allocated_peak(lambda: one_by_one(model, batch)) <= once.memory_limit
    pairs = zip(one_by_one(model, batch), one_by_one(plain, batch), strict=True)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)
    assert hybridremat.get_plan(model).memory_limit == once.memory_limit
    assert caplog.text.count("retain_graph=True leaves") == 1


def test_a_limit_without_room_for_a_retained_graph_is_refused():
    model, batch = Tasks(), {"x": torch.randn(256, 32)}
    least = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).least_peak
    hybridremat.wrap(model, kwargs=batch, memory_limit=least, **HOW)
    one_by_one(model, batch)
    with pytest.raises(hybridremat.InfeasibleLimitError, match="retain_graph=True leaves") as error:
        model(**batch)
    hybridremat.unwrap(model)
    hybridremat.wrap(model, kwargs=batch, memory_limit=error.value.least, forwards=2, **HOW)
    one_by_one(model, batch)
    model.zero_grad()
    assert allocated_peak(lambda: one_by_one(model, batch)) <= error.value.least


@pytest.mark.filterwarnings("ignore", category=hybridremat.GraphBreakWarning)
def test_retained_graphs_of_several_graphs_are_planned_for_too():
    model, batch = BreakingTasks(), {"x": torch.randn(256, 32)}
    hybridremat.wrap(model, kwargs=batch, memory_limit="90%", **HOW)
    limit = hybridremat.get_plan(model).memory_limit
    for _ in range(2):
        one_by_one(model, batch)
    model.zero_grad()
    assert allocated_peak(lambda: one_by_one(model, batch)) <= limit
