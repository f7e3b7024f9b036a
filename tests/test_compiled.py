"""Steps that Inductor compiles: the limit, the numbers, and the choice of a plan by lowering."""

import copy
from dataclasses import replace
from math import inf

import pytest
import torch
import torch._inductor.config
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.lowered_memory import LoweredStep
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.planning.choose import choose_plan
from hybridremat.planning.compiled_frontier import MOST_LOWERINGS, WORTH, CompiledFrontier
from hybridremat.planning.lowered_judge import LoweredJudge
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.planner import plan_graph
from hybridremat.planning.settings import Settings
from hybridremat.plans.origin import Origin
from hybridremat.sequence.pool import Pool
from support.compiled import compiled, error, gradients, needs_compiler, nothing_kept_by_inductor
from support.examples import examples
from support.extreme_steps import run_extremely
from support.random_models import build, recipes
from support.random_training import trained_plain
from support.training import SMALL, small, traced, train
from support.wrapping import HOW, assert_untouched, state_of


@pytest.fixture(autouse=True)
def _nothing_kept_by_inductor():
    with nothing_kept_by_inductor():
        yield


@examples(8)
@given(recipes(), st.floats(0, 1))
def test_fused_graphs_compute_the_same_op_by_op(recipe, share):
    """Whatever is inlined and repeated: the graphs that Inductor gets are right before it compiles them."""
    model, batch = build(recipe)
    expected = trained_plain(model, batch, steps=2)
    fused, _ = run_extremely(model, batch, recipe.seed, share, fused=True)
    assert expected.differences(train(fused, batch, steps=2, measure=False)) == []


@pytest.mark.parametrize("name", [n for n in SMALL if n != "mlp"])
def test_fused_graphs_of_small_models_compute_the_same_op_by_op(name):
    model, batch = small(name)
    expected = trained_plain(model, batch, steps=2)
    fused, _ = run_extremely(model, batch, 1, 0.7, fused=True)
    assert expected.differences(train(fused, batch, steps=2, measure=False)) == []


# --- the choice of a point, with a made-up lowering


@pytest.fixture(scope="module")
def step():
    return traced(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6))), FEED)


FEED = torch.randn(64, 16)


@pytest.fixture(scope="module")
def frontier(step):
    return plan_graph(step.graph, cache=OptionCache(), workers=1)


class Lowering:
    """Takes a share of the counted bytes, and another if it is lean."""

    def __init__(self, own, lean):
        self.share = {False: own, True: lean}
        self.runs = []

    def __call__(self, step, schedule, *, lean):
        self.runs.append((schedule, lean))
        peak = int(self.share[lean] * step_memory(step.graph, schedule).peak)
        return LoweredStep(EmittedMemory(peak, peak, 0))


def chosen(step, frontier, lowering, **asked):
    settings = Settings(compiler="inductor", **asked).validated(need_limit=True)
    plain = lowering(step, plain_schedule(step.graph), lean=False).memory
    lowered = CompiledFrontier(frontier, LoweredJudge(step, frontier.judge, lowering, plain))
    return choose_plan(lowered, settings, Origin(), on_infeasible=settings.on_infeasible)


def fastest(frontier, limit, share):
    """By brute force: the least time of all candidates within the limit."""
    return min((c.time for c in frontier.candidates if int(share * c.peak) <= limit), default=inf)


@pytest.mark.parametrize(("own", "lean"), [(1.0, 1.0), (0.8, 0.9), (1.3, 1.0), (1.1, 0.95)])
@pytest.mark.parametrize("share", [0.95, 0.7, 0.6])
def test_the_fastest_point_whose_code_fits_is_taken(step, frontier, own, lean, share):
    limit = int(share * own * frontier.plain.peak)
    lowering = Lowering(own, lean)
    plan = chosen(step, frontier, lowering, memory_limit=limit)
    assert plan.predicted_peak <= limit
    assert plan.compiler == "inductor"
    time = frontier.plain.time * (1 + plan.overhead)
    assert time <= fastest(frontier, limit, min(own, lean)) + WORTH * frontier.plain.time
    assert len(lowering.runs) <= 2 * MOST_LOWERINGS + 2


def test_where_own_code_is_uneven_lean_code_goes_further(step, frontier):
    """Now and then Inductor's own scheduling takes more, as GPT-2's does."""
    peaks = [candidate.peak for candidate in frontier.candidates]

    def lower(step, schedule, *, lean):
        counted = step_memory(step.graph, schedule).peak
        uneven = not lean and counted in peaks and peaks.index(counted) % 4 == 3
        peak = int((0.97 if uneven else 0.9) * counted)
        return LoweredStep(EmittedMemory(peak, peak, 0))

    for index in range(len(peaks) - 1):
        limit = int(0.9 * peaks[index])
        plan = chosen(step, frontier, lower, memory_limit=limit)
        assert plan.predicted_peak <= limit
        time = frontier.plain.time * (1 + plan.overhead)
        assert time <= fastest(frontier, limit, 0.9) + WORTH * frontier.plain.time


