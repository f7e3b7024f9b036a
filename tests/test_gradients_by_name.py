"""Gradients that are asked for by name: ``torch.autograd.grad`` and ``backward(inputs=…)``.

Autograd leaves out what does not lead to them, so an output without a planned gradient must lead there.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hybridremat
from hybridremat.errors import DoubleBackwardError, GraphBreakWarning, PlanMismatchError
from support.wrapping import HOW

ROWS, SIZE = 16, 24


class Net(nn.Module):
    """Returns a prediction and a regularizer; with ``breaks`` as two graphs."""

    breaks = False

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))
        self.head, self.beside = nn.Linear(SIZE, 1), nn.Linear(SIZE, 1)

    def forward(self, x):
        hidden = self.layers(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(hidden) + self.beside(x), self.head(hidden).square().mean()


class Breaking(Net):
    breaks = True


class PredictionAlone(Net):
    def forward(self, x):
        return super().forward(x)[0]


def mixed(model, x):
    prediction, regularizer = model(x)
    return mse_loss(prediction, torch.zeros(ROWS, 1)) + 0.01 * regularizer


def of_prediction(model, x):
    return mse_loss(model(x)[0], torch.zeros(ROWS, 1))


def of_regularizer(model, x):
    return 2 * model(x)[1]


def by_grad(loss, wanted):
    return torch.autograd.grad(loss, wanted, allow_unused=True)


def by_inputs(loss, wanted):
    loss.backward(inputs=wanted)
    return [each.grad for each in wanted]


def make(kind=Net):
    torch.manual_seed(0)
    return kind(), torch.randn(ROWS, SIZE)


def wrapped(kind, **how):
    model, x = make(kind)
    return hybridremat.wrap(model, args=(x,), memory_limit="100%", **HOW, **how), x


def equal(mine, theirs):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


STEPS = pytest.mark.parametrize(
    ("kind", "how"),
    [(Net, {}), (Net, {"hold_outputs": True}), (Net, {"units": "layers"}), (Breaking, {})],
    ids=["one graph", "held", "units", "breaks"],
)


@STEPS
@pytest.mark.filterwarnings("ignore", category=GraphBreakWarning)
@pytest.mark.parametrize("ask", [by_grad, by_inputs])
@pytest.mark.parametrize("wanted", ["all", "beside"])
def test_an_output_beside_the_loss_raises_whoever_asks(kind, how, ask, wanted):
    model, x = wrapped(kind, **how)
    names = list(model.parameters()) if wanted == "all" else list(model.beside.parameters())
    for loss in (mixed, of_prediction):
        with pytest.raises(PlanMismatchError, match='grad_outputs="all"'):
            ask(loss(model, x), names)
        assert all(each.grad is None for each in model.parameters())
    plain, x = make(kind)
    named = [plain.layers[0].weight, plain.layers[2].weight]
    mine = ask(of_regularizer(model, x), [model.layers[0].weight, model.layers[2].weight])
    assert equal(mine, ask(of_regularizer(plain, x), named))


@STEPS
@pytest.mark.filterwarnings("ignore", category=GraphBreakWarning)
@pytest.mark.parametrize("ask", [by_grad, by_inputs])
def test_gradients_by_name_are_those_of_plain_training(kind, how, ask):
    model, x = wrapped(kind, grad_outputs="all", **how)
    plain, _ = make(kind)
    for loss in (mixed, of_prediction, of_regularizer):
        mine, theirs = (ask(loss(each, x), list(each.parameters())) for each in (model, plain))
        assert equal(mine, theirs)


def test_the_gradient_of_an_output_itself_can_be_asked_for():
    model, x = wrapped(Net)
    prediction, _ = model(x)
    (gradient,) = torch.autograd.grad(prediction.square().sum(), prediction)
    assert torch.equal(gradient, 2 * prediction.detach())


@pytest.mark.parametrize("ask", [by_grad, by_inputs])
def test_a_first_step_that_waits_for_its_loss_raises(ask):
    model, x = make(PredictionAlone)
    hybridremat.wrap(model, args=(x,), memory_limit="100%", **HOW)
    from hybridremat.runtime.first_steps import FirstSteps
    from hybridremat.runtime.planned_call import planned_call

    call = planned_call(model)
    call.first_steps = FirstSteps(model, call._plan_for, call._planned_call)
    with pytest.raises(DoubleBackwardError, match="for some gradients alone"):
        ask(model(x).square().mean(), list(model.parameters()))
    call.first_steps.give_up()




@pytest.mark.parametrize("ask", [by_grad, by_inputs])
def test_an_output_raises_where_gradients_leave_early_too(ask):
    model, x = wrapped(Net, gradients="in_backward")
    for loss in (mixed, of_prediction):
        with pytest.raises(PlanMismatchError, match='grad_outputs="all"'):
            ask(loss(model, x), list(model.parameters()))
        assert all(each.grad is None for each in model.parameters())
    model(x)[1].backward()
    assert all(each.grad is not None for each in model.layers.parameters())
