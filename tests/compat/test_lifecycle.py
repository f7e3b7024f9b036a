"""What happens to a wrapped model between steps: modes, copies, hooks, frozen parts, other parameters."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import hybridremat
from support.compat.pairs import EQUAL, assert_equal_runs, batches, hold, learn, run, wrap_least, wrap_share
from support.planned_steps import planned_forwards, plans_made

GROUP = "Training habits"
REPLANNED = f"{EQUAL}; planned anew"


class Normed(nn.Module):
    """BatchNorm and dropout, both different in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(2))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, labels=None):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(functional.gelu(norm(layer(x))))
        return {"loss": functional.cross_entropy(x, labels), "scores": x} if labels is not None else x


def normed():
    torch.manual_seed(0)
    model, batch = Normed(), batches(1)[0]
    return model, batch, wrap_least(copy.deepcopy(model), batch)


def train_step(model, run, batch):
    """One measured step with an optimizer that has no state."""
    learn(model, run, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None


def plain_step(model, run, batch):
    """One step that is not measured: it plans."""
    run.measure, measured = False, run.measure
    train_step(model, run, batch)
    run.measure = measured


# Modes


def test_modes_are_switched_at_any_time(line):
    def loop(model, run):
        first, *rest = batches(6)
        train_step(model, run, first)
        model.eval()
        with torch.no_grad():
            run.keep("evaluated", model(**first)["scores"])
        with torch.inference_mode():
            run.keep("inferred", model(first["x"]).clone())
        plain_step(model, run, rest[0])  # training in eval mode
        model.train()
        train_step(model, run, rest[1])
        with torch.no_grad():
            run.keep("in training mode", model(**first)["scores"])
        model.norms[1].eval()
        plain_step(model, run, rest[2])
        train_step(model, run, rest[3])
        model.dropout.eval()
        plain_step(model, run, rest[4])
        model.train()
        train_step(model, run, rest[0])

    model, _, planned = normed()
    wrap_share(hybridremat.unwrap(planned), batches(1)[0])
    remark = f"also of submodules, which are planned anew; {hold(loop, model, planned)}"
    assert plans_made(planned) == 3  # as wrapped, without one norm's statistics, without dropout as well
    line(GROUP, "train(), eval(), no_grad, inference_mode at any time", EQUAL, remark=remark)


# Copies


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state_dict(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = Normed()
    fresh.load_state_dict(torch.load(file))
    return fresh


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        through_pickle,
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in (copy.copy, through_torch_save, through_state_dict)
        ),
    ],
    ids=lambda f: f.__name__,
)
def test_copies(copied, line):
    model, batch, planned = normed()
    for trained in (model, planned):
        torch.manual_seed(1)
        trained(**batch)["loss"].backward()
        trained.zero_grad()
    twin = copied(planned)
    with pytest.raises(hybridremat.ModelError, match="is not wrapped"):
        hybridremat.get_plan(twin)
    assert hybridremat.get_plan(planned)
    assert list(twin.state_dict()) == list(model.state_dict())
    loop = lambda model, run: train_step(model, run, batch)  # noqa: E731
    with planned_forwards() as ran:
        assert run(loop, copied(model)).differences(run(loop, twin)) == []
    assert not ran
    assert_equal_runs(loop, copied(model), wrap_least(copied(planned), batch))
    line(
        GROUP,
        f"a copy ({copied.__name__.replace('_', ' ')})",
        "the copy is plain and can be wrapped; the original stays wrapped",
    )


@pytest.mark.slow
def test_averaged_models(line):
    def loop(model, run):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for batch in batches(3):
            train_step(model, run, batch)
            average.update_parameters(model)
        update_bn([batch["x"] for batch in batches(2)], average)
        average.eval()
        run.keep("averaged", average(batches(1)[0]["x"]))
        run.keep_model(average)

    model, _, planned = normed()
    line(GROUP, "EMA copies (AveragedModel, update_bn)", EQUAL, remark=hold(loop, model, planned))


# Hooks


def test_forward_hooks(line):
    def loop(model, run):
        seen = []
        first, *rest = batches(5)
        train_step(model, run, first)
        handles = [
            model.layers[1].register_forward_hook(lambda module, args, output: output * 2),
            model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
            model.norms[0].register_forward_hook(
                lambda module, args, output: seen.append(output.detach().mean())
            ),
        ]
        plain_step(model, run, rest[0])
        plain_step(model, run, rest[1])
        for item in seen:
            run.keep("seen", item)
        for handle in handles:
            handle.remove()
        plain_step(model, run, rest[2])

    model, batch, planned = normed()
    wrap_share(hybridremat.unwrap(planned), batch)
    assert_equal_runs(loop, model, planned)
    assert plans_made(planned) == 2  # with the hooks and without
    line(GROUP, "forward hooks and pre-hooks, registered and removed after wrapping", REPLANNED)


