"""Input shapes that come after the first one, and forwards that wait for each other."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref

import pytest
import torch

import hybridremat
from hybridremat.errors import (
    CaptureError,
    GraphBreakWarning,
    InfeasibleLimitError,
    InfeasibleLimitWarning,
    LimitError,
    OutstandingForwardWarning,
    ProfilerActiveError,
)
from hybridremat.planning import option_cache, planner
from hybridremat.planning.input_keys import input_key, numbers_apart
from hybridremat.runtime.planned_call import planned_call
from support.sized_steps import Embedded
from support.training import Mlp, Transformer, allocated_peak, train

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


def tokens(length, batch=2):
    return {"tokens": torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(length))}


class BrokenMlp(Mlp):
    def forward(self, x):
        loss = super().forward(x)
        torch._dynamo.graph_break()
        return loss * 2


def rows(count):
    return {"x": torch.randn(count, 32, generator=torch.Generator().manual_seed(count))}


@pytest.mark.parametrize(
    ("make", "lengths"),
    [(Embedded, (24, 9)), pytest.param(Transformer, (24, 16, 9, 24), marks=pytest.mark.slow)],
)
def test_every_length_keeps_the_limit_in_bytes_and_the_numbers(make, lengths):
    """That is the least feasible one for the longest batch."""
    torch.manual_seed(0)
    least = hybridremat.plan(make(), kwargs=tokens(24), memory_limit="100%", **HOW).least_peak
    model = make()
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=tokens(24), memory_limit=least, **HOW)
    for length in lengths:
        hybridremat.prepare(model, kwargs=tokens(length))
        mine, theirs = train(model, tokens(length)), train(plain, tokens(length))
        assert theirs.differences(mine) == [], length
        plan = hybridremat.get_plan(model)
        assert plan.memory_limit == least
        assert max(mine.peaks) == plan.predicted_peak <= least, length


def test_a_later_shape_reuses_the_options_of_the_first_and_solves_nothing(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(planner, "OPTIONS", option_cache.OptionCache())  # with nothing of other tests
    model = hybridremat.wrap(Embedded(), kwargs=tokens(24), memory_limit="60%", **HOW)
    assert not hybridremat.get_plan(model).reused_options
    solved = []
    original = option_cache.solve_blocks
    monkeypatch.setattr(
        option_cache, "solve_blocks", lambda ps, **how: solved.extend(ps) or original(ps, **how)
    )
    plan = hybridremat.prepare(model, kwargs=tokens(28))
    assert plan.reused_options and not solved
    assert "reused" in str(plan)
    assert not hybridremat.prepare(model, kwargs=tokens(24)).reused_options  # the first one again
    alone = hybridremat.plan(Embedded(), kwargs=tokens(28), memory_limit=plan.memory_limit, **HOW)
    assert solved and not alone.reused_options
    assert alone.extra_flops > 0 and 0 < plan.extra_flops <= alone.extra_flops + 0.02
    assert plan.least_peak <= 1.1 * alone.least_peak


def test_a_model_whose_graph_breaks_later_is_planned_in_several_graphs():
    torch.manual_seed(0)
    model, x = Mlp(), {"x": torch.randn(64, 32)}
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=x, memory_limit="100%", **HOW)
    model(**x).backward()
    model.zero_grad()
    for each in (model, plain):
        each.layers[1].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.warns(GraphBreakWarning):
        model(**x).backward()
    model.zero_grad()
    trained = train(model, x)
    assert train(plain, x).differences(trained) == []
    plan = hybridremat.get_plan(model)
    assert len(plan.parts) == 2 and max(trained.peaks) <= plan.memory_limit
    assert len(model._compiled_call_impl._steps) == 1  # none that no step can reach


class Varied(torch.nn.Module):
    """What it computes, and how much of it, depends on a number that it keeps."""

    def __init__(self, *, breaks):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, width) for width in (16, 64, 4096))
        self.breaks, self.mode = breaks, 0

    def forward(self, x):
        if self.breaks and self.mode:
            torch._dynamo.graph_break()
        return self.layers[self.mode](x).tanh().sin().pow(2).mean()


@pytest.mark.parametrize("breaks", [False, True])
def test_a_step_that_does_not_fit_leaves_those_that_do(breaks):
    torch.manual_seed(0)
    model, x = Varied(breaks=breaks), {"x": torch.randn(64, 16)}
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=x, memory_limit=100_000, **HOW)
    for rows in (64, 48):
        x = {"x": torch.randn(rows, 16)}
        model.mode = 2
        for _ in range(2):
            with pytest.raises(InfeasibleLimitError):
                model(**x)
        for mode in (1, 0, 1):
            model.mode = plain.mode = mode
            assert torch.equal(model(**x), plain(**x))


def test_a_hook_that_is_gone_refuses_nothing():
    torch.manual_seed(0)
    model, x = Varied(breaks=False), torch.randn(48, 16)
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, (torch.randn(64, 16),), memory_limit=100_000, dynamic=False, **HOW)
    handle = model.layers[0].register_forward_pre_hook(lambda _, given: given[0].repeat(100, 1))
    with pytest.raises(InfeasibleLimitError):
        model(x)
    handle.remove()
    assert torch.equal(model(x), plain(x))


class Turning(Varied):
    """Takes its way by what it is given."""

    def forward(self, x):
        layer = self.layers[2 if x.sum() > 0 else 1]
        return layer(x).tanh().sin().pow(2).mean()


def test_a_path_that_does_not_fit_refuses_no_other_one():
    torch.manual_seed(0)
    model, x = Turning(breaks=True), torch.rand(64, 16)
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, (-x,), memory_limit=100_000, graph_breaks="plan", **HOW)
    for given in (x, x[:48].clone()):
        with pytest.raises(InfeasibleLimitError):
            model(given)
        assert torch.equal(model(-given), plain(-given))


WRONG = {"shape": torch.ones(8, 31), "dtype": torch.ones(8, 32, dtype=torch.float64)}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_inputs_that_do_not_fit_the_model_raise_what_it_raises(wrong):
    torch.manual_seed(0)
    model, right = Mlp(), torch.ones(8, 32)
    with pytest.raises(RuntimeError) as plain:
        model(wrong)
    hybridremat.wrap(model, (right,), memory_limit="100%", **HOW)
    with pytest.raises(RuntimeError) as planned:
        model(wrong)
    assert type(planned.value) is RuntimeError and str(planned.value) == str(plain.value)
    model(right).backward()


def test_an_infeasible_shape_is_refused_before_anything_runs_and_the_others_go_on():
    model = Mlp()
    limit = hybridremat.plan(model, kwargs=rows(64), memory_limit="80%", **HOW).memory_limit
    hybridremat.wrap(model, kwargs=rows(64), memory_limit=limit, **HOW)
    with pytest.raises(InfeasibleLimitError, match="on_infeasible"):
        model(**rows(640))
    assert model.layers[0].weight.grad is None
    model(**rows(64)).backward()
    assert hybridremat.get_plan(model).predicted_peak <= hybridremat.get_plan(model).memory_limit


def test_on_infeasible_least_runs_the_least_plan_with_a_warning():
    model = Mlp()
    plain = copy.deepcopy(model)
    how = {**HOW, "on_infeasible": "least"}
    with pytest.warns(InfeasibleLimitWarning, match="plan of least memory runs"):
        hybridremat.wrap(model, kwargs=rows(64), memory_limit=1000, **how)
    plan = hybridremat.get_plan(model)
    assert plan.asked_limit == 1000 and plan.memory_limit == plan.least_peak == plan.predicted_peak
    assert "1000 B was asked" in str(plan)
    trained = train(model, rows(64))
    assert train(plain, rows(64)).differences(trained) == []
    assert max(trained.peaks) <= plan.least_peak


def test_on_infeasible_least_is_not_for_an_overhead_that_cannot_be_kept():
    model = Mlp()
    first = hybridremat.plan(model, kwargs=rows(64), memory_limit="80%", **HOW)
    limit = (first.least_peak + first.plain_peak) // 2
    how = {**HOW, "memory_limit": limit, "max_overhead": 0.0, "on_infeasible": "least"}
    assert hybridremat.plan(model, kwargs=rows(64), memory_limit=limit, **HOW).overhead > 0
    with pytest.raises(InfeasibleLimitError, match=r"both memory_limit .* and max_overhead"):
        hybridremat.wrap(model, kwargs=rows(64), **how)


def test_plans_are_bounded_in_number_and_given_up_whole(caplog):
    model = Mlp(layers=1)
    hybridremat.wrap(model, kwargs=rows(8), memory_limit="100%", max_plans=2, dynamic=False, **HOW)
    call = model._compiled_call_impl
    first = weakref.ref(next(iter(call._steps.values())).compiled)
    with caplog.at_level(logging.WARNING, logger="hybridremat"):
        for count in (9, 10, 8):
            model(**rows(count)).backward()
    assert caplog.text.count("more than max_plans=2 input shapes") == 1
    assert len(call._steps) == len(call.context.store) == 2
    gc.collect()
    assert first() is None
    ten, eight = call._steps
    for count in (10, 11):
        model(**rows(count)).backward()
    assert ten in call._steps and eight not in call._steps  # the one that was used least recently


def test_a_shape_that_cannot_be_planned_costs_no_other_its_plan(monkeypatch):
    model = Mlp()
    limit = hybridremat.plan(model, kwargs=rows(64), memory_limit="80%", **HOW).memory_limit
    hybridremat.wrap(model, kwargs=rows(64), memory_limit=limit, max_plans=1, **HOW)
    with pytest.raises(InfeasibleLimitError) as refused:
        model(**rows(640))
    monkeypatch.setattr("hybridremat.planning.pipeline.capture", None)
    model(**rows(64)).backward()
    with pytest.raises(InfeasibleLimitError) as again:  # at once: nothing is captured
        model(**rows(640))
    assert (str(again.value), again.value.least) == (str(refused.value), refused.value.least)
    model.layers[0].weight.requires_grad_(False)
    with pytest.raises(TypeError):  # another step, which is captured
        model(**rows(640))


def test_numbers_that_change_count_as_shapes():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(32, 32)

        def forward(self, x, factor):
            return (self.layer(x) * factor).pow(2).mean()

    model = Scaled()
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs={**rows(8), "factor": 1.0}, memory_limit="100%", max_plans=3, **HOW)
    for factor in (1.0, 0.5, 0.25, 0.125, 1, 1.0):
        loss = model(**rows(8), factor=factor)
        assert torch.equal(loss, plain(**rows(8), factor=factor))
    assert len(model._compiled_call_impl._steps) == 3


def pair_step(model, left, right):
    def run():
        (model(**left) * model(**right)).backward()

    return run


def test_two_forwards_before_a_backward_warn_or_are_planned_together():
    torch.manual_seed(0)
    model = Mlp(width=32, layers=4)
    plain = copy.deepcopy(model)
    left, right = rows(96), {"x": rows(96)["x"].flip(0)}
    pair_step(plain, left, right)()
    expected = [parameter.grad for parameter in plain.parameters()]

    single = hybridremat.wrap(copy.deepcopy(model), kwargs=left, memory_limit="70%", **HOW)
    with pytest.warns(OutstandingForwardWarning, match="forwards=2"):
        pair_step(single, left, right)()
    limit = hybridremat.get_plan(single).memory_limit
    assert all(map(torch.equal, expected, (p.grad for p in single.parameters())))
    single.zero_grad()
    assert allocated_peak(pair_step(single, left, right)) > limit

    both = hybridremat.wrap(model, kwargs=left, memory_limit="130%", forwards=2, **HOW)
    plan = hybridremat.get_plan(both)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert allocated_peak(pair_step(both, left, right)) <= plan.needed <= plan.memory_limit
    assert all(map(torch.equal, expected, (p.grad for p in both.parameters())))
    assert "2 forwards" in str(plan)


def test_forwards_that_were_dropped_or_are_over_do_not_warn():
    model = hybridremat.wrap(Mlp(), kwargs=rows(64), memory_limit="80%", **HOW)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            loss = model(**rows(64))
            loss.backward()
            losses.append(loss)  # held, but its backward is over
        del loss
        model(**rows(64))  # dropped at once
        model(**rows(64)).backward()


@pytest.mark.parametrize("wrong", [{"forwards": 0}, {"max_plans": 0}, {"on_infeasible": "ignore"}])
def test_unusable_settings_are_named(wrong):
    with pytest.raises(LimitError, match=next(iter(wrong))):
        hybridremat.plan(Mlp(), kwargs=rows(8), memory_limit="100%", **wrong)


def test_a_new_shape_does_not_end_a_running_profiler():
    from torch.profiler import ProfilerActivity, profile

    model = hybridremat.wrap(Mlp(layers=1), kwargs=rows(8), memory_limit="100%", **HOW)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(ProfilerActiveError, match="prepare"):
            model(**rows(77))
        model(**rows(8)).backward()
    assert profiler.events()
    hybridremat.prepare(model, kwargs=rows(77))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(**rows(77)).backward()
    assert profiler.events()


def test_what_the_model_itself_raises_comes_out_as_it_is():
    class Strict(Mlp):
        def forward(self, x):
            if x.shape[0] > 16:
                raise ValueError("more than 16 rows")
            return super().forward(x)

    model = hybridremat.wrap(Strict(layers=1), kwargs=rows(8), memory_limit="100%", **HOW)
    with pytest.raises(ValueError, match="more than 16 rows"):
        model(**rows(17))
    model(**rows(8)).backward()


def test_what_the_model_itself_raises_comes_out_in_a_known_shape_too():
    class Closing(Mlp):
        closed = False

        def forward(self, x):
            if self.closed:
                raise ValueError("the shop is closed")
            return super().forward(x)

    model = hybridremat.wrap(Closing(layers=1), kwargs=rows(8), memory_limit="100%", **HOW)
    model(**rows(8)).backward()
    model.closed = True
    with pytest.raises(ValueError, match="the shop is closed"):
        model(**rows(8))
    model.closed = False
    model(**rows(8)).backward()


class Counting(Mlp):
    """Reads a Python number that is new in each step."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_model_that_changes_in_each_step_is_told_of_and_refused_in_the_end(monkeypatch, caplog):
    monkeypatch.setattr("hybridremat.compiler.capture.MOST_CAPTURES", 4)
    monkeypatch.setattr("hybridremat.runtime.planned_call.MANY_CAPTURES", 3)
    model = hybridremat.wrap(Counting(layers=1), kwargs=rows(8), memory_limit="100%", **HOW)
    with (
        caplog.at_level(logging.WARNING, logger="hybridremat"),
        pytest.raises(CaptureError, match="new in each step"),
    ):
        for _ in range(8):
            model(**rows(8)).backward()
    assert caplog.text.count("captured and planned anew") == 1
    assert 3 <= model.calls <= 5


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("net", [Mlp, BrokenMlp], ids=["one graph", "two graphs"])
def test_a_share_is_resolved_anew_only_for_a_shape_larger_than_all_before(net):
    sizes = (64, 4, 96, 64)
    how = {**HOW, "graph_breaks": "plan"}
    plain = {n: hybridremat.plan(net(), kwargs=rows(n), memory_limit="100%", **how).plain_peak for n in sizes}
    model = hybridremat.wrap(net(), kwargs=rows(64), memory_limit="100%", **how)
    limits = []
    for size in sizes:
        model(**rows(size)).backward()
        limits.append(hybridremat.get_plan(model).memory_limit)
    first, largest = plain[64], plain[96]
    assert limits == [first, first, largest, first]


