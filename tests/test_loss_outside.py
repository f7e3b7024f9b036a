"""Loops that compute the loss outside of the model: the callback alone, the same bits, within the limit."""

from __future__ import annotations

import copy
import logging
import random
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hybridremat
from hybridremat.integrations.loop import LoopWatch
from hybridremat.integrations.loop_options import loop_options
from hybridremat.runtime.planned_call import PlannedCall, planned_call
from support.loop_cases import HOW, MEASURED, Rows, profiler_runs
from support.training import allocated_peak

SIZE, CLASSES = 32, 10


class Net(nn.Module):
    """Draws random numbers and updates buffers; knows a loss of its own."""

    def __init__(self, **_):
        super().__init__()
        layers = [[nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.GELU()] for _ in range(4)]
        self.body = nn.Sequential(*(layer for block in layers for layer in block), nn.Dropout(0.2))
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, x, labels):
        logits = self.head(self.body(x))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Keeping(Net):
    """Keeps a tensor that the loss reads."""

    def forward(self, x, labels):
        results = super().forward(x, labels)
        self.last = results["logits"].square().mean()
        return results


class Counting(Net):
    """Counts its calls in an attribute, a list and a buffer, and reads the count."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, labels):
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1
        results = super().forward(x * self.calls + self.count, labels)
        return results | {"logits": results["logits"] * len(self.seen)}


class Drawing(Net):
    """Draws from Python's generator, too."""

    def forward(self, x, labels):
        return super().forward(x * (1 + random.random()), labels)


class Marked(Net):
    """Returns its input among its outputs."""

    def forward(self, x, labels):
        return super().forward(x, labels) | {"x": x}


def inside(model, outputs, labels):
    return outputs["loss"] * 2


def outside(model, outputs, labels):
    return cross_entropy(outputs["logits"], labels, label_smoothing=0.1)


def both(model, outputs, labels):
    return outputs["loss"] + outputs["logits"].square().mean()


def in_place(model, outputs, labels):
    return cross_entropy(outputs["logits"].div_(2), labels)


def with_a_parameter(model, outputs, labels):
    return both(model, outputs, labels) + model.head.weight.square().sum()


def kept(model, outputs, labels):
    return outputs["loss"] + model.last


QUICK = (inside, both)
LOSSES = [
    pytest.param(each, id=each.__name__, marks=[] if each in QUICK else pytest.mark.slow)
    for each in (inside, outside, both, in_place, with_a_parameter)
]


def net(kind=Net):
    torch.manual_seed(0)
    return kind()


def batch(rows=64):
    generator = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, SIZE, generator=generator),
        "labels": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


