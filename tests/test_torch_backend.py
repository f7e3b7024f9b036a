"""torch.compile(model, backend="hybridremat"): the same numbers as eager, and typed errors inside torch's."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from hybridremat.errors import CaptureError, HybridRematError, InfeasibleLimitError, LimitError, OptionsError
from hybridremat.integrations.torch_compile import OPTION_NAMES, read_options
from support.training import allocated_peak

BACKEND = "hybridremat"
QUICK = {"cost_model": "flops", "workers": 1, "progress": False}


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 64, 10)

    def forward(self, x):
        x = functional.relu(self.norm(self.first(x)))
        x = functional.dropout(functional.relu(self.second(x)), 0.3, self.training)
        return self.head(x.flatten(1))


class ConvLoss(ConvNet):
    def forward(self, x):
        return super().forward(x).square().mean()


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        if x.sum().item() > 0:
            x = x + 1
        return self.second(x)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def mlp():
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(16, 16), nn.GELU())))


def compiled(model, how=None, **options):
    return torch.compile(model, backend=BACKEND, options={**QUICK, **options}, **(how or {}))


def error_of(call) -> HybridRematError:
    """Ours, out of torch.compile's own."""
    with pytest.raises(Exception) as raised:
        call()
    assert type(raised.value).__name__ == "BackendCompilerFailed"
    return raised.value.inner_exception


