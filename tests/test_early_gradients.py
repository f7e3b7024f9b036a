"""Gradients that leave in the backward: against plain PyTorch, their memory, and what the checker refuses."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.cli import main as cli
from hybridremat.compiler.check import check
from hybridremat.compiler.early_gradients import deliver
from hybridremat.compiler.emit import emit
from hybridremat.errors import (
    EarlyGradientError,
    KeptGradientWarning,
    LimitError,
    PlanError,
)
from hybridremat.graph.joint import Delivery, as_plain, plain_schedule
from hybridremat.graph.memory import MemorySimulator, step_memory
from hybridremat.reports.spans import execution_blocks, live_spans, temporary_bytes
from support.early_gradients import EARLY, adamw, assert_equal, trained, wrapped
from support.quick_planning import quick_planning
from support.random_models import build, recipes
from support.random_training import FEW, trained_plain
from support.training import SMALL, Block, allocated_peak, loss_in, small, traced
from support.wrapping import HOW, least_limit


class Tied(nn.Module):
    """An embedding that is the head too, and a parameter that is read through views."""

    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.joined = nn.Parameter(torch.randn(2, width, width) / 10)

    def forward(self, tokens):
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        x = self.embedding(tokens)
        for block, weight in zip(self.blocks, self.joined.unbind(), strict=True):
            x = torch.tanh(block(x, mask) @ weight.t()) + x @ weight
        scores = functional.linear(x, self.embedding.weight)
        return functional.cross_entropy(scores.flatten(0, 1), tokens.flatten().roll(1))


def tied():
    torch.manual_seed(0)
    return Tied(), {"tokens": torch.randint(0, 50, (2, 24))}


MODELS = {**{name: lambda name=name: small(name) for name in SMALL}, "tied": tied}


@pytest.mark.quick_cases(1)
@pytest.mark.exchanges
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "tied" else name for name in MODELS]
)
def test_it_trains_as_plain_pytorch_at_its_least_limit(name):
    model, batch = MODELS[name]()
    plain = copy.deepcopy(model)
    expected, plain_peaks = trained(plain, batch, adamw(plain.parameters()), steps=5)
    optimizer = hybridremat.optimizer_in_backward(model, adamw)
    limit = least_limit(model, batch, gradients="in_backward")
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **EARLY)
    found, peaks = trained(model, batch, optimizer, steps=5)
    assert_equal(found, expected)
    assert set(peaks[1:]) == {limit}  # the first step makes the optimizer's state, too
    assert limit < min(plain_peaks)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["transformer", "tied"])
def test_the_least_limit_is_below_that_of_gradients_at_the_end(name):
    model, batch = MODELS[name]()
    early = least_limit(model, batch, gradients="in_backward")
    assert early <= 0.75 * least_limit(model, batch)


@FEW
@given(recipes(longest=6))
def test_random_models(recipe):
    model, batch = build(recipe)
    expected = trained_plain(model, batch, steps=2)
    model = copy.deepcopy(model)

    def small_steps(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)

    optimizer = hybridremat.optimizer_in_backward(model, small_steps)
    with quick_planning():
        limit = least_limit(model, batch, gradients="in_backward")
        hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **EARLY)
    found, peaks = trained(model, batch, optimizer, steps=2)
    for name, _ in model.named_parameters():
        assert torch.equal(found[f"{name} 1"], expected.tensors[f"parameter {name}"]), name
    assert torch.equal(found["loss 1"], expected.tensors["loss 1"])
    assert peaks[1] <= limit


def test_gradients_are_added_to_those_that_exist():
    model, batch = tied()
    plain = copy.deepcopy(model)
    limit = least_limit(model, batch, gradients="in_backward")
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **EARLY)
    for each in (model, plain):
        each.zero_grad(set_to_none=False)
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
    peaks = []
    for step in range(3):
        for each in (plain, model):
            torch.manual_seed(step)
            peaks.append(allocated_peak(lambda each=each: loss_in(each(**batch)).backward()))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert max(peaks[1::2]) == limit < min(peaks[::2])


def test_hooks_run_as_in_plain_pytorch():
    """Tensor hooks may change the gradient; what runs afterwards sees it in ``.grad``; each runs once."""
    model, batch = small("transformer")
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=batch, memory_limit="70%", **EARLY)
    seen = {"model": {}, "plain": {}}
    for kind, each in (("model", model), ("plain", plain)):
        for name, parameter in each.named_parameters():
            parameter.register_hook(lambda gradient: gradient * 2)

            def after(p, name=name, kept=seen[kind]):
                kept.setdefault(name, []).append(p.grad.clone())
                p.grad = None

            parameter.register_post_accumulate_grad_hook(after)
        torch.manual_seed(3)
        loss_in(each(**batch)).backward()
    assert seen["model"].keys() == seen["plain"].keys() == dict(model.named_parameters()).keys()
    for name, (gradient,) in seen["plain"].items():
        assert torch.equal(seen["model"][name][0], gradient) and len(seen["model"][name]) == 1


def test_a_frozen_parameter_and_one_without_a_gradient_are_left_alone():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.frozen, self.idle = (nn.Linear(16, 16) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return functional.gelu(self.frozen(functional.gelu(self.first(x)))).sum()

    model, x = Unused(), torch.randn(8, 16)
    plain = copy.deepcopy(model)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    optimizers = hybridremat.optimizer_in_backward(model, sgd), sgd(plain.parameters())
    hybridremat.wrap(model, (x,), memory_limit="100%", **EARLY)
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        each(x).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_an_output_without_a_gradient_leaves_its_parameters_alone():
    """Plain PyTorch runs no hook for them."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.first(x).tanh(), self.second(x).tanh()

    model, x = Two(), torch.randn(8, 16)
    hybridremat.wrap(model, (x,), memory_limit="100%", **EARLY)
    ran = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: ran.append(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeptGradientWarning)
        model(x)[0].sum().backward()
    assert sorted(ran) == ["first.bias", "first.weight"] and model.second.weight.grad is None