@pytest.mark.everyday
def test_gradient_hooks(line):
    """Hooks of parameters, as optimizers that step inside the backward use them."""

    def loop(model, run):
        train_step(model, run, batches(1)[0])
        weight, bias = model.layers[0].weight, model.layers[1].bias
        weight.register_hook(lambda gradient: gradient * 0.5)
        taken = []

        def take(parameter):
            taken.append(parameter.grad)
            parameter.data.sub_(parameter.grad)
            parameter.grad = None

        bias.register_post_accumulate_grad_hook(take)
        train_step(model, run, batches(2)[1])
        run.keep("taken", taken.pop())

    model, _, planned = normed()
    line(
        GROUP,
        "hooks of parameters (register_hook, post-accumulate)",
        EQUAL,
        remark=hold(loop, model, planned),
    )


@pytest.mark.filterwarnings("ignore::hybridremat.errors.GraphBreakWarning")
def test_backward_hooks_of_modules(line):
    def loop(model, run):
        first, *rest = batches(5)
        train_step(model, run, first)
        seen = []
        hook = model.layers[1].register_full_backward_hook(lambda *given: seen.append(given[2][0].clone()))
        plain_step(model, run, rest[0])
        train_step(model, run, rest[1])
        hook.remove()
        run.keep("seen", seen.pop())
        plain_step(model, run, rest[2])
        train_step(model, run, rest[3])

    model, _, planned = normed()
    wrap_share(hybridremat.unwrap(planned), batches(1)[0])
    remark = f"planned anew in several graphs when one comes; {hold(loop, model, planned)}"
    line(GROUP, "backward hooks of modules", EQUAL, remark=remark)


# Other parameters


def freeze(model):
    model.layers[0].requires_grad_(False)


def unfreeze(model):
    model.requires_grad_(True)


def freeze_all(model):
    model.requires_grad_(False)


def to_double(model):
    model.double()


def replace_a_layer(model):
    torch.manual_seed(5)
    model.layers[1] = nn.Linear(16, 16, bias=False)


def load_another_state(model):
    torch.manual_seed(5)
    model.load_state_dict(Normed().state_dict())


def assign_another_state(model):
    torch.manual_seed(5)
    model.load_state_dict(Normed().state_dict(), assign=True)


def share_a_parameter(model):
    model.layers[1].weight = model.layers[0].weight


CHANGES = {  # and how many plans there are afterwards
    "parameters frozen, and unfrozen": ((freeze, unfreeze), 2),
    "model.to(dtype)": ((to_double,), 2),
    "load_state_dict": ((load_another_state,), 1),
    "load_state_dict(assign=True)": ((assign_another_state,), 1),
    "a layer replaced": ((replace_a_layer,), 2),
    "two layers' weights tied": ((share_a_parameter,), 1),  # the graph takes one tensor twice
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_wrapping(name, line):
    changes, plans = CHANGES[name]

    def loop(model, run):
        train_step(model, run, batches(1)[0])
        for change in changes:
            change(model)
            kind = next(model.parameters()).dtype
            for number, batch in enumerate(batches(3)[1:]):
                inputs = batch | {"x": batch["x"].to(kind)}
                (train_step if number else plain_step)(model, run, inputs)

    model, batch, planned = normed()
    wrap_share(hybridremat.unwrap(planned), batch)
    remark = hold(loop, model, planned)
    assert plans_made(planned) == plans
    line(GROUP, f"after wrapping: {name}", REPLANNED if plans > 1 else EQUAL, remark=remark)


def test_everything_frozen_after_wrapping(line):
    model, batch, planned = normed()
    for frozen in (model, planned):
        frozen.requires_grad_(False)
    torch.manual_seed(2)
    expected = model(**batch)
    torch.manual_seed(2)
    made = planned(**batch)
    assert not made["loss"].requires_grad and torch.equal(expected["loss"], made["loss"])
    assert_equal_runs(lambda model, run: train_step(model, run, batch), *map(thawed, (model, planned)))
    line(GROUP, "after wrapping: every parameter frozen", "runs without gradients, as the plain model does")


def thawed(model):
    return model.requires_grad_(True)
