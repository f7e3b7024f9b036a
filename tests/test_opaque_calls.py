"""Fused losses and a user's own functions as one op: the same bits as the plain calls, memory measured."""

from __future__ import annotations

import copy
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.compiler import opaque_calls
from hybridremat.errors import CaptureError, PlanError, UsageError
from support.training import train, train_plain

HOW = {"cost_model": "flops", "workers": 1, "progress": False}
WORDS, WIDTH = 40, 16


class FusedLoss(torch.autograd.Function):
    """A head with its loss, as libraries write it: ``out=``, masks, gradients that are made in the forward.

    The backward writes over what was saved, and one tensor is kept on ``ctx``.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, scale, outputs):
        mask = labels != -100
        logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype)
        torch.mm(hidden, weight.t(), out=logits)
        logits.mul_(scale)
        probabilities = logits.softmax(-1)
        target = labels.clamp(min=0)
        loss = -(logits.log_softmax(-1).gather(-1, target[:, None])[:, 0] * mask).sum() / mask.sum()
        probabilities.scatter_add_(-1, target[:, None], -torch.ones_like(hidden[:, :1]))
        probabilities.mul_(mask[:, None] * (scale / mask.sum()))
        ctx.from_weight = probabilities.t() @ hidden if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(probabilities @ weight)
        ctx.set_materialize_grads(False)
        top = logits.argmax(-1) == labels if "top" in outputs else None
        if top is not None:
            ctx.mark_non_differentiable(top)
        return loss, top

    @staticmethod
    def backward(ctx, grad, _):
        (from_hidden,) = ctx.saved_tensors
        from_weight = None if ctx.from_weight is None else ctx.from_weight * grad
        with torch.no_grad():
            from_hidden.untyped_storage()  # written over below, as by a kernel that autograd does not see
            from_hidden.data.mul_(grad)
        return from_hidden, from_weight, None, None, None


class Model(nn.Module):
    """Embedding, two layers, and the fused loss, whose weight may be the embedding's."""

    def __init__(self, *, tied=False, frozen=False, head=None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.out.weight = self.words.weight
        self.out.weight.requires_grad_(not frozen)
        self.head = head or FusedLoss.apply

    def forward(self, tokens, labels):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + functional.dropout(functional.gelu(layer(x)), 0.2)
        loss, top = self.head(x.flatten(0, 1), self.out.weight, labels.flatten(), 0.7, ("top",))
        return loss * 2 + 0 * top.float().mean()


@pytest.fixture
def known(monkeypatch):
    """The class in a module of a name that the table of known losses has."""
    module = types.ModuleType("a_library.losses")
    module.FusedLoss = FusedLoss
    monkeypatch.setitem(sys.modules, "a_library.losses", module)
    monkeypatch.setattr(opaque_calls, "_FUSED_LOSSES", (("a_library.losses", "FusedLoss"),))


def made(**how):
    torch.manual_seed(0)
    labels = torch.randint(0, WORDS, (4, 6))
    labels[:, :2] = -100
    return Model(**how), {"tokens": torch.randint(0, WORDS, (4, 6)), "labels": labels}


def require_same(model, batch, **how):
    expected = train_plain(model, batch)
    least = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW, **how).least_peak
    trained = train(hybridremat.wrap(model, kwargs=batch, memory_limit=least, **HOW, **how), batch)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= least


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("how", [{}, {"tied": True}, {"frozen": True}], ids=["plain", "tied", "frozen"])
def test_a_fused_loss_trains_with_the_same_bits(how):
    require_same(*made(**how))


@pytest.mark.quick_cases(1)
@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="newer than this torch")
@pytest.mark.parametrize("how", [{}, {"tied": True}, {"frozen": True}], ids=["plain", "tied", "frozen"])
def test_pytorchs_own_fused_loss_trains_with_the_same_bits(how):
    def head(hidden, weight, labels, *_):
        loss = functional.linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1)
        return loss, loss.detach()

    require_same(*made(head=head, **how))


