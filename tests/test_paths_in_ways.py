"""Steps that take other paths through graphs which are alike and run in several ways."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.errors import InfeasibleLimitError, UnsurveyedPathWarning
from support.training import allocated_peak

BATCH, WIDTH, LAYERS = 256, 32, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + functional.dropout(self.narrow(functional.gelu(self.wide(x))), 0.1)


class Dropping(nn.Module):
    """Layers that are left out as ``left_out`` says; what is between them is no unit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.left_out = frozenset()

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if torch.rand(()) > 1:  # breaks the graph, and is never so
                continue
            if number not in self.left_out:
                x = layer(x)
        return x.square().mean()


def left_out(number, count):
    return frozenset(random.Random(number).sample(range(LAYERS), count))


def trained(model, x):
    """The peak of a step, or None if it was refused."""
    model.zero_grad()
    try:
        return allocated_peak(lambda: model(x).backward())
    except InfeasibleLimitError:
        return None


@pytest.mark.filterwarnings("ignore", category=UnsurveyedPathWarning)
@pytest.mark.everyday
@pytest.mark.parametrize("share", [0.45, 0.6])
def test_whatever_layers_run_no_step_takes_more_than_its_limit(share):
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(BATCH, WIDTH)
    model.left_out = left_out(0, 1)
    settings = {"units": "layers.*", "cost_model": "flops", "progress": False}
    hybridremat.wrap(model, (x,), memory_limit=f"{share:.0%}", **settings)
    limit, most = hybridremat.get_plan(model).memory_limit, []
    for number, count in enumerate((5, 1, 3, 0, 5, 2, 6, 1, 4, 0, 3, 1)):
        model.left_out = left_out(number, count)
        if (peak := trained(model, x)) is not None:
            most.append(peak)
            assert peak <= limit, (number, count)
            assert peak <= hybridremat.get_plan(model).predicted_peak
    assert len(most) > 6


@pytest.mark.filterwarnings("ignore", category=UnsurveyedPathWarning)
def test_what_is_prepared_between_steps_is_not_held_to_what_the_last_step_ran():
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(BATCH, WIDTH)
    settings = {"units": "layers.*", "cost_model": "flops", "progress": False}
    hybridremat.wrap(model, (x,), memory_limit="45%", **settings)
    every, ways = hybridremat.get_plan(model).overhead, set(hybridremat.get_plan(model).places)
    assert len(ways) > 1
    for count in (2, 4, 7):
        model.left_out = left_out(count, count)
        trained(model, x)
        model.left_out = frozenset({0, 1})
        hybridremat.prepare(model, (x,))
        limit = hybridremat.get_plan(model).memory_limit
        assert hybridremat.get_plan(model).predicted_peak <= limit
        assert trained(model, x) <= limit
    model.left_out = frozenset()
    trained(model, x)
    assert hybridremat.get_plan(model).overhead == every


def layer():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Skipping(nn.Module):
    """Nothing of its own forward can be captured: the break is in a loop. All modules are of torch."""

    def __init__(self):
        super().__init__()
        self.first, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.left_out = frozenset()

    def forward(self, x):
        x = self.first(x)
        for number, each in enumerate(self.layers):
            if torch.rand(()) > 1:
                continue
            if number not in self.left_out:
                x = x + each(x)
        return x.square().mean()


