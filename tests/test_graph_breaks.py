"""Steps that come in several graphs: planned together, the numbers of plain training, under the limit."""

from __future__ import annotations

import copy
import gc
import operator
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hybridremat
from hybridremat import Plan
from hybridremat.errors import (
    CaptureError,
    GraphBreakWarning,
    InfeasibleLimitError,
    InfeasibleLimitWarning,
    InputError,
    ModelError,
    PlanMismatchError,
)
from hybridremat.graph import private_dynamo
from hybridremat.graph.costs.allocations import peaks_of
from support.broken_nets import HOW, Inside, Reader, Stage, batch
from support.early_gradients import adamw, assert_equal, trained
from support.training import train, train_plain


class Layers(nn.Module):
    """A break inside each of several equal layers, and one parameter used on all sides."""

    class Layer(Stage):
        def forward(self, x, scale):
            x = super().forward(x) * scale
            torch._dynamo.graph_break()
            return functional.gelu(x)

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList(Layers.Layer(width) for _ in range(3))

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x, self.scale)
        return functional.cross_entropy(x, labels)


class Drawing(Stage):
    """Draws from Python's and NumPy's generators first: a break before the only graph."""

    def forward(self, x, labels):
        scale = 1 + random.random() + np.random.rand()
        return functional.cross_entropy(super().forward(x * scale), labels)


def test_a_break_before_the_only_graph_and_numbers_drawn_there():
    torch.manual_seed(0)
    model, inputs = Drawing(16), batch()
    plain = copy.deepcopy(model)
    random.seed(0), np.random.seed(0)
    hybridremat.wrap(model, kwargs=inputs, memory_limit="100%", **HOW)  # which draws nothing
    trained = train(model, inputs, measure=False)  # Dynamo makes an input of a number that has changed
    random.seed(0), np.random.seed(0)
    assert train_plain(plain, inputs).differences(trained) == []


class Crossing(nn.Module):
    """What crosses the first break is read by two graphs, and twice by the first of them."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, labels):
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        y = self.second(x).sin() * x
        torch._dynamo.graph_break()
        return functional.cross_entropy(self.third(y).cos() + x, labels)


@pytest.mark.slow
def test_what_several_graphs_read_is_added_up_as_aot_autograd_does():
    """PyTorch's own order where there are breaks; without them it is the order of plain training."""
    torch.manual_seed(0)
    model, inputs = Crossing(), batch()
    others = [copy.deepcopy(model) for _ in range(2)]
    hybridremat.wrap(model, kwargs=inputs, memory_limit="100%", **HOW)
    ours = train(model, inputs, measure=False)
    assert train_plain(others[0], inputs).differences(ours) != []
    others[1].compile(backend="aot_eager")
    assert train(others[1], inputs, measure=False).differences(ours) == []


def test_shapes_beyond_the_number_of_captures_are_refused_not_run_unplanned(monkeypatch):
    """Captures of all shapes count together for one piece of code."""
    monkeypatch.setattr("hybridremat.compiler.capture.MOST_GRAPHS", 4)
    model = hybridremat.wrap(Layers(), kwargs=batch(), memory_limit="1000%", **HOW)
    with pytest.raises(CaptureError, match="has been captured"):
        for rows in (48, 40, 32, 24):
            functional.relu(model(**batch(rows))).backward()


