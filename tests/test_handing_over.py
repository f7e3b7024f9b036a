"""Gradients that are handed over in the backward, in one process: order, bits, memory, and what else asks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hybridremat
from hybridremat.compiler import handing_over
from support.training import allocated_peak, loss_in, small, train
from support.wrapping import HOW, least_limit


@pytest.fixture(autouse=True)
def exchanging(monkeypatch):
    """As in the forward of a DistributedDataParallel."""
    monkeypatch.setattr(handing_over, "exchanges_gradients", lambda: True)


@pytest.fixture
def ran(monkeypatch):
    """The sections that have run."""
    numbers = []
    plain = handing_over._Rest.run

    def noted(self, number):
        numbers.append(number)
        return plain(self, number)

    monkeypatch.setattr(handing_over._Rest, "run", noted)
    return numbers


def pair(name="transformer", limit="100%", **how):
    """A plain model, its planned copy and a batch."""
    plain, batch = small(name)
    planned = copy.deepcopy(plain)
    hybridremat.wrap(planned, kwargs=batch, memory_limit=limit, **HOW, **how)
    return plain, planned, batch


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(planned, plain):
    ours, theirs = gradients(planned), gradients(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_it_trains_as_plain_pytorch_at_its_least_limit(ran):
    plain, batch = small("transformer")
    planned = copy.deepcopy(plain)
    limit = least_limit(planned, batch)
    hybridremat.wrap(planned, kwargs=batch, memory_limit=limit, **HOW)
    made = train(planned, batch)
    assert train(plain, batch).differences(made) == []
    assert max(made.peaks) == limit and max(ran) > 3


def test_parameters_get_their_gradients_between_ops_and_once():
    _, planned, batch = pair()
    seen = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append("op")
            return func(*args, **(kwargs or {}))

    for name, parameter in planned.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    loss = loss_in(planned(**batch))
    with Ops():
        loss.backward()
    names = [each for each in seen if each != "op"]
    assert sorted(names) == sorted(name for name, _ in planned.named_parameters())
    first = seen.index(names[0])
    assert seen[:first].count("op") < seen[first:].count("op")


def test_it_takes_no_more_memory_than_at_the_end(monkeypatch):
    _, planned, batch = pair(limit="80%")
    peaks = []
    for exchanges in (True, False):
        monkeypatch.setattr(handing_over, "exchanges_gradients", lambda exchanges=exchanges: exchanges)
        planned.zero_grad()
        peaks.append(allocated_peak(lambda: loss_in(planned(**batch)).backward()))
    assert peaks[0] == peaks[1] == hybridremat.get_plan(planned).predicted_peak


def test_a_retained_graph_and_gradients_asked_for_alone():
    plain, planned, batch = pair()
    for model in (plain, planned):
        torch.manual_seed(1)
        loss = loss_in(model(**batch))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        for parameter in list(model.parameters())[:2]:
            (parameter.grad,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        loss.backward(inputs=list(model.parameters())[-2:])
    assert_equal(planned, plain)


def test_a_loss_that_reads_parameters_and_several_forwards():
    plain, planned, batch = pair(forwards=2)
    for model in (plain, planned):
        torch.manual_seed(1)
        loss = loss_in(model(**batch)) + loss_in(model(**batch))
        (loss + next(model.parameters()).pow(2).sum()).backward()
    ours, theirs = gradients(planned), gradients(plain)
    torch.testing.assert_close(ours, theirs)


def test_an_output_without_a_gradient_leaves_its_parameters_alone():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.first(x).tanh(), self.second(x).tanh()

    plain, x = Two(), torch.randn(8, 16)
    planned = copy.deepcopy(plain)
    hybridremat.wrap(planned, (x,), memory_limit="100%", **HOW)
    for model in (plain, planned):
        model(x)[1].sum().backward()
    assert planned.first.weight.grad is None
    assert_equal(planned, plain)


def test_an_input_that_is_returned_or_changed_runs_as_a_whole(ran):
    class Through(nn.Module):
        def __init__(self, *, change: bool):
            super().__init__()
            self.layers, self.change = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), change

        def forward(self, x):
            if self.change:
                x.mul_(2)
            y = x
            for layer in self.layers:
                y = layer(y).tanh()
            return y, x.view(-1)

    for change in (True, False):
        plain, given = Through(change=change), torch.randn(8, 16, requires_grad=True)
        planned, results = copy.deepcopy(plain), []
        hybridremat.wrap(planned, (given,) if not change else (given * 1,), memory_limit="100%", **HOW)
        for model in (plain, planned):
            x = given.detach().clone().requires_grad_()
            y, same = model(x * 1)
            (y.sum() + same.pow(2).sum()).backward()
            results.append(x.grad)
        assert torch.equal(*results)
        assert_equal(planned, plain)
    assert ran == []
