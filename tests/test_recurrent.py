"""nn.LSTM, nn.GRU and nn.RNN train bit for bit as in plain PyTorch, and keep the limit to the byte."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

import hybridremat
from hybridremat.errors import CaptureError
from support.training import allocated_peak, train, train_plain

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


class Recurrent(nn.Module):
    """A recurrent module between two layers; ``hx``: whether its first states are learned."""

    def __init__(self, kind, *, hx=False, breaks=False, **settings) -> None:
        super().__init__()
        self.breaks = breaks
        self.first, self.cells = nn.Linear(6, 8), kind(8, 8, **settings)
        directions = 2 if settings.get("bidirectional") else 1
        width = settings.get("proj_size") or 8
        self.head = nn.Linear(directions * width, 4)
        rows = directions * settings.get("num_layers", 1)
        self.h = nn.Parameter(torch.randn(rows, 5, width)) if hx else None
        self.c = nn.Parameter(torch.randn(rows, 5, 8)) if hx and kind is nn.LSTM else None

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        states = self.h if self.c is None else (self.h, self.c)
        y, last = self.cells(x, states)
        if self.breaks:
            torch._dynamo.graph_break()
        ends = last[1] if isinstance(last, tuple) else last
        return self.head(torch.relu(y)).pow(2).mean() + ends.sin().mean()


def made(kind, **settings):
    torch.manual_seed(0)
    sizes = (5, 6) if settings.get("batch_first") else (6, 5)
    return Recurrent(kind, **settings), {"x": torch.randn(*sizes, 6)}


def require_same(model, batch, **how):
    """Three steps of plain and of planned training at the least limit are equal, and within it."""
    expected = train_plain(model, batch)
    least = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW, **how).least_peak
    trained = train(hybridremat.wrap(model, kwargs=batch, memory_limit=least, **HOW, **how), batch)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= least
    return max(expected.peaks), least, trained


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_are_recomputed_one_by_one_with_the_same_bits(kind):
    plain, least, trained = require_same(*made(kind, num_layers=3, dropout=0.15, bidirectional=True))
    assert max(trained.peaks) == least
    assert kind is not nn.LSTM or least < plain / 2  # oneDNN keeps a large workspace for each layer


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    layers=st.integers(1, 3),
    flags=st.fixed_dictionaries(dict.fromkeys(("bias", "batch_first", "bidirectional", "hx"), st.booleans())),
    dropout=st.sampled_from([0.0, 0.42, 1.0]),
    extra=st.booleans(),
)
def test_any_settings(kind, layers, flags, dropout, extra):
    more = {nn.LSTM: {"proj_size": 3}, nn.RNN: {"nonlinearity": "relu"}}.get(kind, {}) if extra else {}
    require_same(*made(kind, num_layers=layers, dropout=dropout if layers > 1 else 0.0, **flags, **more))


@pytest.mark.slow
def test_between_graph_breaks():
    model, batch = made(nn.LSTM, num_layers=2, dropout=0.3, breaks=True)
    require_same(model, batch, graph_breaks="plan")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_frozen_weights(kind):
    model, batch = made(kind, num_layers=2, dropout=0.3)
    for name, parameter in model.cells.named_parameters():
        parameter.requires_grad_("l0" not in name)
    model.first.requires_grad_(False)
    require_same(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_autocast(kind):
    class Cast(Recurrent):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    torch.manual_seed(0)
    require_same(Cast(kind, num_layers=2, bidirectional=True), {"x": torch.randn(6, 5, 6)})


@hybridremat.opaque
def projected(x, weight, bias):
    """Reads a weight twice, so that autocast casts it once for both."""
    return functional.linear(functional.linear(x, weight, bias).tanh(), weight)


class Projecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return projected(x, self.layer.weight, self.layer.bias).sin().mean()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(8, 8, 2)

    def forward(self, x):
        return self.cells(x)[0].sin().mean()


@pytest.mark.parametrize("make", [Gated, Projecting])
def test_steps_in_one_autocast_block_leave_no_casts_behind(make):
    """What a call casts stays in autocast's cache, which is emptied at the end of the block."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(6, 5, 8)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        hybridremat.wrap(model, (x,), memory_limit="100%", **HOW)

    def steps(model):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(8):
                model.zero_grad()
                model(x).backward()

    steps(plain)
    assert allocated_peak(lambda: steps(model)) <= hybridremat.get_plan(model).memory_limit
    for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_forwards_and_backwards_again():
    model, batch = made(nn.LSTM, num_layers=2, dropout=0.3)
    plain = copy.deepcopy(model)
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit="80%", forwards=2, **HOW)
    for each in (plain, planned):
        torch.manual_seed(1)
        first, second = each(**batch), each(x=batch["x"] + 1)
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
    for (name, parameter), other in zip(plain.named_parameters(), planned.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


class Packed(Recurrent):
    def forward(self, x, lengths):
        packed = pack_padded_sequence(torch.tanh(self.first(x)), lengths, enforce_sorted=False)
        return self.cells(packed)[0].data.pow(2).mean()


def test_packed_sequences_are_refused_with_a_way_out():
    batch = {"x": torch.randn(6, 5, 6), "lengths": torch.tensor([6, 5, 5, 3, 1])}
    with pytest.raises(
        CaptureError, match=r"test_recurrent\.py:\d+(.|\n)*padded tensors.*graph_breaks=\"plan\""
    ):
        hybridremat.wrap(
            Packed(nn.GRU), kwargs=batch, memory_limit="100%", graph_breaks="error", **HOW
        )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_packed_sequences_train_between_graph_breaks(kind):
    torch.manual_seed(0)
    plain = Packed(kind)
    batch = {"x": torch.randn(6, 5, 6), "lengths": torch.tensor([6, 5, 5, 3, 1])}
    planned = hybridremat.wrap(
        copy.deepcopy(plain), kwargs=batch, memory_limit="200%", graph_breaks="plan", **HOW
    )
    assert train_plain(plain, batch).differences(train(planned, batch)) == []