@pytest.mark.everyday
@pytest.mark.parametrize("make", [Reader, pytest.param(Layers, marks=pytest.mark.slow)])
def test_bit_equal_within_the_limit_of_the_whole_step(make):
    torch.manual_seed(0)
    model, inputs = make(), batch()
    expected = train_plain(model, inputs)
    whole = hybridremat.plan(model, kwargs=inputs, memory_limit="100%", **HOW)
    least, plain = whole.least_peak, whole.plain_peak
    assert least < 0.9 * plain
    for limit in ((least + plain) // 2, least):
        planned = hybridremat.wrap(copy.deepcopy(model), kwargs=inputs, memory_limit=limit, **HOW)
        train(planned, inputs, steps=1, measure=False)  # compiles
        planned.load_state_dict(model.state_dict())
        trained = train(planned, inputs)
        assert expected.differences(trained) == []
        plan = hybridremat.get_plan(planned)
        assert max(trained.peaks) <= plan.predicted_peak <= limit
        assert len(plan.parts) >= 2 and plan.breaks


@pytest.mark.parametrize("given", [False, True], ids=["no gradients yet", "gradients of a step before"])
def test_planning_leaves_buffers_gradients_and_random_state_alone(given):
    torch.manual_seed(0)
    model, inputs = Reader(), batch()
    if given:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    before = copy.deepcopy(model.state_dict())
    buffers, gradients = list(model.buffers()), [parameter.grad for parameter in model.parameters()]
    values = copy.deepcopy(gradients)
    state = torch.get_rng_state()
    hybridremat.wrap(model, kwargs=inputs, memory_limit="100%", **HOW)
    assert hybridremat.get_plan(model).breaks  # so the forward has run
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(map(operator.is_, buffers, model.buffers()))
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(operator.is_, gradients, (parameter.grad for parameter in model.parameters())))
    assert not given or all(map(torch.equal, values, gradients))


class Noting(Reader):
    """Dynamo compiles it again in every step: the list has grown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x, labels):
        x = self.first(x)
        mean = x.detach().mean().item()
        self.seen.append(mean)
        x = self.second(x) if mean < 5 else self.third(self.second(x))
        return functional.cross_entropy(x, labels)


@pytest.mark.slow
def test_another_path_is_planned_beside_what_has_run():
    torch.manual_seed(0)
    model, inputs, shifted = Noting(), batch(), batch(shift=50.0)
    model.first.norm.eval()  # lets the shift through
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=inputs, memory_limit="100%", **HOW)
    for given in (inputs, shifted, inputs, shifted):
        mine, theirs = train(model, given, steps=1), train(plain, given, steps=1)
        assert theirs.differences(mine) == []
    assert model.seen[-4:] == plain.seen[-4:] and plain.seen[-1] > 5
    plan = hybridremat.get_plan(model)
    assert max(mine.peaks) <= plan.predicted_peak <= plan.memory_limit


class Narrow(nn.Module):
    """Where its input is small, a step takes a branch whose plain step needs less."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.wide = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x, labels):
        large = x.abs().sum() > 1
        x = torch.tanh(self.first(x))
        x = self.wide(x) if large else torch.tanh(self.narrow(x))
        return functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("prepared", [False, True], ids=["in training", "ahead"])
def test_a_share_stays_what_it_was_granted_as_on_a_path_that_needs_less(prepared):
    torch.manual_seed(0)
    model, inputs = Narrow(), {"x": torch.randn(48, 16), "labels": torch.randint(0, 4, (48,))}
    small = inputs | {"x": inputs["x"] * 1e-6}
    hybridremat.wrap(model, kwargs=inputs, memory_limit="90%", **HOW)
    limit = hybridremat.get_plan(model).memory_limit
    if prepared:
        hybridremat.prepare(model, kwargs=small)
    model(**small).backward()
    plan = hybridremat.get_plan(model)
    assert plan.memory_limit == limit and plan.plain_peak < limit


def test_the_report_names_the_breaks_and_what_they_cost():
    plan = hybridremat.plan(Reader(), kwargs=batch(), memory_limit="100%", **HOW)
    found = plan.breaks[0]
    assert "broken_nets.py:" in found.place and "item" in found.reason
    assert found.crossing_bytes >= 48 * 16 * 4
    assert "graph break" in str(plan) and "broken_nets.py" in str(plan)
    assert [block.index for block in plan.blocks] == list(range(len(plan.blocks)))


def test_a_plan_with_breaks_says_what_it_is_for():
    plan = hybridremat.plan(Reader(), kwargs=batch(), memory_limit="100%", **HOW)
    assert plan.origin.model == "Reader"
    assert [spec.name for spec in plan.origin.inputs] == ["x", "labels"]
    assert plan.origin.torch == torch.__version__ and plan.origin.device_name
    assert plan.request.memory_limit == "100%"