def test_gradients_that_stay_are_told_with_their_bytes():
    model, batch = small("mlp")
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **EARLY)
    with pytest.warns(KeptGradientWarning, match=r"12\.4 KiB of gradients stay in \.grad") as told:
        loss_in(model(**batch)).backward()
    assert [each.filename for each in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        loss_in(model(**batch)).backward()


def test_measuring_changes_nothing_and_keeps_no_gradient():
    model, batch = small("transformer")
    optimizer = hybridremat.optimizer_in_backward(model, lambda p: torch.optim.SGD(p, lr=1.0))
    limit = least_limit(model, batch, gradients="in_backward")
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **EARLY)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures = hybridremat.measure(model, kwargs=batch, repeats=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert figures.peak == figures.predicted == limit  # SGD needs no workspace
    assert not optimizer.state


# What needs all gradients


def assert_no_gradient(model):
    assert all(parameter.grad is None for parameter in model.parameters())


def test_settings_that_exclude_it():
    model, batch = small("mlp")
    with pytest.raises(LimitError, match="forwards=2 cannot be combined: plan the pair as one model"):
        hybridremat.wrap(model, kwargs=batch, memory_limit="100%", forwards=2, **EARLY)
    with pytest.raises(LimitError, match="gradients='early' is not known; use 'at_end' or 'in_backward'"):
        hybridremat.wrap(model, kwargs=batch, memory_limit="100%", gradients="early", **HOW)


def test_a_backward_of_some_gradients_is_refused():
    model, batch = small("mlp")
    batch["x"].requires_grad_()
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **EARLY)
    with pytest.raises(EarlyGradientError, match="asks for some alone"):
        model(**batch).backward(inputs=[batch["x"]])
    with pytest.raises(EarlyGradientError, match="asks for some alone"):
        torch.autograd.grad(model(**batch), batch["x"])
    assert_no_gradient(model)


