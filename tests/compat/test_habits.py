"""Habits of training loops: precision, accumulation, clipping, backwards of many kinds, frozen parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from support.compat.pairs import (
    EQUAL,
    Net,
    assert_equal_runs,
    batches,
    hold,
    hold_net,
    learn,
    net,
    wrap_least,
    wrap_share,
)

GROUP = "Training habits"
SCALAR = {"reserve": 64}  # a loss that is scaled or divided after the model takes one more scalar


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def usual(model, run):
    """Forward, backward, optimizer step; three times."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(3):
        optimizer.zero_grad()
        learn(model, run, batch)
        optimizer.step()


# Mixed precision


def mixed(dtype, device="cpu"):
    def loop(model, run):
        scaler, optimizer = torch.amp.GradScaler(device, init_scale=2.0**10), sgd(model)
        for number, batch in enumerate(batches(4)):
            if number == 2:
                batch = batch | {"x": batch["x"] * torch.tensor(float("inf"))}  # this step is left out
            optimizer.zero_grad()

            def step(batch=batch):
                with torch.autocast(device, dtype):
                    loss = model(**batch)["loss"]
                scaler.scale(loss).backward()

            run.step(step)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            run.keep("scale", torch.tensor(scaler.get_scale()))
            run.keep_model(model) if number != 2 else None

    return loop


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.compat)], ids=str
)
def test_autocast_and_grad_scaler(dtype, line):
    model, batch = net()
    planned = copy.deepcopy(model)
    with torch.autocast("cpu", dtype):
        wrap_least(planned, batch, **SCALAR)
    remark = hold(mixed(dtype), model, planned)
    line(GROUP, f"autocast {dtype} on CPU with GradScaler, one step with overflow", EQUAL, remark=remark)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_and_grad_scaler_on_cuda(dtype, line):
    model, batch = net()
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    model.cuda()
    plain, ends = copy.deepcopy(model), []
    with torch.autocast("cuda", dtype):
        wrap_least(model, batch, **SCALAR)
    for trained in (plain, model):
        torch.manual_seed(1)
        scaler, optimizer = torch.amp.GradScaler("cuda"), sgd(trained)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype):
                loss = trained(**batch)["loss"]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append([p.detach().cpu() for p in trained.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    line(GROUP, f"autocast {dtype} on CUDA with GradScaler", EQUAL)


def test_autocast_around_a_model_that_was_wrapped_without(line):
    def loop(model, run):
        for batch in batches(3):

            def step(batch=batch):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(**batch)["loss"]
                loss.backward()

            run.step(step)

    model, batch = net()
    planned = wrap_share(copy.deepcopy(model), batch, "110%")
    first = hybridremat.get_plan(planned)
    remark = hold(loop, model, planned, skip=1)
    assert hybridremat.get_plan(planned).fingerprint != first.fingerprint
    line(
        GROUP,
        "autocast used, but not while wrapping",
        f"{EQUAL}; planned anew in the first step",
        remark=remark,
    )


# Gradients: accumulated, clipped, kept as zeros


def test_accumulation_and_clipping(line):
    def loop(model, run):
        optimizer = sgd(model)
        for number, batch in enumerate(batches(6)):

            def step(batch=batch):
                (model(**batch)["loss"] / 3).backward()

            run.step(step)
            if number % 3 == 2:
                run.keep("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                run.keep_model(model)
                optimizer.step()
                optimizer.zero_grad()

    line(
        GROUP, "gradient accumulation, clipping by norm and by value", EQUAL, remark=hold_net(loop, **SCALAR)
    )


def test_gradients_that_are_zeros_not_none(line):
    def loop(model, run):
        optimizer = sgd(model)
        for batch in batches(3):
            run.step(lambda batch=batch: model(**batch)["loss"].backward())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    line(GROUP, "optimizer.zero_grad(set_to_none=False)", EQUAL, remark=hold_net(loop))


def test_gradients_of_some_parameters(line):
    def loop(model, run):
        for number, batch in enumerate(batches(3)):
            chosen = list(model.parameters())[number::2]

            def step(number=number, batch=batch, chosen=chosen):
                loss = model(**batch)["loss"]
                if number == 2:
                    loss.backward(inputs=chosen)
                else:
                    run.kept += torch.autograd.grad(loss, chosen)

            run.step(step)
            while run.kept:
                run.keep("gradient", run.kept.pop())

    line(GROUP, "torch.autograd.grad, backward(inputs=…)", EQUAL, remark=hold_net(loop))


def test_anomaly_detection(line):
    def loop(model, run):
        for number, batch in enumerate(batches(3)):
            with torch.autograd.set_detect_anomaly(number == 1):
                loss = model(**batch)["loss"]
                loss.backward()
            run.keep_model(model)

    model, batch = net()
    assert_equal_runs(loop, model, wrap_least(copy.deepcopy(model), batch))
    line(GROUP, "torch.autograd.detect_anomaly", EQUAL)


def test_functional_call(line):
    """Other tensors in the parameters' places for one call."""

    def loop(model, run):
        for batch in batches(2):
            others = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
            torch.func.functional_call(model, others, (), batch)["loss"].backward()
            model(**batch)["loss"].backward()
            for other in others.values():
                run.keep("gradient", other.grad)
            run.keep_model(model)

    model, batch = net()
    assert_equal_runs(loop, model, wrap_share(copy.deepcopy(model), batch))
    line(GROUP, "torch.func.functional_call", EQUAL)


def test_a_plain_step_in_a_loop_is_noticed():
    """``model.forward`` runs the plain model; the numbers are equal, and these tests must not pass for it."""

    def loop(model, run):
        for call in (model, model.forward):
            call(**batch)["loss"].backward()

    model, batch = net()
    with pytest.raises(AssertionError, match=r"planned forwards \{'': 1\}, training forwards \{'': 2\}"):
        assert_equal_runs(loop, model, wrap_share(copy.deepcopy(model), batch))


# Several backwards


def test_second_backward(line):
    def loop(model, run):
        model(**batches(1)[0])["loss"].backward()
        for batch in batches(2):
            loss = model(**batch)["loss"]
            loss.backward(retain_graph=True)
            run.keep_model(model)
            loss.backward(retain_graph=True)
            loss.backward()
            run.keep_model(model)
            with pytest.raises(RuntimeError, match=r"second (time|backward)"):
                loss.backward()

    model, batch = net()
    planned = wrap_least(copy.deepcopy(model), batch, forwards=2)
    assert_equal_runs(loop, model, planned)
    remark = "three backwards of one forward; `forwards=2` plans for them"
    line(GROUP, "retain_graph=True", EQUAL, remark=remark)


def test_double_backward_is_refused(line):
    model, batch = net()
    wrap_least(model, batch)
    before = [p.detach().clone() for p in model.parameters()]
    text = "create_graph=True.*gradient of a gradient"
    with pytest.raises(hybridremat.DoubleBackwardError, match=text):
        torch.autograd.grad(model(**batch)["loss"], list(model.parameters()), create_graph=True)
    with pytest.raises(hybridremat.DoubleBackwardError, match=text):
        model(**batch)["loss"].backward(create_graph=True)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    plain, again = net()[0], wrap_least(net()[0], batch)
    assert_same_step(plain, again, batch)
    line(
        GROUP,
        "double backward",
        "DoubleBackwardError at the backward with create_graph=True",
        remark="the next step is right",
    )


def assert_same_step(plain, planned, batch):
    for model in (plain, planned):
        torch.manual_seed(3)
        model(**batch)["loss"].backward()
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


# Which parameters and inputs have gradients


def freeze_first(model):
    model.layers[0].requires_grad_(False)


def test_frozen_first_layers(line):
    line(GROUP, "frozen first layers", EQUAL, remark=hold_net(usual, prepare=freeze_first))


class Embedded(nn.Module):
    """The small net between two parts of a larger model; only the net is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.body, self.after = nn.Linear(8, 16), Net(), nn.Linear(5, 3)

    def forward(self, x):
        return self.after(self.body(self.before(x))["scores"])


def test_a_wrapped_part_of_a_larger_model(line):
    torch.manual_seed(0)
    model, x = Embedded(), torch.randn(64, 8)
    planned = copy.deepcopy(model)
    wrap_least(planned.body, {"x": planned.before(x).detach().requires_grad_()})

    def loop(model, run):
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), torch.arange(64) % 3)
            loss.backward()
            run.keep("loss", loss)
            optimizer.step()

    assert_equal_runs(loop, model, planned)
    line(GROUP, "a part of a larger model is wrapped, inputs from layers before it", EQUAL)


def test_inputs_that_require_gradients(line):
    def loop(model, run):
        for batch in batches(2):
            x = batch["x"].requires_grad_()

            def step(batch=batch):
                model(**batch)["loss"].backward()

            run.step(step)
            run.keep("input's gradient", x.grad)

    model, batch = net()
    planned = wrap_least(copy.deepcopy(model), batch | {"x": batch["x"].requires_grad_()})
    line(GROUP, "inputs that require gradients", EQUAL, remark=hold(loop, model, planned))


def test_loss_outside(line):
    def loop(model, run):
        optimizer = sgd(model)
        for batch in batches(3):
            optimizer.zero_grad()

            def step(batch=batch):
                functional.cross_entropy(model(batch["x"])["scores"], batch["labels"]).backward()

            run.step(step)
            run.keep_model(model)
            optimizer.step()

    model, batch = net()
    inputs, outside = (
        {"x": batch["x"]},
        lambda output: functional.cross_entropy(output["scores"], batch["labels"]),
    )
    reserve = hybridremat.measure(model, kwargs=inputs, loss_fn=outside, repeats=1).outside
    planned = wrap_least(copy.deepcopy(model), inputs, reserve=reserve)
    remark = f"reserve={reserve} as measured; {hold(loop, model, planned)}"
    line(GROUP, "loss outside the model", EQUAL, remark=remark)


class Heads(nn.Module):
    """Three outputs, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU())
        self.heads = nn.ModuleList(nn.Linear(16, size) for size in (4, 5, 6))

    def forward(self, x):
        x = self.body(x)
        return tuple(head(x) for head in self.heads)


def test_only_some_outputs_in_the_loss(line):
    """Parameters that the loss does not reach keep no gradient, and so no weight decay."""
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(64, 16)

    def loop(model, run):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
        for used in ([0], [0, 2], [1], [0, 1, 2]):
            optimizer.zero_grad()
            outputs = model(x=x)
            sum(outputs[index].pow(2).mean() for index in used).backward()
            run.keep_model(model)
            optimizer.step()

    planned = wrap_least(copy.deepcopy(model), {"x": x}, grad_outputs="all")
    assert_equal_runs(loop, model, planned)
    line(
        GROUP,
        "only some outputs used in the loss",
        EQUAL,
        remark="unused parts get no gradient (None, not zeros)",
    )