def test_a_plan_with_breaks_survives_its_file(tmp_path):
    from hybridremat.plans.codec import write_plan

    plan = hybridremat.plan(Reader(), kwargs=batch(), memory_limit="100%", **HOW)
    write_plan(plan, tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_infeasible_limits_and_overheads():
    model, inputs = Reader(), batch()
    with pytest.raises(InfeasibleLimitError, match="graph breaks") as caught:
        hybridremat.wrap(model, kwargs=inputs, memory_limit=1000, **HOW)
    with pytest.warns(InfeasibleLimitWarning):
        plan = hybridremat.plan(model, kwargs=inputs, memory_limit=1000, on_infeasible="least", **HOW)
    assert plan.memory_limit == plan.predicted_peak == caught.value.least
    frugal = hybridremat.plan(model, kwargs=inputs, max_overhead=0.1, **HOW)
    assert frugal.overhead <= 0.1 and frugal.predicted_peak < frugal.plain_peak


def test_the_step_leaves_what_is_reserved_of_the_limit():
    plan = hybridremat.plan(Reader(), kwargs=batch(), memory_limit="100%", reserve=4096, **HOW)
    assert plan.predicted_peak + 4096 <= plan.memory_limit <= plan.plain_peak


@pytest.mark.parametrize("on_infeasible", ["error", pytest.param("least", marks=pytest.mark.slow)])
def test_an_overhead_that_does_not_fit_the_limit_says_so(on_infeasible):
    model, inputs = Reader(), batch()
    plan = hybridremat.plan(model, kwargs=inputs, memory_limit="100%", **HOW)
    with pytest.raises(InfeasibleLimitError, match=r"max_overhead 0\.0%.*more time") as caught:
        hybridremat.plan(
            model,
            kwargs=inputs,
            memory_limit=plan.least_peak,
            max_overhead=0.0,
            on_infeasible=on_infeasible,
            **HOW,
        )
    least = caught.value.least
    assert plan.least_peak < least <= plan.plain_peak
    hybridremat.plan(model, kwargs=inputs, memory_limit=least, max_overhead=0.0, **HOW)
    with pytest.raises(InfeasibleLimitError, match="max_overhead"):
        hybridremat.plan(model, kwargs=inputs, memory_limit=least - 1, max_overhead=0.0, **HOW)


def test_breaks_stay_errors_by_default_and_say_what_to_do():
    with pytest.raises(CaptureError, match='graph_breaks="plan"'):
        hybridremat.plan(Reader(), kwargs=batch(), memory_limit="100%", **{**HOW, "graph_breaks": "error"})


def test_a_model_without_breaks_is_planned_as_ever():
    torch.manual_seed(0)
    model = Stage(16)
    inputs = {"x": torch.randn(8, 16)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = hybridremat.plan(model, kwargs=inputs, memory_limit="100%", **HOW)
    assert plan.breaks == plan.parts == ()


def test_forwards_that_wait_are_counted_across_breaks():
    torch.manual_seed(0)
    model, batches = Reader(), [batch(), batch()]
    plain = copy.deepcopy(model)
    once, twice = (
        hybridremat.plan(model, kwargs=batches[0], memory_limit="300%", forwards=n, **HOW) for n in (1, 2)
    )
    assert once.needed < twice.needed and once.predicted_peak <= twice.needed
    hybridremat.wrap(model, kwargs=batches[0], memory_limit=twice.least_peak, forwards=2, **HOW)
    for run in (plain, model):
        torch.manual_seed(1)
        first, second = (run(**each) for each in batches)
        first.backward()
        second.backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)

    def both():
        for loss in [model(**each) for each in batches]:
            loss.backward()

    model.zero_grad()
    ((peak, _),) = peaks_of([lambda: both], "cpu")
    assert peak <= hybridremat.get_plan(model).needed


def test_gradients_leave_in_the_backward_unless_graphs_share_their_parameter():
    class Tied(Reader):  # the call of a function with a break ends a graph, so there are three
        def forward(self, x, labels):
            return super().forward(self.first.wide(x)[:, : x.shape[1]], labels)

    torch.manual_seed(0)
    for made, shared in ((Reader(64), 0), (Tied(64), 2), (Twice(64), 1)):
        given = batch(rows=8, width=64)
        plain = copy.deepcopy(made)
        hybridremat.wrap(
            made, kwargs=given, memory_limit="100%", gradients="in_backward", **HOW
        )
        plan = hybridremat.get_plan(made)
        leaving = sum(len(part.details.graph.deliveries) for part in plan.parts)
        used = len(list(made.first.parameters())) + len(list(made.second.parameters()))
        assert leaving == used - shared
        assert train(plain, given).differences(train(made, given)) == []
        for parameter in made.parameters():
            parameter.grad = None
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        assert hybridremat.measure(made, kwargs=given).peak <= plan.predicted_peak < 0.7 * plan.plain_peak


def test_graphs_that_are_captured_again_run_as_planned():
    torch.manual_seed(0)
    model, given = Twice(64), batch(rows=8, width=64)
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=given, memory_limit="100%", gradients="in_backward", **HOW)
    plan = hybridremat.get_plan(model)
    torch._dynamo.reset()
    assert train(plain, given).differences(train(model, given)) == []
    assert hybridremat.get_plan(model).parts == plan.parts