def train(model, loss_of, sizes, watched=None):
    """All losses, gradients, buffers and attributes of a few steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for rows in sizes:
        given = batch(rows)
        if watched is not None:
            watched.step_begins()
        loss = loss_of(model, model(**given), given["labels"])
        loss.backward()
        if watched is not None:
            watched.backward_ends()
            watched.step_ends()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *model.parameters(), *model.buffers()]


@contextmanager
def watching(model, limit="95%", **options):
    watched = LoopWatch(loop_options({"memory_limit": limit, **HOW} | options, measure_every=1))
    watched.begin(model, loss_outside=True)
    try:
        yield watched
    finally:
        watched.end()


def equal(first, second):
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("loss_of", LOSSES)
def test_steps_are_those_of_plain_pytorch_and_keep_the_limit(loss_of):
    plain, model, sizes = net(), net(), [64, 48, 64]
    expected = train(plain, loss_of, sizes)
    with watching(model) as watched:
        assert equal(train(model, loss_of, sizes, watched), expected)
        log = watched.log
    assert len(log.plans) == 2
    roles = {plan.request.grad_outputs for plan in log.plans}
    assert roles == {"auto" if loss_of is inside else "all"}
    assert log.largest.measured <= log.largest.plan.memory_limit
    assert not profiler_runs()


@pytest.mark.slow
def test_a_forward_that_runs_twice_counts_once():
    plain, model = net(Counting), net(Counting)
    expected = train(plain, both, [64, 64])
    with watching(model) as watched:
        assert equal(train(model, both, [64, 64], watched), expected)
    assert (model.calls, model.seen) == (plain.calls, plain.seen) == (2, [1, 2])


@pytest.mark.slow
def test_what_a_first_forward_draws_in_python_is_drawn_once():
    random.seed(0)
    expected = train(net(Drawing), both, [64, 64])
    after = random.getstate()
    random.seed(0)
    model = net(Drawing)
    with watching(model, graph_breaks="plan") as watched:
        assert equal(train(model, both, [64, 64], watched), expected)
    assert random.getstate() == after


def test_what_is_reserved_is_what_the_loss_allocates():
    """Measured anew, from the outputs of a plain forward to their gradients."""
    given, model = batch(), net()
    with torch.no_grad():
        results = model(**given)
    results = {name: value.requires_grad_() for name, value in results.items()}
    found = allocated_peak(lambda: outside(model, results, given["labels"]).backward())
    model = net()
    with watching(model) as watched:
        train(model, outside, [64], watched)
        (plan,) = watched.log.plans
    assert found > 64 * CLASSES * 4 and abs(plan.reserve - found) <= 64


def test_the_first_step_keeps_the_limit(monkeypatch):
    """Once it is planned, its forward leaves room for what is there, also where the plan itself would not."""
    peaks, run = [], PlannedCall._run

    def recorded(self, step, *given):
        outputs = []
        peaks.append(allocated_peak(lambda: outputs.append(run(self, step, *given))))
        return outputs.pop()

    monkeypatch.setattr(PlannedCall, "_run", recorded)
    model = net()
    with watching(model, "90%") as watched:
        train(model, outside, [64], watched)
        (plan,) = watched.log.plans
        gradients = 64 * CLASSES * 4
        assert plan.reserve >= gradients and 0 < peaks[0] <= plan.memory_limit - gradients
        held = plan.memory_limit - peaks[0] + 1
        planned_call(model)._planned_call((), batch(), held=held)["loss"].backward()
        assert peaks[1] < peaks[0] and planned_call(model).plan == plan


def test_a_first_step_beyond_the_limit_is_said(caplog):
    model = net()
    with watching(model) as watched:
        train(model, outside, [64], watched)
        limit = watched.log.plans[0].memory_limit
        planned_call(model)._planned_call((), batch(), held=limit - 8)["loss"].backward()
    assert "more than the limit" in caplog.text


def test_what_is_asked_for_is_kept():
    model = net()
    with watching(model, reserve="9KiB") as watched:
        train(model, inside, [64], watched)
        assert watched.log.plans[0].reserve == 9 << 10
    with watching(model, grad_outputs="all", reserve="1KiB") as watched:
        train(model, inside, [64, 64], watched)
        assert (watched.log.plans[0].reserve, watched.log.plans[0].request.grad_outputs) == (1 << 10, "all")


@pytest.mark.parametrize(
    ("kind", "loss_of", "says"),
    [(Keeping, kept, "keeps tensors on its modules"), (Marked, both, "returns inputs, parameters")],
)
def test_what_cannot_be_seen_is_said(kind, loss_of, says, caplog):
    expected = train(net(kind), loss_of, [64, 64])
    model = net(kind)
    with watching(model) as watched:
        assert equal(train(model, loss_of, [64, 64], watched), expected)
        assert {plan.request.grad_outputs for plan in watched.log.plans} == {"all"}
    (said,) = [
        each.message
        for each in caplog.records
        if each.levelno == logging.WARNING and "reserve=" in each.message
    ]
    assert says in said


def test_a_limit_that_has_no_room_for_the_loss_says_so():
    model = net()
    with (
        watching(model, "25%") as watched,
        pytest.raises(hybridremat.InfeasibleLimitError, match="loss was seen to allocate"),
    ):
        train(model, outside, [64], watched)
    backward = torch.autograd.backward
    assert backward.__module__ == "torch.autograd" and not profiler_runs()


def test_a_second_backward_of_the_first_step_is_refused():
    model, given = net(), batch()
    with watching(model):
        loss = both(model, model(**given), given["labels"])
        loss.backward(retain_graph=True)
        with pytest.raises(hybridremat.DoubleBackwardError, match=r"one loss\.backward"):
            loss.backward()


def test_a_loop_that_fails_leaves_nothing_behind():
    model, given, before = net(), batch(), torch.autograd.backward
    with watching(model):
        model(**given)
        assert torch.autograd.backward is not before
    assert torch.autograd.backward is before and not profiler_runs()
    model(**given)["loss"].backward()


transformers = pytest.importorskip("transformers")


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        loss = outside(model, outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Doubled(transformers.Trainer):
    def compute_loss(self, model, inputs, **named):
        return 2 * super().compute_loss(model, inputs, **named)


def from_outputs(outputs, labels, num_items_in_batch=None):
    return outputs["logits"].square().mean()


KINDS = {
    "stock": (transformers.Trainer, {}, "auto", False),
    "subclass": (OwnLoss, {}, "all", True),
    "subclass of the model's loss": (Doubled, {}, "auto", True),
    "compute_loss_func": (transformers.Trainer, {"compute_loss_func": from_outputs}, "all", True),
}


def trained(folder, name, callbacks, net_of=Net):
    kind, options, *_ = KINDS[name]
    rows = batch(48)
    how = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        **how,
    )
    model = net(net_of)
    trainer = kind(model=model, args=arguments, train_dataset=Rows(**rows), callbacks=callbacks, **options)
    trainer.train()
    return trainer.state.log_history, copy.deepcopy(list(model.state_dict().values()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name", [n if n == "subclass" else pytest.param(n, marks=pytest.mark.slow) for n in KINDS]
)
def test_the_trainers_callback_alone(name, tmp_path):
    *_, roles, measured = KINDS[name]
    net_of = Scaled if name == "compute_loss_func" else Net
    plain, expected = trained(tmp_path / "plain", name, [], net_of)
    callback = hybridremat.HybridRematTrainerCallback(
        memory_limit="95%", measure_every=1, report=False, **HOW
    )
    logs, found = trained(tmp_path / "planned", name, [callback], net_of)
    losses = [[entry["loss"] for entry in each if "loss" in entry] for each in (logs, plain)]
    assert losses[0] == losses[1] and all(map(torch.equal, found, expected))
    (plan,) = callback.plans
    assert plan.request.grad_outputs == roles and (plan.reserve > 0) == measured
    peaks = [entry[MEASURED] for entry in logs if MEASURED in entry]
    assert peaks and max(peaks) <= plan.memory_limit


class Scaled(Net):
    """Has a scalar output that is no loss; the Trainer takes its labels away."""

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        return {"scale": logits.square().mean(), "logits": logits}