def test_searches_go_on_from_the_point_whose_code_fits(step, frontier):
    """By the count, with what the code leaves free; where the code of that takes more, without."""
    index = len(frontier.candidates) // 2
    composed = frontier.candidates[index]
    limit = composed.needs - 1 + (frontier.candidates[index + 1].needs - composed.needs) // 2

    def plan_with(searches, share):
        lowered = chosen(step, replace(frontier, searches=searches), share, memory_limit=limit)
        assert lowered.predicted_peak <= limit
        return lowered

    without, found = plan_with((), Lowering(1.0, 1.0)), plan_with(frontier.searches, Lowering(1.0, 1.0))
    assert found.overhead < without.overhead and found.composed_overhead == pytest.approx(without.overhead)

    def larger(step, schedule, *, lean):
        peak = step_memory(step.graph, schedule).peak
        known = {each.schedule for each in frontier.candidates} | {plain_schedule(step.graph)}
        peak = peak if schedule in known else 2 * limit
        return LoweredStep(EmittedMemory(peak, peak, 0))

    assert plan_with(frontier.searches, larger).schedule == without.schedule


def test_all_of_the_plain_code_is_the_plain_step(step, frontier):
    plan = chosen(step, frontier, Lowering(0.7, 0.7), memory_limit="100%")
    assert plan.overhead <= 0
    assert plan.plain_peak == plan.memory_limit
    assert plan.plain_code and not plan.lean


def test_the_plain_step_fits_all_of_its_code_whatever_other_orders_take(step, frontier):
    plain = plain_schedule(step.graph)

    def lower(step, schedule, *, lean):
        peak = step_memory(step.graph, schedule).peak // (2 if schedule == plain and not lean else 1)
        return LoweredStep(EmittedMemory(peak, peak, 0))

    *others, last = frontier.candidates
    reordered = replace(last, schedule=others[-1].schedule)
    changed = replace(frontier, pool=Pool((*others, reordered), frontier.pool.base))
    plan = chosen(step, changed, lower, memory_limit="100%")
    assert plan.schedule == plain
    assert plan.overhead == 0
    assert plan.needed == plan.memory_limit == plan.plain_peak


def test_an_infeasible_limit_says_what_the_least_code_takes(step, frontier):
    least = int(0.9 * frontier.candidates[0].peak)
    with pytest.raises(hybridremat.InfeasibleLimitError, match=f"{least} bytes") as caught:
        chosen(step, frontier, Lowering(1.2, 0.9), memory_limit=1000)
    assert caught.value.least == least
    with pytest.warns(hybridremat.InfeasibleLimitWarning):
        plan = chosen(step, frontier, Lowering(1.2, 0.9), memory_limit=1000, on_infeasible="least")
    assert plan.memory_limit == plan.predicted_peak == least
    assert plan.lean
    with pytest.raises(hybridremat.InfeasibleLimitError, match="both"):
        chosen(step, frontier, Lowering(1.2, 0.9), memory_limit=least, max_overhead=0.001)


def test_an_overhead_alone_takes_the_least_memory_within_it(step, frontier):
    plan = chosen(step, frontier, Lowering(0.9, 0.8), max_overhead=0.2)
    assert plan.overhead <= 0.2
    assert plan.memory_limit is None


# --- what is asked for


def test_settings_that_cannot_be_combined():
    model, batch = small("mlp")
    with pytest.raises(hybridremat.LimitError, match="compiler"):
        hybridremat.wrap(model, kwargs=batch, memory_limit="80%", compiler="nvcc")
    with pytest.raises(hybridremat.LimitError, match="device_spec"):
        hybridremat.plan(model, kwargs=batch, memory_limit="80%", compiler="inductor", device_spec="h200")


def test_a_plan_alone_builds_nothing(monkeypatch):
    monkeypatch.setattr("torch._inductor.codecache.PyCodeCache.load_by_key_path", None)
    model, batch = small("mlp")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="95%", compiler="inductor", **HOW)
    assert 0 < plan.predicted_peak <= plan.memory_limit < plan.plain_peak
    assert plan.timings["lowering"] > 0
    assert "compile" not in plan.timings
    assert "inductor" in str(plan)


# --- compiled and run


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("transformer", "60%"), ("convnet", "90%"), ("mlp", "90%")])
def test_a_compiled_step_keeps_its_limit(name, share, monkeypatch):
    model, batch = small(name)
    compiled(model, batch, share)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", None)  # both graphs are there by now
    plan = hybridremat.get_plan(model)
    peaks = train(model, batch, steps=3).peaks
    assert max(peaks) <= plan.predicted_peak <= plan.memory_limit
    assert max(peaks) > 0.9 * plan.predicted_peak  # of some tens of KiB


LEAST = 194_048
"""Bytes of the least compiled plan of the small Transformer with torch 2.13, of 346,320 of its plain code."""