def test_an_optimizer_that_steps_in_the_backward_is_counted():
    torch.manual_seed(0)
    model, given = Reader(64), batch(rows=8, width=64)
    plain = copy.deepcopy(model)
    expected, _ = trained(plain, given, adamw(plain.parameters()), steps=3)
    optimizer = hybridremat.optimizer_in_backward(model, adamw)
    hybridremat.wrap(model, kwargs=given, memory_limit="100%", gradients="in_backward", **HOW)
    plan = hybridremat.get_plan(model)
    assert all(each.workspace for part in plan.parts for each in part.details.graph.deliveries)
    found, peaks = trained(model, given, optimizer, steps=3)
    assert_equal(found, expected)
    assert max(peaks[1:]) <= plan.predicted_peak < plan.plain_peak


class Twice(Reader):
    """Two graphs read one layer."""

    def forward(self, x, labels):
        return super().forward(x, labels) + self.first.narrow.weight.sum() * x.detach().sum().sign()


@pytest.mark.everyday
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", [{}, {"compiler": "inductor"}], ids=str)
def test_a_frontier_of_several_graphs_is_what_wrap_gives(how, tmp_path):
    torch.manual_seed(0)
    model, given = Reader(32), batch(rows=96, width=32)
    found = hybridremat.frontier(model, kwargs=given, **HOW, **how)
    peaks = [point.peak for point in found.points]
    assert peaks == sorted(peaks) and found.points[-1].overhead <= 0
    for point in found.points[:: max(1, len(peaks) // 2)]:
        plan = hybridremat.plan(model, kwargs=given, memory_limit=point.peak, **HOW, **how)
        assert (plan.predicted_peak, plan.overhead) == (point.peak, point.overhead)
    assert found.at(max_overhead=0.05).overhead <= 0.05
    plan = found.plan(memory_limit=peaks[len(peaks) // 2])
    plan.save(tmp_path / "plan.json")
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=given, plan=tmp_path / "plan.json", progress=False)
    followed = hybridremat.get_plan(model)
    assert followed.overhead == plan.overhead and followed.cost_model == "flops"
    assert [part.schedule for part in followed.parts] == [part.schedule for part in plan.parts]
    assert hybridremat.measure(model, kwargs=given).peak <= plan.predicted_peak
    if not how:
        assert train(plain, given).differences(train(model, given)) == []


def test_a_plan_for_other_graphs_is_not_applied():
    plan = hybridremat.plan(Reader(), kwargs=batch(), memory_limit="100%", **HOW)
    whole = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    with pytest.raises(PlanMismatchError, match="a step of 2 graphs, and this one is one graph"):
        hybridremat.wrap(Mean(whole), (torch.randn(4, 16),), plan=plan, progress=False)
    with pytest.raises(PlanMismatchError, match="was not made for this step"):
        hybridremat.wrap(Inside(), (torch.randn(4, 16),), plan=plan, progress=False)


class Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).square().mean()


def test_the_largest_batch_of_a_step_with_breaks():
    found = hybridremat.max_batch_size(
        lambda count: (Reader(), (), batch(rows=count + 1)), "20KiB", **HOW
    )
    assert found.batch_size > found.plain_batch_size > 0
    model, given = Reader(), batch(rows=found.batch_size + 1)
    assert hybridremat.plan(model, kwargs=given, memory_limit="20KiB", **HOW).needed <= 20 << 10
    with pytest.raises(InfeasibleLimitError):
        hybridremat.plan(model, kwargs=batch(rows=found.batch_size + 2), memory_limit="20KiB", **HOW)


def test_the_loss_alone_is_returned_across_breaks():
    class Both(Reader):
        def forward(self, x, labels):
            loss = super().forward(x, labels)
            return {"loss": loss, "rows": self.first(x)}

    model, given = Both(), batch()
    hybridremat.wrap(model, kwargs=given, memory_limit="100%", outputs="loss", **HOW)
    found = model(**given)
    assert found["rows"] is None and found["loss"].requires_grad
    with pytest.raises(ModelError, match="no output of this model is a scalar"):
        hybridremat.wrap(Rows(), (torch.randn(8, 16),), memory_limit="100%", outputs="loss", **HOW)(
            torch.randn(8, 16)
        )


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stage(16), Stage(16)

    def forward(self, x):
        x = self.first(x)
        x.detach().sum().item()
        return self.second(x)


class Head(Reader):
    def __init__(self) -> None:
        super().__init__(32)
        self.head = nn.Linear(32, 512)

    def forward(self, x, labels):
        x = self.first(x)
        x.detach().sum().item()
        return functional.cross_entropy(self.head(self.second(x)), labels)


def test_ops_by_parts_are_counted_as_they_run():
    torch.manual_seed(0)
    model, given = Head(), batch(rows=256, width=32)
    exact, plain = (
        hybridremat.plan(model, kwargs=given, memory_limit="300%", rewrites=way, **HOW)
        for way in ("exact", "none")
    )
    assert exact.least_peak < plain.least_peak
    before = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=given, memory_limit=exact.least_peak, **HOW)
    plan = hybridremat.get_plan(model)
    assert any(op.variant for part in plan.parts for op in part.details.graph.ops)
    assert plan.predicted_peak - 64 <= hybridremat.measure(model, kwargs=given).peak <= plan.predicted_peak
    assert train(before, given).differences(train(model, given)) == []


def test_losses_by_chunks_across_breaks():
    torch.manual_seed(0)
    model, given = Head(), batch(rows=256, width=32)
    whole, chunked = (
        hybridremat.plan(model, kwargs=given, memory_limit="300%", rewrites=way, **HOW)
        for way in ("exact", "chunked")
    )
    assert chunked.least_peak < 0.75 * whole.least_peak
    hybridremat.wrap(model, kwargs=given, memory_limit=chunked.least_peak, rewrites="chunked", **HOW)
    assert hybridremat.measure(model, kwargs=given).peak <= chunked.least_peak
    with pytest.raises(ModelError, match="in any of the 2 graphs of this step"):
        hybridremat.plan(Reader(), kwargs=batch(), memory_limit="100%", rewrites="chunked", **HOW)


class Between(nn.Module):
    """A normalization and a loss that Dynamo leaves to plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(64, momentum=None)

    def forward(self, x):
        y = self.narrow(functional.gelu(self.norm(self.wide(x))))
        return functional.gaussian_nll_loss(y, x, functional.softplus(y) + 0.1)


@pytest.mark.slow
def test_code_between_the_graphs_is_measured_and_counted():
    torch.manual_seed(0)
    model, inputs = Between(), {"x": torch.randn(64, 16)}
    expected = train_plain(model, inputs)
    least = hybridremat.plan(model, kwargs=inputs, memory_limit="100%", **HOW).least_peak
    planned = hybridremat.wrap(copy.deepcopy(model), kwargs=inputs, memory_limit=least, **HOW)
    train(planned, inputs, steps=1, measure=False)
    planned.load_state_dict(model.state_dict())
    trained = train(planned, inputs)
    assert expected.differences(trained) == []
    plan = hybridremat.get_plan(planned)
    assert max(trained.peaks) <= plan.predicted_peak <= least
    in_graphs = max(part.predicted_peak for part in plan.parts)
    assert max(trained.peaks) > in_graphs


def test_more_turns_than_surveyed_are_refused_before_they_pass_the_limit():
    torch.manual_seed(0)
    model, inputs = Inside(), {"x": torch.randn(48, 16)}
    limit = hybridremat.plan(model, kwargs=inputs, memory_limit="100%", **HOW).memory_limit
    hybridremat.wrap(model, kwargs=inputs, memory_limit=limit, **HOW)
    model(**inputs).backward()
    model.inner.turns = 8
    with pytest.raises(InfeasibleLimitError):
        model(**inputs)
    model.inner.turns = 2
    model(**inputs).backward()


def test_a_break_inside_a_loop_is_planned_by_what_is_in_the_loop_or_says_what_to_do():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                if x.sum() > 0:
                    x = torch.tanh(x)
            return x.pow(2).mean()

    x = {"x": torch.randn(4, 8)}
    found = hybridremat.plan(Loop(), kwargs=x, memory_limit="100%", **HOW)
    assert found.request.units == ("layers.*",)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            for _ in range(2):
                x = x @ self.weight
                if x.sum() > 0:
                    x = torch.tanh(x)
            return x.pow(2).mean()

    with pytest.raises(CaptureError, match="into a submodule") as caught:
        hybridremat.plan(Bare(), kwargs=x, memory_limit="100%", **HOW)
    assert "Nothing has been run" not in str(caught.value)


class Sparse(nn.Module):
    """A sparse tensor in code between graphs, which autograd saves."""

    def __init__(self):
        super().__init__()
        self.gain, self.last = nn.Parameter(torch.ones(64)), nn.Linear(64, 64)

    def forward(self, x):
        return self.last((x * self.gain).to_sparse().to_dense().sin()).tanh().sum()


@torch.compiler.disable
def filled(x, index, value):
    return torch.index_fill(x, -1, index, value)


class Filled(nn.Module):
    """A value that requires a gradient, which is a sum of rows whose number depends on the data."""

    def __init__(self, fill):
        super().__init__()
        self.gain, self.value, self.fill = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(())), fill

    def forward(self, x):
        return self.fill(x * self.gain, torch.tensor([2, 1]), self.value).sin().sum()


@pytest.mark.parametrize("make", [Sparse, lambda: Filled(filled)], ids=["sparse", "filled"])
def test_code_between_graphs_may_be_what_no_graph_can_hold(make):
    torch.manual_seed(0)
    model, inputs = make(), {"x": torch.randn(64, 64)}
    expected = train_plain(model, inputs)
    least = hybridremat.plan(model, kwargs=inputs, memory_limit="100%", **HOW).least_peak
    hybridremat.wrap(model, kwargs=inputs, memory_limit=least, **HOW)
    trained = train(model, inputs)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= least


def put(x, index, value):
    return x.index_put((x.detach()[:, 0] > 0,), value)


def put_rows(x, index, value):
    """As many as the value has: the shape of its gradient is known, once it is known that this runs."""
    return x.index_put((torch.arange(64, device=x.device) < index.sum(),), value.expand(3, 64))


@pytest.mark.parametrize("breaks", ["auto", "plan"])
@pytest.mark.parametrize("fill", [lambda x, *given: torch.index_fill(x, -1, *given), put, put_rows])
def test_a_gradient_whose_shape_depends_on_the_data_is_refused_with_advice_that_helps(fill, breaks):
    torch.manual_seed(0)
    model, x = Filled(fill), torch.randn(64, 64)
    said = "gradient of index_" if breaks == "auto" else "the shape of a gradient in it depends on the data"
    with pytest.raises(CaptureError, match=rf"{said}.* below @torch\.compiler\.disable"):
        hybridremat.plan(model, (x,), memory_limit="100%", **{**HOW, "graph_breaks": breaks})
    torch._dynamo.reset()  # it skips this forward from now on
    model.fill = torch.compiler.disable(fill)
    hybridremat.wrap(model, (x,), memory_limit="100%", **HOW)
    plain = copy.deepcopy(model)
    assert train_plain(plain, {"x": x}).differences(train(model, {"x": x}, measure=False)) == []


class BetweenBreaks(nn.Module):
    """A graph of its own in whose forward nothing runs: views, or nothing but a parameter."""

    def __init__(self, what):
        super().__init__()
        self.first, self.second, self.what = nn.Linear(8, 8), nn.Linear(4, 8), what

    def forward(self, x):
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        parts = self.what(self, x)
        torch._dynamo.graph_break()
        return sum(self.second(part).pow(2).mean() for part in parts)


VIEWS = {
    "view": lambda net, x: [x.view(-1, 2, 4)],
    "views that share": lambda net, x: x.split(4, 1),
    "expand": lambda net, x: [x[:, :4].expand(3, -1, -1)],
    "view of a parameter": lambda net, x: [x @ net.second.weight, net.second.weight.t()[:, :4]],
}


@pytest.mark.quick_cases(2)
@pytest.mark.filterwarnings("ignore::hybridremat.UnsurveyedPathWarning")
@pytest.mark.parametrize("name", VIEWS)
def test_views_that_cross_breaks_train_as_in_plain_pytorch(name):
    """One that overlaps itself has other strides in training, and is planned again as wrap compiles it."""
    torch.manual_seed(0)
    plain, inputs = BetweenBreaks(VIEWS[name]), {"x": torch.randn(512, 8)}
    model = copy.deepcopy(plain)
    least = hybridremat.plan(model, kwargs=inputs, memory_limit="100%", **HOW).least_peak
    limit = 2 * least if name == "expand" else least
    hybridremat.wrap(model, kwargs=inputs, memory_limit=limit, **HOW)
    mine = train(model, inputs)
    assert train_plain(plain, inputs).differences(mine) == []
    assert max(mine.peaks) <= limit


def test_dynamo_forgets_what_it_compiled_for_models_that_are_gone(monkeypatch):
    """It counts that against a limit, by code object; another model of the class runs on as planned."""
    monkeypatch.setattr(private_dynamo, "MANY_DEAD", 2)
    torch.manual_seed(0)
    given, code = batch(rows=8), Reader.forward.__code__
    kept = hybridremat.wrap(Reader(), kwargs=given, memory_limit="100%", **HOW)
    plain, plan = copy.deepcopy(kept), hybridremat.get_plan(kept)  # a copy is not wrapped
    for _ in range(4):
        model = hybridremat.wrap(Reader(), kwargs=given, memory_limit="100%", **HOW)
        model(**given).backward()
        hybridremat.unwrap(model)
        del model
        gc.collect()
        assert len(private_dynamo._debug_get_cache_entry_list(code)) <= 3
    assert train(plain, given).differences(train(kept, given)) == []
    assert hybridremat.get_plan(kept) == plan
    hybridremat.unwrap(kept)
    gc.collect()
    assert not private_dynamo._debug_get_cache_entry_list(code)


def test_a_plan_of_least_memory_is_followed_and_asks_for_what_it_was_asked(tmp_path):
    torch.manual_seed(0)
    model, given = Reader(), batch()
    with pytest.warns(InfeasibleLimitWarning):
        plan = hybridremat.plan(model, kwargs=given, memory_limit=1000, on_infeasible="least", **HOW)
    plan.save(tmp_path / "plan.json")
    hybridremat.wrap(model, kwargs=given, plan=tmp_path / "plan.json", progress=False)
    followed = hybridremat.get_plan(model)
    assert (followed.request, followed.asked_limit) == (plan.request, 1000)
    assert (followed.memory_limit, followed.predicted_peak) == (plan.memory_limit, plan.predicted_peak)


class AsksForTheCapture(nn.Module):
    """Makes its mask in plain PyTorch alone, and needs it; as LongT5 of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, mask=None):
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[:1])
        return (self.layer(x).tanh() * mask.reshape(mask.shape[0], 1)).sum()


