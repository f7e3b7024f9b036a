"""What one thread plans, and what another one trains meanwhile."""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.variables import misc

import hybridremat
from hybridremat.errors import GraphBreakWarning
from hybridremat.graph.private_torch import functions_in_graph
from hybridremat.runtime.laid_aside import laid_aside, without
from hybridremat.runtime.outside import NextBackward
from support.wrapping import HOW


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.layers(x).square().mean()


class Paused(nn.Module):
    """Its forward stops between two graphs until it may go on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.inside, self.go = threading.Event(), threading.Event()

    def forward(self, x):
        x = self.first(x).tanh()
        self.pause()
        return self.second(x).mean()

    @torch.compiler.disable
    def pause(self):
        self.inside.set()
        assert self.go.wait(60)


@contextmanager
def surveyed_elsewhere():
    """While another thread surveys the steps of another model."""
    model = Paused()

    def wrap():
        hybridremat.wrap(model, args=(torch.randn(4, 8),), memory_limit="100%", **HOW)

    thread = threading.Thread(target=wrap)
    thread.start()
    try:
        assert model.inside.wait(60)
        yield
    finally:
        model.go.set()
        thread.join()


@pytest.mark.filterwarnings("ignore", category=GraphBreakWarning)
def test_a_survey_in_another_thread_takes_no_gradients():
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    plain(x).backward()
    hybridremat.wrap(model, args=(x,), memory_limit="100%", gradients="in_backward", **HOW)
    with surveyed_elsewhere():
        model(x).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)


def waiting(calls, name, *, done=True):
    return NextBackward(lambda: calls.append(name) or done, lambda: calls.append(f"{name} failed"))


def backward():
    (torch.ones(2, requires_grad=True) * 2).sum().backward()


def test_steps_that_wait_for_a_backward_give_up_in_any_order():
    usual, calls = torch.autograd.backward, []
    first, second = waiting(calls, "first"), waiting(calls, "second", done=False)
    first.await_it()
    second.await_it()
    first.forget()
    first.await_it()
    backward()
    backward()
    assert sorted(calls) == ["first", "second", "second"]
    second.forget()
    assert torch.autograd.backward is usual
    for each in (first, second):
        each.await_it()
    for each in (first, second):
        each.forget()
    assert torch.autograd.backward is usual


def test_a_backward_of_another_thread_is_not_waited_for():
    usual, calls = torch.autograd.backward, []
    first = waiting(calls, "first")
    first.await_it()
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert calls == []
    backward()
    assert calls == ["first"]
    assert torch.autograd.backward is usual


class Config:
    use_cache = True


def test_caches_come_back_when_the_last_forward_has_ended():
    config, model = Config(), nn.Linear(2, 2)
    model.config = config
    first, second = (without(laid_aside(model)) for _ in range(2))
    with first:
        second.__enter__()
    assert config.use_cache is False
    second.__exit__(None, None, None)
    assert config.use_cache is True


def test_functions_that_stay_in_graphs_leave_nothing_behind():
    usual = misc.produce_trampoline_autograd_apply

    class Twice(torch.autograd.Function):
        pass

    first, second = (functions_in_graph([Twice], lambda _: str) for _ in range(2))
    with first:
        second.__enter__()
    assert misc.produce_trampoline_autograd_apply(Twice) is str
    second.__exit__(None, None, None)
    assert misc.produce_trampoline_autograd_apply is usual
    assert id(Twice) not in trace_rules._allowed_callable_ids()
