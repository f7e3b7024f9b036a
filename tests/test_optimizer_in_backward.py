"""An ordinary optimizer that steps in the backward."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.errors import (
    EarlyGradientError,
    InfeasibleLimitError,
)
from support.early_gradients import EARLY, adamw, assert_equal, trained, wrapped
from support.training import loss_in, small
from support.wrapping import least_limit


def in_backward():
    model, batch = small("mlp")
    optimizer = hybridremat.optimizer_in_backward(model, adamw)
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **EARLY)
    return model, batch, optimizer


def test_groups_schedules_and_checkpoints_are_the_ordinary_ones(tmp_path):
    def grouped(parameters):
        decayed = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 3e-2}]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)

    model, batch = small("transformer")
    plain = copy.deepcopy(model)
    ordinary = grouped(list(plain.parameters()))
    optimizer = hybridremat.optimizer_in_backward(model, grouped)
    hybridremat.wrap(model, kwargs=batch, memory_limit="80%", **EARLY)
    expected, _ = trained(plain, batch, ordinary, 2, schedule(ordinary))
    found, _ = trained(model, batch, optimizer, 2, schedule(optimizer))
    assert_equal(found, expected)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt")
    assert saved["param_groups"] == ordinary.state_dict()["param_groups"]

    again = grouped(list(plain.parameters()))  # an ordinary one goes on from it, and the other way round
    states = saved, ordinary.state_dict()
    for each, state in zip((again, optimizer), states, strict=True):
        state["param_groups"][0]["lr"] = 0.2  # what is loaded counts
        each.load_state_dict(state)
    expected, _ = trained(plain, batch, again, 2)
    found, _ = trained(model, batch, optimizer, 2)
    assert_equal(found, expected)


def test_it_can_be_made_an_ordinary_one_again():
    model, batch = small("mlp")
    plain = copy.deepcopy(model)
    optimizer, ordinary = hybridremat.optimizer_in_backward(model, adamw), adamw(plain.parameters())
    optimizer.detach()
    assert type(optimizer) is torch.optim.AdamW
    assert_equal(trained(model, batch, optimizer, 2)[0], trained(plain, batch, ordinary, 2)[0])
    hybridremat.optimizer_in_backward(model, adamw)
    with pytest.raises(EarlyGradientError, match=r"already; call its detach\(\) first"):
        hybridremat.optimizer_in_backward(model, adamw)


def test_its_workspace_is_measured_by_kind():
    graph = {}
    for make in (torch.optim.SGD, torch.optim.AdamW):
        model, batch = small("mlp")
        hybridremat.optimizer_in_backward(model, lambda p, make=make: make(p, lr=1e-3))
        graph[make] = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **EARLY).details.graph
    assert {each.workspace for each in graph[torch.optim.SGD].deliveries} == {0}
    weight = max(each.workspace for each in graph[torch.optim.AdamW].deliveries)
    assert 2 * 4 * 32 * 32 <= weight <= 2 * 4 * 32 * 32 + 64


def test_accumulated_gradients_are_refused():
    model, batch, optimizer = in_backward()
    for _ in range(2):
        model(**batch).backward()
    with pytest.raises(EarlyGradientError, match="has been applied on its own"):
        optimizer.step()
    model(**batch).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(EarlyGradientError, match="Nothing of this backward has been applied"):
        model(**batch).backward()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_scaler_is_refused():
    model, batch, optimizer = in_backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(**batch)).backward()
    with pytest.raises(EarlyGradientError, match="a GradScaler was given an optimizer that steps in the"):
        scaler.step(optimizer)


def test_a_closure_runs_once():
    model, batch, optimizer = in_backward()
    plain, _ = small("mlp")
    ordinary = adamw(plain.parameters())

    def closure(each):
        loss = loss_in(each(**batch))
        loss.backward()
        return loss.detach()

    losses = [o.step(partial(closure, m)) for o, m in ((optimizer, model), (ordinary, plain))]
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    with pytest.raises(EarlyGradientError, match="LBFGS runs several backwards"):
        hybridremat.optimizer_in_backward(plain, torch.optim.LBFGS)


def test_optimizers_that_cannot_step_by_parameter_are_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1

    model, _ = small("mlp")
    with pytest.raises(EarlyGradientError, match=r"changes with each step in its param_groups \(steps\)"):
        hybridremat.optimizer_in_backward(model, lambda p: Counting(p, lr=0.1))
    with pytest.raises(EarlyGradientError, match="the factory returned a list"):
        hybridremat.optimizer_in_backward(model, list)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_factory_has_to_take_the_parameters_that_it_is_given():
    model, _ = small("mlp")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for other in (model, nn.Linear(4, 4)):
        with pytest.raises(EarlyGradientError, match="has to make the optimizer of the list of parameters"):
            hybridremat.optimizer_in_backward(model, lambda _, other=other: adamw(other.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(EarlyGradientError, match="no parameter of this model requires a gradient"):
        hybridremat.optimizer_in_backward(nn.ReLU(), adamw)


def test_an_optimizer_after_the_plan_is_refused():
    model, _ = wrapped()
    with pytest.raises(EarlyGradientError, match="planned already"):
        hybridremat.optimizer_in_backward(model, adamw)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_parameters_that_are_added_later_step_as_well():
    model, batch = small("mlp")
    plain = copy.deepcopy(model)
    optimizers = []
    for each in (model, plain):
        each.layers[0].requires_grad_(False)
        make = partial(hybridremat.optimizer_in_backward, each) if each is model else None
        optimizers.append(make(adamw) if make else adamw([p for p in each.parameters() if p.requires_grad]))
        each.layers[0].requires_grad_(True)
        optimizers[-1].add_param_group({"params": list(each.layers[0].parameters()), "lr": 0.1})
    limit = least_limit(model, batch, gradients="in_backward")
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **EARLY)
    expected, _ = trained(plain, batch, optimizers[1], 3)
    found, peaks = trained(model, batch, optimizers[0], 3)
    assert_equal(found, expected)
    assert peaks[1] == limit


def test_copies_are_ordinary_optimizers():
    model, batch, optimizer = in_backward()
    model(**batch).backward()
    pickled = pickle.loads(pickle.dumps(optimizer))  # noqa: S301 (its own)
    for twin in (copy.deepcopy(optimizer), pickled):
        assert type(twin) is torch.optim.AdamW
        assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        for parameter in twin.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        twin.step()


def test_an_infeasible_limit_names_the_optimizers_share():
    model, batch = small("mlp")
    hybridremat.optimizer_in_backward(model, adamw)
    with pytest.raises(InfeasibleLimitError, match=r"steps in the backward takes up to 8\.01 KiB of it"):
        hybridremat.wrap(model, kwargs=batch, memory_limit=1, **EARLY)