def test_a_model_that_fails_only_as_one_graph_is_planned_in_several():
    torch.manual_seed(0)
    how = {**HOW, "graph_breaks": "auto", "memory_limit": "100%"}
    model, given = AsksForTheCapture(), {"x": torch.randn(4, 8)}
    planned = copy.deepcopy(model)
    with pytest.warns(GraphBreakWarning):
        hybridremat.wrap(planned, kwargs=given, **how)
    assert train_plain(model, given).differences(train(planned, given)) == []
    with pytest.raises(InputError, match="AsksForTheCapture"):  # of one graph, or none: the inputs are wrong
        hybridremat.wrap(AsksForTheCapture(), kwargs={"x": torch.randn(4, 7)}, **how)


class Retains(nn.Module):
    """Code between graphs retains gradients: of an output of a graph, or of what it makes of that."""

    def __init__(self, make) -> None:
        super().__init__()
        self.first, self.last, self.make = nn.Linear(32, 32), nn.Linear(32, 32), make

    @torch.compiler.disable
    def between(self, y):
        self.kept = self.make(y)
        for each in self.kept:
            each.retain_grad()

    def forward(self, x):
        self.between(self.first(x).tanh())
        return self.last(self.kept[-1]).pow(2).mean()


def three(y):
    return [y := step(y) for step in (torch.sin, torch.cos, torch.exp)]