@pytest.mark.parametrize("how", [{"units": "layers.*"}, {"units": "layers.*", "graph_breaks": "plan"}, {}])
@pytest.mark.parametrize("kind", [Dropping, Skipping])
def test_a_later_shape_may_call_none_of_the_units(kind, how):
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, (needing(BATCH),), memory_limit="70%", cost_model="flops", progress=False, **how)
    limit = hybridremat.get_plan(model).memory_limit
    for number, left in enumerate((range(LAYERS), (), range(LAYERS), {1})):
        model.left_out = plain.left_out = frozenset(left)
        x = needing(BATCH // 2)
        for each in (model, plain):
            torch.manual_seed(number)
            each(x).backward()
        same = [
            torch.equal(a.grad, b.grad) if a.grad is not None else b.grad is None
            for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        ]
        assert all(same)
        model.zero_grad()
        plain.zero_grad()
        assert trained(model, x) <= limit
        model.zero_grad()


def test_units_that_a_shape_calls_later_step_in_their_backward():
    torch.manual_seed(0)
    model, rate = Dropping(), 1e-2
    plain = copy.deepcopy(model)
    usual = torch.optim.SGD(plain.parameters(), lr=rate)
    _ = hybridremat.optimizer_in_backward(model, lambda parameters: torch.optim.SGD(parameters, lr=rate))
    settings = {"units": "layers.*", "cost_model": "flops", "progress": False, "gradients": "in_backward"}
    hybridremat.wrap(model, (needing(BATCH),), memory_limit="70%", **settings)
    for number, left in enumerate((range(LAYERS), (), {1})):
        model.left_out = plain.left_out = frozenset(left)
        x = needing(BATCH // 2)
        for each in (model, plain):
            torch.manual_seed(number)
            each(x).backward()
        usual.step()
        usual.zero_grad()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


class Instead(nn.Module):
    """Runs a layer, or nothing, or code that is in no graph in its place, as its inputs say."""

    def __init__(self, made):
        super().__init__()
        self.layers = nn.ModuleList(made() for _ in range(2))

    def forward(self, x, ways):
        for layer, way in zip(self.layers, ways, strict=True):
            if way.item() > 0:
                x = layer(x)
            elif way.item() < 0:
                for _ in range(6):
                    x = x.sin().cos()
        return x.square().mean()


@pytest.mark.filterwarnings("ignore", category=UnsurveyedPathWarning)
@pytest.mark.parametrize("rows", [BATCH, 200])
@pytest.mark.parametrize(("made", "units"), [(layer, "layers.*"), (Layer, "layers.*"), (Layer, None)])
def test_code_in_place_of_all_layers_is_measured(made, units, rows):
    torch.manual_seed(0)
    model = Instead(made)
    sample, x = (needing(BATCH), torch.tensor([1, 1])), needing(rows)
    settings = {"units": units, "cost_model": "flops", "progress": False, "graph_breaks": "plan"}
    settings = {name: value for name, value in settings.items() if value is not None}
    limit, fits = hybridremat.plan(model, sample, memory_limit="100%", **settings).least_peak, []
    hybridremat.wrap(model, sample, memory_limit=limit, **settings)
    for ways in ([0, 0], [-1, 0], [-1, -1], [0, 0]):
        plain = Instead(made)
        needed = allocated_peak(lambda ways=ways, plain=plain: plain(x, torch.tensor(ways)).backward())
        fits.append(needed <= limit)
        if not fits[-1]:
            with pytest.raises(InfeasibleLimitError):
                model(x, torch.tensor(ways))
            continue
        model(x, torch.tensor(ways)).backward()
        assert allocated_peak(lambda ways=ways: model(x, torch.tensor(ways)).backward()) <= limit
    assert fits[0] and not all(fits)


def needing(rows):
    """Inputs that get gradients, so that a step without any layer has a backward."""
    return torch.randn(rows, WIDTH, requires_grad=True)


@pytest.mark.parametrize("skipped", [{3}, {0, 1, 2, 3, 4, 5, 6, 7}], ids=["one", "all"])
def test_layers_that_the_sample_leaves_out_are_units_too(skipped):
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(BATCH, WIDTH)
    model.left_out = frozenset(skipped)
    plan = hybridremat.plan(model, (x,), memory_limit="100%", cost_model="flops", graph_breaks="plan")
    assert set(plan.request.units) == {"first", "layers.*"}


def test_layers_that_run_later_are_planned_or_refused():
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(BATCH, WIDTH)
    model.left_out = frozenset(range(LAYERS))
    settings = {"cost_model": "flops", "graph_breaks": "plan", "progress": False}
    hybridremat.wrap(model, (x,), memory_limit=300_000, **settings)
    model.left_out = frozenset()
    with pytest.raises(InfeasibleLimitError):
        model(x)
    hybridremat.unwrap(model)
    hybridremat.wrap(model, (x,), memory_limit="70%", **settings)
    limit = hybridremat.get_plan(model).memory_limit
    for count in (0, 3, 8, 0):
        model.left_out = left_out(count, count)
        peak = trained(model, x)
        assert peak is None or peak <= limit
    assert peak is not None


class Branching(nn.Module):
    """Layers that are alike, and then one wide layer, or several narrow ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.wide = nn.Sequential(nn.Linear(WIDTH, 12 * WIDTH), nn.GELU(), nn.Linear(12 * WIDTH, WIDTH))
        self.narrow = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.is_wide = True

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for part in [self.wide] if self.is_wide else self.narrow:
            x = part(x)
        return x.square().mean()


@pytest.mark.parametrize("share", [0.55, 0.65])
def test_another_known_path_is_followed_only_as_its_first_layers_have_run(share):
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(BATCH, WIDTH)
    settings = {"units": ["layers.*", "wide", "narrow.*"], "cost_model": "flops", "progress": False}
    hybridremat.wrap(model, (x,), memory_limit=f"{share:.0%}", **settings)
    limit = hybridremat.get_plan(model).memory_limit
    model.is_wide = False
    hybridremat.prepare(model, (x,))
    for is_wide in (False, True, True, False, True):
        model.is_wide = is_wide
        if (peak := trained(model, x)) is not None:
            assert peak <= limit
            assert peak <= hybridremat.get_plan(model).predicted_peak
