"""Places where a plan could silently compute other numbers, or take more memory, than plain training."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.errors import GraphBreakWarning
from support.training import train, train_plain

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


class Draws(nn.Module):
    """Random draws with equal arguments are different draws."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x):
        h = self.first(x)
        drawn = torch.randn_like(h) - torch.randn_like(h) + torch.empty_like(h).uniform_() * h
        return (drawn - torch.empty_like(h).uniform_()).pow(2).mean() + functional.gumbel_softmax(h).std()


class Loss(nn.Module):
    """Losses whose scalar keeps the storage of all its elements."""

    def __init__(self, loss):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Sigmoid())
        self.loss = loss

    def forward(self, x):
        return self.loss(self.layers(x), torch.full((x.shape[0], 64), 0.5))


class Mixed(nn.Module):
    """Autocast inside the model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = functional.gelu(self.norm(layer(x)))
        return x.float().pow(2).mean()


class Averaged(nn.Module):
    """Running averages, updated by kernels that multiply and add with one rounding."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)
        self.register_buffer("mean", torch.linspace(0.1, 1, 64))
        self.register_buffer("ratio", torch.linspace(0.1, 1, 64))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            self.mean.add_(h.mean(0), alpha=0.1)
            self.ratio.addcdiv_(h.mean(0), h.var(0) + 0.3, value=0.1)
        return self.second(h * self.mean + self.ratio).pow(2).mean()


class Masked(nn.Module):
    """Draws from NumPy's generator what it masks, as audio models do, and from PyTorch's what it drops."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x):
        h = functional.dropout(functional.gelu(self.first(x)), 0.1)
        kept = torch.from_numpy(np.random.rand(len(x), 1) > 0.3)
        return self.second(torch.where(kept, h, h.detach() * np.random.uniform(0.5, 1.5))).pow(2).mean()


@pytest.mark.parametrize("graph_breaks", ["plan", "auto"])
def test_a_model_that_draws_from_numpy_in_its_forward_trains_alike(graph_breaks):
    torch.manual_seed(0)
    model, batch = Masked(), {"x": torch.randn(64, 32)}
    how, before = {**HOW, "graph_breaks": graph_breaks}, np.random.get_state()
    planned = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        hybridremat.wrap(planned, kwargs=batch, memory_limit="100%", **how)
    assert all(map(np.array_equal, np.random.get_state(), before))  # as if wrapping had drawn nothing
    found = train(planned, batch)
    assert train_plain(model, batch).differences(found) == []
    plan = hybridremat.get_plan(planned)
    assert len(plan.places) > 1 and max(found.peaks) <= plan.predicted_peak


def least_of(model, batch):
    return hybridremat.plan(model, kwargs=batch, memory_limit="100000%", **HOW).least_peak


MODELS = {
    "draws": Draws,
    "mse": lambda: Loss(functional.mse_loss),
    "smooth l1": lambda: Loss(functional.smooth_l1_loss),
    "cross entropy of probabilities": lambda: Loss(functional.binary_cross_entropy),
    "autocast": Mixed,
    "running averages": Averaged,
}


ALIKE = ("smooth l1", "cross entropy of probabilities")  # a loss of the kind of "mse"


@pytest.mark.everyday
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in MODELS]
)
def test_training_is_bit_equal_in_the_memory_that_was_promised(name):
    torch.manual_seed(0)
    model, batch = MODELS[name](), {"x": torch.randn(64, 32)}
    plain = train_plain(model, batch)
    planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=least_of(model, batch), **HOW)
    predicted = hybridremat.get_plan(planned).predicted_peak
    trained = train(planned, batch)
    assert plain.differences(trained) == []
    assert all(peak == pytest.approx(predicted, rel=0.001) and peak <= predicted for peak in trained.peaks)


def test_autocast_around_the_call():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    plain, x = copy.deepcopy(model), torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        hybridremat.wrap(model, args=(x,), memory_limit="100%", **HOW)
        (model(x).float().pow(2).mean()).backward()
        (plain(x).float().pow(2).mean()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *[
                part
                for _ in range(3)
                for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
            ]
        )

    def forward(self, x):
        return self.layers(x).pow(2).mean()


def test_a_normalized_model_called_twice_before_its_backward():
    torch.manual_seed(0)
    model, x, y = Normalized(), torch.randn(4, 8, 16, 16), torch.randn(4, 8, 16, 16)
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, args=(x,), memory_limit=least_of(model, {"x": x}), **HOW)
    assert hybridremat.get_plan(model).extra_flops > 0
    (model(x) + model(y)).backward()
    (plain(x) + plain(y)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_hooks_registered_after_wrapping_take_part():
    torch.manual_seed(0)
    model, x = Normalized(), torch.randn(4, 8, 16, 16)
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, args=(x,), memory_limit="100%", **HOW)
    model(x).backward()
    plain(x).backward()
    for net in (model, plain):
        net.layers[1].register_forward_hook(lambda module, args, output: output * 2)
        net.zero_grad()
        net(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_measure_compares_with_the_plan_of_the_shape_that_ran():
    model = Normalized()
    large, small = torch.randn(4, 8, 16, 16), torch.randn(2, 8, 16, 16)
    hybridremat.wrap(model, args=(large,), memory_limit="100%", **HOW)
    model(small).backward()
    measured = hybridremat.measure(model, args=(large,), repeats=1)
    assert measured.peak == measured.predicted


class Twice(nn.Module):
    """Two outputs that are computed alike, and a value inside that is computed like one of them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        h = self.layer(x)
        return h * 3, h * 3, torch.sigmoid(h * 3) * (h * 3)