@needs_compiler
@pytest.mark.slow
@pytest.mark.full_effort
def test_the_least_plan_is_as_small_as_recorded_and_runs_in_the_plans_order():
    """Lost without inlining, sinking, or the order and the frees of lean code."""
    model, batch = small("transformer")
    with pytest.warns(hybridremat.InfeasibleLimitWarning):
        compiled(model, batch, 1, on_infeasible="least")
    plan = hybridremat.get_plan(model)
    assert plan.lean
    assert plan.predicted_peak <= 1.01 * LEAST
    peaks = train(model, batch, steps=3).peaks
    assert max(peaks) == plan.predicted_peak == plan.memory_limit


@needs_compiler
@pytest.mark.slow
def test_code_beyond_the_limit_is_refused_before_it_runs(monkeypatch):
    model, batch = small("mlp")
    before = state_of(model)
    huge = EmittedMemory(10**9, 10**9, 0)
    monkeypatch.setattr("hybridremat.compiler.inductor.Inductor.code_memory", lambda *_: lambda *_: huge)
    with pytest.raises(hybridremat.PlanError, match="takes 1000000000 bytes"):
        compiled(model, batch, "90%")
    assert_untouched(before, model)


@needs_compiler
@pytest.mark.slow
def test_draws_are_those_of_stock_inductor():
    model, batch = small("transformer")
    _, theirs = gradients(torch.compile(copy.deepcopy(model)), batch)
    compiled(model, batch, "60%")
    _, ours = gradients(model, batch)
    assert error(ours, {name: gradient.double() for name, gradient in theirs.items()}) < 1e-5


@needs_compiler
@pytest.mark.slow
def test_a_compiled_plan_is_applied_from_its_file(tmp_path):
    model, batch = small("mlp")
    again = copy.deepcopy(model)
    compiled(model, batch, "90%")
    hybridremat.get_plan(model).save(tmp_path / "plan.json")
    hybridremat.wrap(again, kwargs=batch, plan=tmp_path / "plan.json", progress=False)
    assert hybridremat.get_plan(again) == hybridremat.get_plan(model)
    expected, got = train(model, batch, steps=2), train(again, batch, steps=2)
    assert expected.differences(got) == []
    assert max(got.peaks) <= hybridremat.get_plan(again).memory_limit


@needs_compiler
@pytest.mark.slow
def test_torch_compile_takes_the_option():
    model, batch = small("mlp")
    plans = []
    options = {"memory_limit": "90%", "compiler": "inductor", "on_plan": plans.append, "cost_model": "flops"}
    planned = torch.compile(model, backend="hybridremat", options=options)
    peaks = train(planned, batch, steps=3).peaks
    assert plans[0].compiler == "inductor"
    assert max(peaks[1:]) <= plans[0].memory_limit


class Masked(nn.Module):
    """The gradient of its input is the mask of a dropout, through a recomputed product."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x):
        out = x
        for layer in self.layers:
            out = functional.dropout(layer(functional.gelu(out)), 0.5)
        return out.sum()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("fallback", [False, True])
def test_a_recomputed_draw_is_the_first_one(fallback):
    """By finite differences with the same seed: a gradient through another mask would be far off."""
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(16, 32)
    with torch._inductor.config.patch(fallback_random=fallback):
        hybridremat.wrap(model, args=(x,), max_overhead=1.0, compiler="inductor", **HOW)
        _, found = _differentiated(model, x)
        with torch.no_grad():
            step = 1e-2
            weight = model.layers[0].weight
            direction = torch.randn_like(weight)
            losses = []
            for sign in (1, -1):
                weight += sign * step * direction
                torch.manual_seed(3)
                losses.append(float(_grad_loss(model, x)))
                weight -= sign * step * direction
    slope = (losses[0] - losses[1]) / (2 * step)
    assert slope == pytest.approx(float((found * direction).sum()), rel=0.02)


def _grad_loss(model, x):
    with torch.enable_grad():
        return model(x).detach()


def _differentiated(model, x):
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return loss.detach(), model.layers[0].weight.grad.clone()


@needs_compiler
@pytest.mark.slow
def test_gradients_are_as_near_to_the_exact_ones_as_stock_inductors():
    model, batch = small("convnet")
    model.dropout.p = 0.0
    exact = copy.deepcopy(model).double()
    _, true = gradients(exact, {n: t.double() if t.is_floating_point() else t for n, t in batch.items()})
    _, theirs = gradients(torch.compile(copy.deepcopy(model)), batch)
    compiled(model, batch, "90%")
    _, ours = gradients(model, batch)
    assert error(ours, true) <= 1.5 * error(theirs, true)
    counts = [norm.num_batches_tracked.item() for norm in model.norms]
    assert counts == [1, 1, 1]
    for mine, its in zip(model.norms, exact.norms, strict=True):
        assert torch.allclose(mine.running_mean.double(), its.running_mean, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.slow
def test_a_buffer_that_is_read_and_overwritten_gives_the_gradients_of_eager():
    """Stock Inductor differentiates with the buffer as it is after the step (torch 2.13)."""
    model, batch = small("running")
    _, plain = gradients(copy.deepcopy(model), batch)
    compiled(model, batch, "100%")
    _, ours = gradients(model, batch)
    assert error(ours, {n: g.double() for n, g in plain.items()}) < 1e-4