@pytest.mark.parametrize("make", [lambda y: [y], lambda y: [y.sin()], three])
def test_gradients_that_code_between_graphs_retains_are_counted(make):
    torch.manual_seed(0)
    model, inputs = Retains(make), {"x": torch.randn(256, 32)}
    expected = train_plain(copy.deepcopy(model), inputs)
    least = hybridremat.plan(model, kwargs=inputs, memory_limit="100%", **HOW).least_peak
    hybridremat.wrap(model, kwargs=inputs, memory_limit=least, **HOW)
    trained = train(model, inputs)
    assert expected.differences(trained) == []
    assert all(each.grad is not None for each in model.kept)
    assert max(trained.peaks) <= hybridremat.get_plan(model).predicted_peak <= least


class Checkpointed(nn.Module):
    """What code between graphs saves is made again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 48), nn.Linear(48, 48)

    @torch.compiler.disable
    def between(self, x):
        return checkpoint(torch.exp, x, use_reentrant=False)

    def forward(self, x):
        return self.last(self.between(self.first(x).tanh())).pow(2).mean()


def test_what_a_checkpoint_between_graphs_runs_again_is_counted():
    torch.manual_seed(0)
    model, inputs = Checkpointed(), {"x": torch.randn(96, 48)}
    expected = train_plain(copy.deepcopy(model), inputs)
    least = hybridremat.plan(model, kwargs=inputs, memory_limit="100%", **HOW).least_peak
    hybridremat.wrap(model, kwargs=inputs, memory_limit=least, **HOW)
    trained = train(model, inputs)
    assert expected.differences(trained) == []
    assert max(trained.peaks) <= hybridremat.get_plan(model).predicted_peak <= least


class FailsInGraphs(nn.Linear):
    def forward(self, x):
        return super().forward(x.view(7, -1) if torch.compiler.is_compiling() else x).sum()


def test_a_model_that_fails_in_graphs_alone_is_told_that_it_trains_plainly():
    with pytest.raises(CaptureError, match="trains plainly"):
        how = {**HOW, "graph_breaks": "auto", "memory_limit": "100%"}
        hybridremat.wrap(FailsInGraphs(8, 8), (torch.randn(4, 8),), **how)