@pytest.mark.slow
@pytest.mark.usefixtures("known")
def test_between_graph_breaks():
    def broken_head(*given):
        torch._dynamo.graph_break()
        return FusedLoss.apply(*given)

    require_same(*made(head=broken_head), graph_breaks="plan")


@pytest.mark.usefixtures("known")
def test_labels_change_and_a_graph_is_retained():
    """Other masks in later steps need no other plan; a second backward adds the same gradients."""
    model, batch = made()
    plain = copy.deepcopy(model)
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW)
    for cut in (0, 3, 5):
        labels = batch["labels"].clone()
        labels[:, :cut] = -100
        for each in (plain, planned):
            torch.manual_seed(cut)
            each(batch["tokens"], labels).backward()
    for (name, parameter), other in zip(plain.named_parameters(), planned.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def own_head(hidden, weight, labels, scale, outputs):
    """A function of a user, of ops that cannot be traced."""
    return FusedLoss.apply(hidden, weight, labels, scale, outputs)


def test_a_function_of_ones_own():
    require_same(*made(head=hybridremat.opaque(own_head)))


class Cubed(torch.autograd.Function):
    """In NumPy, there and back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.exp(x.detach().numpy()) ** 3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * np.exp(x.numpy()) ** 3 * grad.numpy())


class InNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return Cubed.apply(self.layers(x)).mean()


@pytest.mark.parametrize("opaque", [True, False])
def test_numpy_keeps_its_bits_in_an_opaque_call_alone(opaque, monkeypatch):
    monkeypatch.setattr(opaque_calls, "_told", {hybridremat.opaque(Cubed)} if opaque else set())
    torch.manual_seed(0)
    model, batch = InNumpy(), {"x": torch.randn(32, 16)}
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW)
    mine, theirs = train(model, batch), train(plain, batch)
    assert (theirs.differences(mine) == []) is opaque
    pairs = [(mine.tensors[name], theirs.tensors[name]) for name in ("loss 0", "loss 1")]
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in pairs)


def test_opaque_outside_of_a_step_is_the_function():
    given = torch.randn(6, WIDTH), torch.randn(WORDS, WIDTH), torch.arange(6), 0.5, ()
    assert torch.equal(hybridremat.opaque(own_head)(*given)[0], own_head(*given)[0])


def in_place(x):
    return torch.sin(x.mul_(2))


def view(x):
    return x[0]


WEIGHT = torch.ones(WIDTH, requires_grad=True)


def hidden_weight(x):
    return x * WEIGHT


class One(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), hybridremat.opaque(function)

    def forward(self, x):
        return self.function(torch.tanh(self.layer(x))).pow(2).mean()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (in_place, "in-place|writes into"),
        (view, "returns a view"),
        (hidden_weight, "not among its arguments"),
    ],
)
def test_what_cannot_be_one_op_is_refused(function, said):
    with pytest.raises(CaptureError, match=said):
        hybridremat.plan(One(function), kwargs={"x": torch.randn(3, WIDTH)}, memory_limit="100%", **HOW)


def branching(x):
    return torch.sin(x) * torch.cos(x) if x.sum() > 40 else torch.sin(x)


def test_a_call_that_keeps_other_tensors_than_in_its_trial_ends_the_step():
    batch = {"x": torch.full((3, WIDTH), 0.1)}
    model = One(branching)
    with torch.no_grad():
        model.layer.weight.fill_(1.0)
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW)
    planned(-batch["x"]).backward()
    with pytest.raises(PlanError, match="depend on the numbers"):
        planned(batch["x"])


@pytest.mark.parametrize("given", [nn.Linear(2, 2), nn.Linear, 3])
def test_opaque_takes_functions_alone(given):
    with pytest.raises(UsageError, match="functional_call"):
        hybridremat.opaque(given)
