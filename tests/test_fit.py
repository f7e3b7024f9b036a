"""Whether training fits: the sum against what whole training loops allocate, from the model's making on."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hybridremat
from hybridremat import LimitError, OptionsError
from hybridremat.analysis.resident import resident_bytes
from hybridremat.cli import main as cli
from hybridremat.graph.costs.device_specs import DEVICE_SPECS
from hybridremat.runtime.optimizer_memory import SCALARS, OptimizerMemory, optimizer_memory
from hybridremat.zoo.models import reference_model
from support.training import Mlp, allocated_peak, loss_in, small
from support.wrapping import HOW, assert_untouched, state_of

CLOSE = 0.05  # of what is measured
MIB = 1 << 20
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
}
TOKENS = {"vocab_size": 512, "batch": 2, "length": 32}
MODELS = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, **TOKENS},
    "bert": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, **TOKENS},
    "unet": {"base": 8, "depth": 2, "batch": 2, "pixels": 32},
}


def steps(model, batch, optimizer, count=2):
    for _ in range(count):
        optimizer.zero_grad()
        loss_in(model(**batch)).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.slow) for name in MODELS]
)
def test_the_sum_is_what_training_takes(name, kind):
    def whole():
        model, batch = reference_model(name, 0.0, MODELS[name])
        steps(model, batch, OPTIMIZERS[kind](model.parameters()))

    whole()  # what PyTorch keeps for itself
    measured = allocated_peak(whole)
    model, batch = reference_model(name, 0.0, MODELS[name])
    before = state_of(model)
    found = hybridremat.fit(model, kwargs=batch, optimizer=kind, memory="1GiB", **HOW)
    assert_untouched(before, model)
    assert found.fits == "plain" and found.memory_limit == (1 << 30) - found.resident
    assert found.resident + found.above(found.plain_step) == pytest.approx(measured, rel=CLOSE)

    # above(0): what the optimizer's own step takes, with which no plan helps
    memory = found.resident + max(found.above(0), (found.least_step + found.plain_step) // 2)
    planned = hybridremat.fit(model, kwargs=batch, optimizer=kind, memory=memory, **HOW)
    assert planned.fits == "planned" and planned.memory_limit == memory - found.resident
    hybridremat.wrap(model, kwargs=batch, memory_limit=planned.memory_limit, **HOW)
    optimizer = OPTIMIZERS[kind](model.parameters())
    steps(model, batch, optimizer)
    optimizer.zero_grad()
    kept = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers(), *batch.values(), *kept]}
    measured = sum(t.numel() * t.element_size() for t in tensors.values())
    measured += allocated_peak(lambda: steps(model, batch, optimizer))
    assert planned.resident + planned.above(planned.plan.needed) == pytest.approx(measured, rel=CLOSE)
    assert measured <= memory


def several():
    return [nn.Parameter(torch.randn(300, 100)), nn.Parameter(torch.randn(500)), nn.Parameter(torch.randn(7))]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, 0.1)),
        ("SGD, momentum=0.9", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        ("sgd,weight_decay=1,foreach=True", lambda p: torch.optim.SGD(p, weight_decay=1, foreach=True)),
        ("adam", torch.optim.Adam),
        ("adamw,foreach=True", lambda p: torch.optim.AdamW(p, foreach=True)),
        ("adamw,amsgrad=True", lambda p: torch.optim.AdamW(p, amsgrad=True)),
        ("adamw,fused=True", lambda p: torch.optim.AdamW(p, fused=True)),
        ("torch.optim:RMSprop", torch.optim.RMSprop),
        ("adagrad", torch.optim.Adagrad),
    ],
)
def test_state_and_temporaries_of_an_optimizer_are_those_of_its_steps(kind, make):
    found = optimizer_memory(kind, several(), device="cpu", rounded=lambda size: size)
    parameters = several()
    optimizer = make(parameters)

    def step():
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    kept = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    assert found.state == sum(t.numel() * t.element_size() for t in kept)
    assert 0 <= found.step - allocated_peak(optimizer.step) <= SCALARS


def test_on_cuda_the_step_for_all_parameters_at_once_counts():
    sizes = [4 * 300 * 100, 4 * 500, 512]
    rounded = DEVICE_SPECS["h100"].rounded
    taken = sum(map(rounded, sizes))
    how = {"parameters": several(), "device": "cuda", "rounded": rounded}
    assert optimizer_memory("adamw", **how) == OptimizerMemory(2 * taken, taken)
    assert optimizer_memory("adamw,fused=True", **how) == OptimizerMemory(2 * taken, 0)
    assert optimizer_memory("adamw", alone=True, **how).step <= 2 * rounded(sizes[0])


class Reads(torch.optim.SGD):
    """Its step reads a value."""

    def step(self, closure=None):
        assert self.param_groups[0]["params"][0].sum().item() > 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("adamv", "no such optimizer"),
        ("nowhere:Adam", "No module named"),
        ("torch.nn:Linear", "no such optimizer"),
        ("optimizer", "cannot be made"),
        ("sgd,0.9", "no KEY=VALUE"),
        ("sgd,momentums=0.9", "momentums"),
        ("sgd,momentum=-1", "cannot be made"),
        (torch.optim.SGD, "optimizer is a name"),
        ("lbfgs", "closure"),
        (f"{__name__}:Reads", "meta|item"),
    ],
)
def test_what_is_no_optimizer_that_can_be_tried_is_refused(kind, message):
    model, batch = small("mlp")
    with pytest.raises(OptionsError, match=message):
        hybridremat.fit(model, kwargs=batch, optimizer=kind, memory=MIB, **HOW)


def test_tied_and_frozen_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    x = torch.randn(32, 64)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            return nn.functional.mse_loss(self.model(x), y)

    found = hybridremat.fit(Loss(), (x, x), memory=MIB, **HOW)
    assert (found.parameters, found.gradients) == (4 * (64 * 64 + 2 * 64), 4 * 64 * 64)
    assert found.buffers == 4 * 2 * 64 + 8 and found.batch == 4 * 32 * 64
    assert found.optimizer_state == 2 * 4 * 64 * 64 + 4


def test_what_sparse_tensors_and_subclasses_hold():
    here = torch.eye(8).to_sparse(), TwoTensor(torch.ones(4), torch.ones(4)), torch.ones(4, 4)
    sizes = [2 * 8 * 8 + 8 * 4, 2 * 16, 64]
    assert [resident_bytes(tensor, int) for tensor in here] == sizes
    assert resident_bytes([here, here[2][1:], here[2].detach()], int) == sum(sizes)


@pytest.mark.parametrize("spec", ["t4", None])
def test_what_is_given_is_kept_free(spec):
    model, batch = small("mlp")
    found = hybridremat.fit(model, kwargs=batch, memory="2GiB", device_spec=spec, reserve="1MiB", **HOW)
    bare = hybridremat.fit(model, kwargs=batch, memory="2GiB", device_spec=spec, margin=0, **HOW)
    assert found.margin == (768 * MIB if spec else 0) and bare.margin == 0
    assert found.plain_step - bare.plain_step >= MIB * 9 // 10 and found.reserve == MIB
    assert found.room == (2 << 30) - found.margin - found.resident
    if spec is not None:
        assert hybridremat.fit(model, kwargs=batch, device_spec=spec, **HOW).memory == 16 << 30


def test_a_model_without_memory_needs_what_it_would():
    how = {"device_spec": "t4", **HOW}
    model, batch = small("mlp")
    here = hybridremat.fit(model, kwargs=batch, **how)
    there = {name: tensor.to("meta") for name, tensor in batch.items()}
    assert hybridremat.fit(model.to("meta"), kwargs=there, **how).to_dict() == here.to_dict()


def test_it_does_not_fit_and_what_to_do():
    model, batch = small("mlp")
    found = hybridremat.fit(model, kwargs=batch, memory="40KiB", **HOW)
    assert (found.fits, found.memory_limit, found.plan) == ("no", None, None)
    assert "too few for the plan of least memory" in str(found) and "a smaller batch" in str(found)
    with pytest.raises(hybridremat.InfeasibleLimitError) as caught:
        hybridremat.plan(model, kwargs=batch, memory_limit=max(1, found.room), **HOW)
    assert caught.value.least == found.least_step
    again = hybridremat.fit(model, kwargs=batch, memory=found.resident + found.least_step, **HOW)
    assert again.fits == "planned"


def test_the_optimizers_own_step_may_be_what_does_not_fit():
    model, batch = Mlp(128, 2), {"x": torch.randn(1, 128)}
    how = {"kwargs": batch, "memory": 4 * 2 * 128 * 129 * 4 + 40_000, **HOW}
    found = hybridremat.fit(model, optimizer="adamw,foreach=True", **how)
    assert found.least_step < found.room and found.fits == "no"
    assert "foreach=False or fused=True" in str(found)
    assert found.above(found.least_step) == found.gradients + found.optimizer_step

    def whole():
        model = Mlp(128, 2)
        steps(model, {"x": torch.randn(1, 128)}, torch.optim.AdamW(model.parameters(), foreach=True))

    whole()
    assert found.resident + found.above(found.plain_step) == pytest.approx(allocated_peak(whole), rel=CLOSE)
    assert hybridremat.fit(model, optimizer="adamw,fused=True", **how).fits == "plain"


def test_gradients_that_leave_in_the_backward_take_no_step_of_all_parameters():
    model, batch = small("mlp")
    found = hybridremat.fit(model, kwargs=batch, memory=MIB, gradients="in_backward", **HOW)
    assert found.above(found.plain_step) == found.plain_step + found.optimizer_step
    assert "leave in its backward" in str(found)


@pytest.mark.parametrize("given", [{"memory": "50%"}, {"memory": 0}, {"margin": "much"}, {"memory": -1}])
def test_sizes_that_cannot_be_read_are_refused(given):
    model, batch = small("mlp")
    with pytest.raises(LimitError):
        hybridremat.fit(model, kwargs=batch, **{"memory": MIB, **given}, **HOW)


def make(batch=4):
    torch.manual_seed(0)
    return Mlp(width=32, layers=3), {"x": torch.randn(8 * batch, 32)}


def test_the_largest_batch_fits_with_its_inputs_and_the_next_does_not():
    model, batch = make()
    found = hybridremat.fit(model, kwargs=batch, memory=120_000, make_batch=make, **HOW)
    largest = found.largest.batch_size
    for number, fits in ((largest, True), (largest + 1, False)):
        model, batch = make(number)
        again = hybridremat.fit(model, kwargs=batch, memory=120_000, **HOW)
        assert (again.fits != "no") == fits, (number, str(again))
    assert f"the largest batch is {largest} " in str(found)


def test_the_largest_batch_of_a_device_that_is_not_here():
    how = {"device_spec": "t4", **HOW}
    found = hybridremat.max_batch_size(make, 120_000, **how)
    for number, fits in ((found.batch_size, True), (found.batch_size + 1, False)):
        model, batch = make(number)
        least = hybridremat.frontier(model, kwargs=batch, **how).least.peak
        assert (least <= 120_000) == fits
    model, batch = make(found.batch_size)
    assert found.plan.origin.from_spec
    assert found.plan.predicted_peak <= 120_000 < found.plan.plain_peak


@pytest.mark.everyday
def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(
        "import torch\nfrom support.training import Mlp\n"
        "def make(batch=4):\n    return Mlp(), {'x': torch.randn(8 * batch, 32)}\n"
    )
    monkeypatch.chdir(tmp_path)
    quick = ["fit", "own.py:make", "--cost-model", "flops", "--workers", "1", "--memory", "120000"]
    assert cli.main([*quick, "--optimizer", "sgd,momentum=0.9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["optimizer_state"] == found["parameters"] == found["gradients"]
    assert found["largest"]["batch_size"] > 4 and found["fits"] in ("plain", "planned")
    for words in (["--no-batch"], ["--set", "batch=2"]):
        assert cli.main([*quick, *words]) == 0
        out = capsys.readouterr().out
        assert out.startswith("without a plan: parameters ") and "largest batch" not in out
    assert cli.main([*quick, "--no-batch", "--memory", "30000"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert cli.main([*quick, "--optimizer", "adamv"]) == 2
    assert "no such optimizer" in capsys.readouterr().err