def test_a_loss_that_uses_a_parameter_elsewhere_is_refused():
    model, batch = wrapped()
    with pytest.raises(EarlyGradientError, match=r"outside the wrapped model .*\(of shape \(32, 32\)\)"):
        (model(**batch) + model.layers[0].weight.pow(2).sum()).backward()
    assert model.layers[1].weight.grad is None


def test_two_forwards_in_one_backward_are_refused():
    model, batch = wrapped()
    with pytest.raises(EarlyGradientError, match="or in several forwards of it"):
        (model(**batch) + model(**batch)).backward()
    assert_no_gradient(model)
    first, second = model(**batch), model(**batch)  # one after the other is well
    with pytest.warns(KeptGradientWarning):
        first.backward()
    second.backward()


def test_distributed_data_parallel_is_refused(monkeypatch):
    model, batch = wrapped()
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", model)
    with pytest.raises(EarlyGradientError, match="DistributedDataParallel, which averages"):
        model(**batch)


# The checker


def early_step(model=None, *args):
    """A traced step whose gradients leave early, where these are not the order of the joint graph's ends."""
    model = model or nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    step = traced(model, *(args or (torch.randn(8, 16),)))
    inputs = [n for n in step.module.graph.find_nodes(op="placeholder") if n.name[:9] != "tangents_"]
    results = next(iter(step.module.graph.find_nodes(op="output"))).args[0][step.num_outputs :]
    found = []
    for index, (node, result) in enumerate(zip(inputs, results, strict=True)):
        if result is not None:
            (value,), (parameter,) = step.node_values[result], step.node_values[node]
            found.append(Delivery(value, parameter, index, workspace=1000 + index))
    graph = replace(as_plain(step.graph), gradients=frozenset(), deliveries=tuple(found))
    return replace(step, graph=graph)


def emitted(step):
    return emit(step, plain_schedule(step.graph))


def deliveries(module):
    return list(module.graph.find_nodes(op="call_function", target=deliver))


@pytest.mark.parametrize("workspace", [0, 10, 10_000])
@pytest.mark.parametrize("last", [nn.Tanh(), nn.LayerNorm(16), nn.Conv1d(8, 8, 3)])
def test_the_emitted_graphs_take_what_is_counted(last, workspace):
    """Also where one kernel makes several gradients, which leave in the order of the inputs."""
    step = early_step(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), last))
    leaving = tuple(replace(each, workspace=each.index * workspace) for each in step.graph.deliveries)
    step = replace(step, graph=replace(step.graph, deliveries=leaving))
    memory = check(step, *emitted(step))
    assert memory.peak == step_memory(step.graph, plain_schedule(step.graph)).peak
    indices = [call.args[1] for call in deliveries(emitted(step)[1])]
    departures = MemorySimulator(step.graph).departures(plain_schedule(step.graph))
    assert indices == [each.index for now in sorted(departures) for each in departures[now]]
    assert all(item is None for item in next(iter(emitted(step)[1].graph.find_nodes(op="output"))).args[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("parameter", "after its gradient was handed out"),
        ("read again", "a gradient that was handed out before"),
        ("missing", "other gradients are handed out early than planned"),
        ("twice", "a gradient of input . that was handed out before"),
        ("returned", "both handed out and returned"),
        ("wrong", "a gradient is not computed as in the joint graph"),
    ],
)
def test_wrong_deliveries_are_refused(change, text):
    step = early_step()
    forward, backward = emitted(step)
    check(step, forward, backward)
    calls = deliveries(backward)
    weights = [call for call in calls if call.args[0].meta["val"].dim() == 2]
    (output,) = backward.graph.find_nodes(op="output")
    if change == "parameter":
        call = next(c for c in weights if joint_inputs(step)[c.args[1]].name in names(backward))
        given = next(n for n in backward.graph.nodes if n.name == joint_inputs(step)[call.args[1]].name)
        with backward.graph.inserting_after(call):
            backward.graph.call_function(torch.ops.aten.neg.default, (given,))
    elif change == "read again":
        with backward.graph.inserting_after(weights[0]):
            backward.graph.call_function(torch.ops.aten.neg.default, (weights[0].args[0],))
    elif change == "missing":
        backward.graph.erase_node(calls[0])
    elif change == "twice":
        calls[0].args = (calls[0].args[0], calls[1].args[1])
    elif change == "returned":
        results = list(output.args[0])
        results[calls[0].args[1]] = calls[0].args[0]
        output.args = (tuple(results),)
    else:
        first, second = weights[:2]
        first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])
        # both at the end, where neither is too early
        for call in (first, second):
            output.prepend(call)
    with pytest.raises(PlanError, match=text):
        check(step, forward, backward)