@pytest.mark.parametrize(("make", "shape"), [(mlp, (64, 16)), (ConvNet, (4, 3, 8, 8))])
def test_training_is_bit_equal_to_eager(make, shape):
    plain = make()
    planned, plans = copy.deepcopy(plain), []
    call = compiled(planned, memory_limit="97%", on_plan=plans.append)
    calls = [(plain, plain), (planned, call)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model, _ in calls]
    for step in range(3):
        x = torch.randn(shape)
        losses = []
        for (_, run), optimizer in zip(calls, optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            losses.append(run(x).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
        for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
            assert torch.equal(one, other)
        for one, other in zip(plain.buffers(), planned.buffers(), strict=True):
            assert torch.equal(one, other)
    (plan,) = plans
    assert plan.predicted_peak <= plan.memory_limit < plan.plain_peak
    assert plan.planning_seconds > 0


def test_without_gradients_nothing_is_planned():
    model, plans = mlp().eval(), []
    call = compiled(model, memory_limit="97%", on_plan=plans.append)
    x = torch.randn(8, 16)
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    assert plans == []


def test_torch_finds_the_backend_without_an_import_of_ours():
    code = "import torch; print('hybridremat' in torch.compiler.list_backends())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_each_shape_gets_a_plan_with_dynamic_false():
    plans = []
    call = compiled(mlp(), {"dynamic": False}, memory_limit="110%", on_plan=plans.append)
    for size in (8, 16):
        call(torch.randn(size, 16)).sum().backward()
    assert [plan.plain_peak for plan in plans] == sorted({plan.plain_peak for plan in plans})
    assert len(plans) == 2


def measured_step(run, model, batch, measure=allocated_peak):
    """Loss, gradients and buffers of a step, and the bytes that it allocates; no other one may be planned."""
    for parameter in model.parameters():
        parameter.grad = None
    kept = {}

    def step():
        output = run(*batch)
        kept["loss"] = output if output.dim() == 0 else output.square().mean()
        kept["loss"].backward()

    torch.manual_seed(0)
    peak = measure(step)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [kept["loss"].detach(), *gradients, *[each.clone() for each in model.buffers()]], peak


def unmeasured(step):
    step()


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_second_shape_makes_symbols_and_every_further_one_is_planned_from_them(dynamic):
    plain = ConvLoss()
    planned, plans = copy.deepcopy(plain), []
    call = compiled(planned, {"dynamic": dynamic}, memory_limit=500_000, on_plan=plans.append)
    counters.clear()
    for batch in (6, 9, 4, 13):
        images = (torch.randn(batch, 3, 8, 8),)
        measured_step(call, planned, images, unmeasured)
        measured_step(plain, plain, images)
        mine, peak = measured_step(call, planned, images)
        theirs, _ = measured_step(plain, plain, images)
        assert all(map(torch.equal, mine, theirs))
        assert (batch, 3, 8, 8) in [tuple(each.shape) for each in plans[-1].origin.inputs]
        assert peak == plans[-1].predicted_peak <= plans[-1].memory_limit == 500_000
    assert len(plans) == 4
    assert counters["stats"]["unique_graphs"] == (1 if dynamic else 2)


def test_a_size_that_does_not_fit_is_refused_before_anything_runs_there():
    net, ran = mlp(), []
    net[0].weight.register_hook(ran.append)
    call = compiled(net, {"dynamic": True}, memory_limit=100_000)
    call(torch.randn(64, 16)).sum().backward()
    with pytest.raises(InfeasibleLimitError, match=r"97\.7 KiB"):
        call(torch.randn(6400, 16))
    call(torch.randn(48, 16)).sum().backward()
    assert len(ran) == 2


def test_two_forwards_of_different_sizes_wait_for_their_backwards():
    plain = ConvNet()
    planned = copy.deepcopy(plain)
    call = compiled(planned, {"dynamic": True}, memory_limit="110%")
    one, other = torch.randn(5, 3, 8, 8), torch.randn(7, 3, 8, 8)
    for run in (plain, call):
        torch.manual_seed(0)
        first, second = run(one).sum(), run(other).sum()
        first.backward()
        second.backward()
    for mine, its in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def test_symbols_are_nothing_without_gradients():
    model = ConvNet().eval()
    call = compiled(model, {"dynamic": True}, memory_limit="110%")
    with torch.no_grad():
        for batch in (3, 5):
            x = torch.randn(batch, 3, 8, 8)
            assert torch.equal(call(x), model(x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, times, factor):
        return self.second(torch.tanh(self.first(x)) * times * factor)


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_among_the_inputs_may_change_with_symbols(dynamic):
    plain = Scaled()
    planned = copy.deepcopy(plain)
    call = compiled(planned, {"dynamic": dynamic}, memory_limit="150%")
    for rows, times, factor in [(8, 2, 0.5), (9, -3, 0.5), (10, 0, 0.5), (10, 7, 0.25)]:
        batch = torch.randn(rows, 16), times, factor
        runs = (call, planned), (plain, plain)
        mine, theirs = (measured_step(*each, batch, unmeasured)[0] for each in runs)
        assert all(map(torch.equal, mine, theirs))


def test_symbols_are_refused_where_each_shape_is_captured_by_itself():
    call = compiled(mlp(), memory_limit="110%", compiler="inductor")
    call(torch.randn(8, 16))
    error = error_of(lambda: call(torch.randn(16, 16)))
    assert isinstance(error, CaptureError)
    assert 'compiler="inductor"' in str(error)
    assert "dynamic=False" in str(error)


def test_a_graph_break_is_refused_before_anything_runs():
    model = Breaking()
    ran = []
    model.first.register_forward_hook(lambda *_: ran.append("eager part"))
    error = error_of(lambda: compiled(model, memory_limit="110%")(torch.randn(2, 4)))
    assert isinstance(error, CaptureError)
    assert "breaks" in str(error)
    assert __file__ in str(error)
    assert ran == []


def test_an_infeasible_limit_says_what_is_feasible():
    error = error_of(lambda: compiled(mlp(), memory_limit=10)(torch.randn(64, 16)))
    assert isinstance(error, InfeasibleLimitError)
    assert error.limit == 10
    assert str(error.least) in str(error)


def test_errors_come_out_inside_those_of_torch():
    error = error_of(lambda: compiled(mlp(), memory="50%")(torch.randn(8, 16)))
    assert isinstance(error, OptionsError)


@pytest.mark.parametrize(
    ("mode", "options", "kind", "message"),
    [
        (None, {}, LimitError, "neither memory_limit nor max_overhead"),
        (None, {"memory": "50%"}, OptionsError, "'memory'.*There are memory_limit, max_overhead"),
        (None, {"memory_limit": 0.5}, LimitError, "50%"),
        (None, {"memory_limit": "50%", "on_plan": 3}, OptionsError, "on_plan=3 is no function"),
        ("max-autotune", {"memory_limit": "50%"}, OptionsError, "max-autotune.*no modes"),
    ],
)
def test_options_are_checked(mode, options, kind, message):
    with pytest.raises(kind, match=message):
        read_options(mode, options)


def test_options_are_those_of_wrap():
    given = {"max_overhead": "10%", "reserve": "1MiB", "grad_outputs": "all"}
    settings, on_plan, show = read_options(None, given)
    assert settings.overhead_limit() == 0.1
    assert settings.reserve_bytes() == 1 << 20
    assert (on_plan, show) == (None, True)
    assert {"memory_limit", "hold_outputs", "workers", "cost_model", "on_plan"} <= set(OPTION_NAMES)