def test_a_number_that_is_none_is_no_new_shape():
    assert input_key((float("nan"),), {}) == input_key((float("nan"),), {})
    assert input_key((0.0,), {}) != input_key((1.0,), {})


class Faded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, alpha):
        return (alpha * self.layer(x)).square().mean()


def test_a_number_that_changes_with_each_batch_is_named(caplog):
    model, x = Faded(), torch.randn(2, 4)
    hybridremat.wrap(model, (x,), {"alpha": 0.1}, memory_limit="100%", **HOW)
    model(x, alpha=0.2).backward()
    assert "tensor of no dimension" not in caplog.text
    for alpha in (0.3, 0.4):
        model(x, alpha=alpha).backward()
    assert caplog.text.count("for each new number in alpha") == 1
    hybridremat.unwrap(model)
    caplog.clear()
    hybridremat.wrap(model, (x,), {"alpha": torch.tensor(0.1)}, memory_limit="100%", **HOW)
    captures = planned_call(model).captures
    for alpha in (0.2, 0.3, 0.4):
        model(x, alpha=torch.tensor(alpha)).backward()
    assert planned_call(model).captures == captures
    assert "new number" not in caplog.text


def test_calls_that_differ_in_more_than_numbers_are_no_reason_to_warn():
    given = (1, "a"), (2, "a"), (3, "b")
    calls = [input_key((torch.zeros(n), n, True), {"mode": mode}) for n, mode in given]
    assert numbers_apart(input_key((torch.zeros(1), 1, False), {"mode": "a"}), calls) == []
    alike = [input_key((torch.zeros(1), n), {"scale": [1.0, n]}) for n in (1, 2)]
    call = input_key((torch.zeros(1), 3), {"scale": [1.0, 3]})
    assert numbers_apart(call, alike) == ["args[1]", "scale[1]"]
