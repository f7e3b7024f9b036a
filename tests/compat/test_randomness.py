"""Random draws of every kind, models that share a generator, and steps that end early."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

from hybridremat.compiler.rng_replay import replay
from support.compat.pairs import (
    EQUAL,
    allocated_after,
    assert_equal_runs,
    batches,
    hold,
    learn,
    net,
    wrap_least,
)

GROUP = "Training habits"


def attention(h):
    """Four heads of 4, 8 positions."""
    parts = h.view(8, 8, 4, 4).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(parts, parts, parts, dropout_p=0.3, is_causal=True)
    return mixed.transpose(1, 2).reshape(h.shape)


FORMS = {
    "functional.dropout": lambda h: functional.dropout(h, 0.3),
    "native_dropout": lambda h: torch.native_dropout(h, 0.3, True)[0],
    "dropout of scaled_dot_product_attention": attention,
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.7)),
    "bernoulli of the model's own numbers": lambda h: h * torch.bernoulli(torch.sigmoid(h).detach()),
    "rand_like": lambda h: h * (torch.rand_like(h) > 0.3),
    "rand and randn": lambda h: h * (torch.rand(h.shape) > 0.3) + 0.1 * torch.randn(h.shape[-1]),
    "drop-path": lambda h: h * h.new_empty(h.shape[0], 1).bernoulli_(0.8).div_(0.8),
    "alpha dropout": lambda h: functional.alpha_dropout(h, 0.3, training=True),
    "dropout of whole features": lambda h: functional.dropout1d(h.view(8, 8, 16), 0.3).view(64, 16),
    "rrelu": lambda h: functional.rrelu(h, training=True),
    "randperm and randint": lambda h: h[torch.randperm(64)] * torch.randint(1, 3, (64, 1)),
    "multinomial": lambda h: h[torch.multinomial(torch.ones(64), 64, replacement=True)],
    "gumbel softmax": lambda h: h * functional.gumbel_softmax(h, hard=True),
}
EVERYDAY = ("functional.dropout", "dropout of scaled_dot_product_attention")


class Random(nn.Module):
    """One form of randomness, twice, and its numbers read by the backward."""

    def __init__(self, form):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.form = form

    def forward(self, x, labels):
        for layer in self.layers:
            x = x + self.form(functional.gelu(layer(x))).sin()
        return {"loss": functional.cross_entropy(x, labels)}


def seeded_steps(model, run):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, batch in enumerate(batches(3)):
        if number:
            torch.manual_seed(number)
        optimizer.zero_grad()
        learn(model, run, batch)
        run.keep("generator", torch.get_rng_state())
        optimizer.step()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EVERYDAY else pytest.mark.compat) for n in FORMS]
)
def test_random_draws(name, line):
    torch.manual_seed(0)
    model, batch = Random(FORMS[name]), batches(1)[0]
    remark = hold(seeded_steps, model, wrap_least(copy.deepcopy(model), batch))
    line(GROUP, f"random draws: {name}", EQUAL, remark=f"manual_seed before the step; {remark}")


# Two models, one generator


def test_two_models_interleaved(line):
    model, batch = net()
    plain = nn.ModuleList([model, copy.deepcopy(model)])
    planned = copy.deepcopy(plain)
    for part in planned:
        wrap_least(part, batch)

    def loop(models, run):
        optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
        for one, other in zip(batches(3), batches(6)[3:], strict=True):
            optimizer.zero_grad()
            losses = [part(**batch)["loss"] for part, batch in zip(models, (one, other), strict=True)]
            torch.rand(3)
            for loss in losses:
                loss.backward()
                run.keep("loss", loss)
            optimizer.step()
            run.keep_model(models)

    assert_equal_runs(loop, plain, planned)
    line(GROUP, "two wrapped models interleaved, with dropout", EQUAL)


# Steps that end early


def assert_next_step_is_right(plain, planned):
    """Both generators are where the two models left them."""
    assert_equal_runs(seeded_steps, plain, planned)


def test_forward_without_backward(line):
    model, batch = net()
    planned = wrap_least(copy.deepcopy(model), batch)
    planned(**batch)["loss"].backward()
    planned.zero_grad()

    def forwards():
        for _ in range(3):
            planned(**batch)

    assert allocated_after(forwards) == 0
    assert allocated_after(lambda: planned(**batch)["loss"].detach()) == 0
    assert_next_step_is_right(model, planned)
    line(
        GROUP,
        "a forward without a backward",
        "its memory is given back",
        remark="0 bytes left; the next step is right",
    )


class Interrupted(Exception):  # noqa: N818
    pass


def fail(*_):
    raise Interrupted


def in_the_loss(model, batch):
    loss = model(**batch)["loss"]
    fail(loss)


def in_a_hook_of_the_loss(model, batch):
    loss = model(**batch)["loss"]
    loss.register_hook(fail)
    loss.backward()


def in_a_parameters_hook(model, batch):
    handle = model.layers[1].weight.register_hook(fail)
    try:
        model(**batch)["loss"].backward()
    finally:
        handle.remove()


def in_an_inputs_hook(model, batch):
    x = batch["x"].clone().requires_grad_()
    x.register_hook(fail)
    model(**batch | {"x": x})["loss"].backward()


@pytest.mark.parametrize(
    "place",
    [
        in_the_loss,
        in_a_parameters_hook,
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in (in_a_hook_of_the_loss, in_an_inputs_hook)
        ),
    ],
)
def test_exception_in_the_middle_of_a_step(place, line):
    model, batch = net()
    planned = wrap_least(copy.deepcopy(model), batch)

    def broken(model, run):
        with pytest.raises(Interrupted):
            place(model, batch)
        model.zero_grad()
        run.keep("generator", torch.get_rng_state())

    assert_equal_runs(broken, model, planned)

    def again():
        with pytest.raises(Interrupted):
            place(planned, batch)
        planned.zero_grad()
        gc.collect()

    left = [allocated_after(again) for _ in range(2)]
    assert left[1] == 0, left  # the last exception may hold a few gradients until the next one, plain or not
    assert_next_step_is_right(model, planned)
    where = place.__name__.replace("_", " ")
    line(GROUP, f"an exception {where}", "the next step is right", remark="nothing piles up")


def test_a_replayed_draw_that_fails_leaves_the_generator(line):
    state = torch.get_rng_state()
    torch.rand(5)
    before = torch.get_rng_state()
    with pytest.raises(Interrupted):
        replay(state, fail)
    assert torch.equal(torch.get_rng_state(), before)
    line(GROUP, "out of memory in a replayed draw", "the generator is left as it was")