def test_a_view_of_a_parameter_counts_as_the_parameter():
    step = early_step()
    forward, backward = emitted(step)
    view = next(n for n in backward.graph.nodes if n.target is torch.ops.aten.t.default)
    index = names(step.module).index(view.all_input_nodes[0].name)  # inputs come first
    call = next(c for c in deliveries(backward) if c.args[1] == index)
    call.append(backward.graph.create_node("call_function", torch.ops.aten.neg.default, (view,)))
    with pytest.raises(PlanError, match=f"reads {view.name} after its gradient was handed out"):
        check(step, forward, backward)


def names(module):
    return [node.name for node in module.graph.nodes]


def joint_inputs(step):
    return [n for n in step.module.graph.find_nodes(op="placeholder") if n.name[:9] != "tangents_"]


# Plans


def test_plans_say_so(tmp_path, capsys):
    model, batch = tied()
    limit = least_limit(model, batch, gradients="in_backward")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit=limit, **EARLY)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert cli.main(["inspect", str(path)]) == 0
    assert "left early" in capsys.readouterr().out
    optimizer = hybridremat.optimizer_in_backward(model, lambda p: torch.optim.SGD(p, lr=0.1))
    hybridremat.wrap(model, kwargs=batch, plan=path, progress=False)
    assert hybridremat.get_plan(model).request.gradients == "in_backward"
    _, peaks = trained(model, batch, optimizer, steps=2)
    assert set(peaks) == {limit}
    other, _ = tied()
    with pytest.raises(LimitError, match="gradients='in_backward' beside plan=, which was made with"):
        at_end = hybridremat.plan(other, kwargs=batch, memory_limit="100%", **HOW)
        hybridremat.wrap(other, kwargs=batch, plan=at_end, gradients="in_backward", progress=False)


def test_the_timeline_of_a_plan_ends_gradients_where_they_leave():
    model, batch = tied()
    hybridremat.optimizer_in_backward(model, adamw)
    limit = least_limit(model, batch, gradients="in_backward")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit=limit, **EARLY)
    chain, schedule = plan.details.chain, plan.schedule
    profile = list(temporary_bytes(chain.graph, schedule))
    for span in live_spans(chain, schedule, execution_blocks(chain, schedule.steps)):
        for now in range(span.birth, span.death + 1):
            profile[now] += span.size
    assert profile == list(step_memory(chain.graph, schedule).profile)


# What a stranger tried


def test_parameters_on_one_storage_train_as_plain():
    """Tied by their memory alone: a step of the one would change what the other is read for."""

    class Alias(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
            self.layers[2].weight = nn.Parameter(self.layers[0].weight.data)

        def forward(self, x):
            for layer in self.layers:
                x = functional.gelu(layer(x))
            return x.pow(2).mean()

    torch.manual_seed(0)
    model, plain, batch = Alias(), Alias(), {"x": torch.randn(16, 32)}
    plain.load_state_dict(model.state_dict())

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    optimizer = hybridremat.optimizer_in_backward(model, sgd)
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **EARLY)
    expected, _ = trained(plain, batch, sgd(plain.parameters()), 3)
    assert_equal(trained(model, batch, optimizer, 3)[0], expected)


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_a_backward_of_the_parameters_alone_is_refused(way):
    model, batch = wrapped()
    parameters = list(model.parameters())
    with pytest.raises(EarlyGradientError, match="asks for some alone"):
        if way == "backward":
            model(**batch).backward(inputs=parameters)
        else:
            torch.autograd.grad(model(**batch), parameters)
    assert_no_gradient(model)