def test_outputs_that_are_computed_alike_are_tensors_of_their_own():
    def learn(model):
        first, second, third = model(x)
        with torch.no_grad():
            first.detach().add_(1)
        seen = [first.clone(), second.clone(), third.clone()]
        (second.sum() + third.square().sum()).backward()
        return [*seen, *(p.grad for p in model.parameters())]

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(8, 32)
    planned = hybridremat.wrap(copy.deepcopy(model), args=(x,), memory_limit="200%", **HOW)
    assert all(map(torch.equal, learn(model), learn(planned)))


class Marked(torch.Tensor):
    """A tensor whose class says nothing of how ops run."""


class Reading(Normalized):
    """Returns what it reads by the class of its input; with ``breaks``, in two graphs."""

    breaks = False

    def forward(self, x):
        h = self.layers(x)
        if self.breaks and float(h.detach().sum()) > 1e9:
            h = 2 * h
        return functional.gelu(h).pow(2).mean()


@pytest.mark.parametrize("how", [{}, {"graph_breaks": "plan"}, {"units": "layers.*"}], ids=str)
def test_inputs_of_a_subclass_are_run_as_plain_ones(how):
    torch.manual_seed(0)
    model, batch = Reading(), {"x": torch.randn(4, 8, 16, 16).as_subclass(Marked)}
    model.breaks = how.get("graph_breaks") == "plan"
    plain = train_plain(model, batch)
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW, **how)
    assert len(hybridremat.get_plan(model).places) == {"": 0, "graph_breaks": 2, "units": 10}["".join(how)]
    trained = train(model, batch)
    assert plain.differences(trained) == []
    assert max(trained.peaks) <= hybridremat.get_plan(model).predicted_peak


class Scalars(nn.Module):
    """Numbers in calls on numbers: as tensors, they would count beside them."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return functional.gelu(x * self.gain).sum() + 0.0 * self.gain


def test_the_first_step_takes_what_all_others_do():
    model, batch = Scalars(), {"x": torch.randn(())}
    least = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).least_peak
    hybridremat.wrap(model, kwargs=batch, memory_limit=least, **HOW)
    assert set(train(model, batch).peaks) == {least}


def test_a_custom_op_that_returns_its_input_is_told_of_as_ever(monkeypatch):
    # PyTorch's default is an error where the environment has CI
    monkeypatch.setattr(torch._functorch.config, "error_on_custom_op_aliasing", False, raising=False)
    with torch.library._scoped_library("hybridremat_tests", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x, "CPU")
        library.impl("same", torch.empty_like, "Meta")
        torch.library.register_autograd("hybridremat_tests::same", lambda ctx, grad: grad, lib=library)

        class Model(nn.Linear):
            def forward(self, x):
                return torch.ops.hybridremat_tests.same(super().forward(x)).sum()

        model, x = Model(4, 4), torch.randn(2, 4)
        hybridremat.wrap(model, (x,), memory_limit="100%", **HOW)
        with pytest.warns(UserWarning, match="hybridremat_tests::same"):
            model(x)
