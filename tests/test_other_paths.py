"""Steps in several graphs whose model, input shape or path changes after they were planned."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.errors import InfeasibleLimitError, UnsurveyedPathWarning
from hybridremat.planning import option_cache, planner
from hybridremat.planning.breaks import step
from hybridremat.planning.breaks.planner import PathPlanner
from support.broken_nets import HOW, Inside, Reader, Stage, batch
from support.training import train

ROOMY = 1 << 30


@pytest.fixture
def surveys(monkeypatch):
    """One entry for each survey that is made."""
    made, survey = [], step.survey_step
    monkeypatch.setattr(step, "survey_step", lambda *args, **how: made.append(1) or survey(*args, **how))
    return made


@torch._dynamo.disable
def noise(x):
    return torch.rand_like(x)


class Halves(nn.Module):
    """A break in the middle, and switches that change the graphs without a change of the input's key."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = Stage(width), Stage(width)
        self.twisted = self.noisy = self.broken = False
        self.deep = True

    def forward(self, x):
        if self.noisy:
            x = x + noise(x)
        x = self.first(x)
        if self.twisted:
            x = torch.sin(x)
        if self.broken:
            torch._dynamo.graph_break()
        return (self.second(x) if self.deep else x).pow(2).mean()


def halves(**switches):
    torch.manual_seed(0)
    model = Halves()
    vars(model).update(switches)
    return model, {"x": torch.randn(48, 16)}


def planned(model, inputs, limit=ROOMY, **how):
    return hybridremat.wrap(copy.deepcopy(model), kwargs=inputs, memory_limit=limit, **HOW, **how)


def test_a_shape_that_fits_no_reused_option_is_solved_anew(monkeypatch):
    reuse = option_cache.reuse_options

    def greedy(problem, known):
        most = max(known.options, key=lambda option: option.saved_bytes)
        return reuse(problem, replace(known, options=(most,), solo=()))

    monkeypatch.setattr(option_cache, "reuse_options", greedy)
    monkeypatch.setattr(planner, "OPTIONS", option_cache.OptionCache())
    model, inputs = halves(broken=True)
    least = hybridremat.plan(model, kwargs=inputs, memory_limit=ROOMY, **HOW).least_peak
    for on_infeasible in ("error", "least"):
        monkeypatch.setattr(planner, "OPTIONS", option_cache.OptionCache())
        wrapped = planned(model, {"x": inputs["x"][:16]}, least, on_infeasible=on_infeasible)
        plan = hybridremat.prepare(wrapped, kwargs=inputs)
        assert plan.predicted_peak <= plan.memory_limit == least
        assert not plan.reused_options


@torch._dynamo.disable
def scaled(x):
    return x * x.detach().repeat(50, 1).square().mean()


class Tokens(nn.Module):
    """Integers come in, and most of the memory is taken for a moment by code between the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.stage = nn.Embedding(20, 16), Stage(16)

    def forward(self, tokens):
        return self.stage(scaled(functional.gelu(self.embedding(tokens)))).pow(2).mean()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.embedding.requires_grad_(False),
        lambda model: model.stage.norm.eval(),
        lambda _: torch.set_autocast_enabled("cpu", True),
    ],
    ids=["double", "frozen", "eval", "autocast"],
)
def test_a_changed_model_is_surveyed_anew(change, surveys):
    torch.manual_seed(0)
    model, inputs = Tokens(), {"tokens": torch.randint(0, 20, (64,))}
    wrapped = planned(model, inputs)
    train(wrapped, inputs, steps=1, measure=False)
    try:
        change(wrapped)
        train(wrapped, inputs, steps=1, measure=False)
        trained = train(wrapped, inputs, steps=1)
        assert max(trained.peaks) <= hybridremat.get_plan(wrapped).predicted_peak
        assert len(surveys) == 2
    finally:
        torch.set_autocast_enabled("cpu", False)


@pytest.mark.slow
def test_another_first_graph_is_planned_together_with_those_after_it(surveys):
    model, inputs = halves(broken=True)
    wide, inputs = copy.deepcopy(model), {"x": torch.randn(96, 16)}
    wide.twisted = True
    least = hybridremat.plan(wide, kwargs=inputs, memory_limit=ROOMY, **HOW).least_peak
    wrapped = planned(model, inputs, least)
    surveys.clear()
    plain = copy.deepcopy(wrapped)
    for twisted in (False, True, False, True, False):
        wrapped.twisted = plain.twisted = twisted
        assert train(plain, inputs, steps=1).differences(train(wrapped, inputs, steps=1, measure=False)) == []
        assert hybridremat.get_plan(wrapped).predicted_peak <= least
    assert len(surveys) <= 3


@pytest.mark.slow
def test_a_path_that_does_not_fit_beside_the_others_is_planned_anew(monkeypatch):
    model, inputs = halves(broken=True)
    wide = copy.deepcopy(model)
    wide.twisted = True
    limit = round(1.02 * hybridremat.plan(wide, kwargs=inputs, memory_limit=ROOMY, **HOW).least_peak)
    wrapped, plain = planned(model, inputs, limit), copy.deepcopy(model)

    def full(*_, **__):
        raise InfeasibleLimitError("nothing fits beside the others", limit=limit, least=limit + 1)

    monkeypatch.setattr(PathPlanner, "add_path", full)
    for twisted in (False, True, False, True):
        wrapped.twisted = plain.twisted = twisted
        assert train(plain, inputs, steps=1).differences(train(wrapped, inputs, steps=1, measure=False)) == []
        plan = hybridremat.get_plan(wrapped)
        assert len(plan.parts) == 2
        assert plan.predicted_peak <= limit


def test_what_ran_before_the_first_graph_is_not_repeated():
    model, inputs = halves(broken=True, noisy=True)
    wrapped = planned(model, inputs)
    for twisted in (False, True):
        wrapped.twisted = model.twisted = twisted
        mine, theirs = train(wrapped, inputs, steps=1, measure=False), train(model, inputs, steps=1)
        assert theirs.differences(mine) == []


def test_a_break_that_comes_later_is_planned(surveys):
    model, inputs = halves()
    wrapped = planned(model, inputs)
    assert hybridremat.get_plan(wrapped).parts == ()
    for broken in (False, True, False, True):
        wrapped.broken = model.broken = broken
        mine, theirs = train(wrapped, inputs, steps=1, measure=False), train(model, inputs, steps=1)
        assert theirs.differences(mine) == []
        assert len(hybridremat.get_plan(wrapped).breaks) == broken
    assert len(surveys) <= 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("most", [64, 1])
def test_the_plan_is_that_of_the_path_that_ran_last(most):
    torch.manual_seed(0)
    model, inputs, shifted = Reader(), batch(), batch(shift=50.0)
    model.first.norm.eval()  # lets the shift through
    wrapped = planned(model, inputs, max_plans=most)
    first = hybridremat.get_plan(wrapped)
    for given, same in ((inputs, True), (shifted, False), (inputs, True), (shifted, False)):
        wrapped(**given).backward()
        plan = hybridremat.get_plan(wrapped)
        assert (plan.fingerprint == first.fingerprint) == same
        assert (plan.predicted_peak == first.predicted_peak) == same


def test_the_paths_that_are_kept_are_bounded():
    torch.manual_seed(0)
    model, inputs = Inside(), {"x": torch.randn(8, 16)}
    wrapped, peaks = planned(model, inputs, max_plans=3), {}
    for turns in (2, 3, 4, 5, 6, 2):
        wrapped.inner.turns = turns
        wrapped(**inputs).backward()
        call = wrapped._compiled_call_impl
        paths = next(iter(call._steps.values())).breaks.paths
        assert len(paths.plans) <= 3 and len(call.context.store) <= 3
        peak = hybridremat.get_plan(wrapped).predicted_peak
        assert peaks.setdefault(turns, peak) == peak
    assert sorted(peaks.values()) == list(peaks.values())


def test_gradients_that_meet_on_a_path_that_was_not_surveyed_are_counted():
    torch.manual_seed(0)
    model, inputs = Inside(), {"x": torch.randn(4, 64)}
    model.inner.stages = nn.ModuleList(Stage(64) for _ in range(2))
    wrapped = planned(model, inputs)
    wrapped.inner.turns = 3
    train(wrapped, inputs, steps=1, measure=False)
    trained = train(wrapped, inputs, steps=1)
    assert max(trained.peaks) <= hybridremat.get_plan(wrapped).predicted_peak


@torch._dynamo.disable
def costly(x):
    return (x.repeat(40, 1).exp() * 0.5).square().mean()


class Exit(Halves):
    """Leaves after its first graph, with a loss that plain PyTorch runs, where the numbers say so."""

    def forward(self, x):
        y = self.first(x)
        if x.detach().mean().item() > 5:
            return costly(y)
        return self.second(y).pow(2).mean()


def test_an_exit_that_was_not_surveyed_warns_and_can_be_prepared():
    torch.manual_seed(0)
    model, inputs = Exit(), {"x": torch.randn(48, 16)}
    leaving = {"x": inputs["x"] + 50.0}
    roomy = hybridremat.plan(model, kwargs=leaving, memory_limit=ROOMY, **HOW)
    least = hybridremat.plan(model, kwargs=inputs, memory_limit=ROOMY, **HOW).least_peak
    unprepared = planned(model, inputs, least)
    unprepared(**inputs).backward()
    with pytest.warns(UnsurveyedPathWarning, match="prepare"):
        unprepared(**leaving).backward()
    assert len(hybridremat.get_plan(unprepared).parts) == 1
    with pytest.raises(InfeasibleLimitError):
        hybridremat.prepare(unprepared, kwargs=leaving)
    unprepared(**inputs).backward()

    prepared = planned(model, inputs, roomy.plain_peak)
    hybridremat.prepare(prepared, kwargs=leaving)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsurveyedPathWarning)
        for given in (inputs, leaving):
            train(prepared, given, steps=1, measure=False)
            trained = train(prepared, given, steps=1)
            plan = hybridremat.get_plan(prepared)
            assert max(trained.peaks) <= plan.predicted_peak <= roomy.plain_peak
            assert len(plan.parts) == (2 if given is inputs else 1)
    assert max(trained.peaks) > least


def test_a_reserve_is_kept_beside_all_graphs_and_not_beside_each():
    model, inputs = halves(broken=True)
    plan = hybridremat.plan(model, kwargs=inputs, memory_limit=ROOMY, reserve=4096, **HOW)
    assert plan.needed == plan.predicted_peak + 4096
    assert [part.needed for part in plan.parts] == [part.predicted_peak for part in plan.parts]
    assert not any(part.reserve for part in plan.parts) and len(plan.parts) == 2


class Spreading(nn.Module):
    """Plain PyTorch between two graphs takes as much memory as it is told to, and may keep its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stage(16), Stage(16)
        self.told = {"times": 1, "keeps": False}
        self.kept = []

    @torch.compiler.disable
    def spread(self, x):
        self.kept.clear()
        if self.told["keeps"]:
            self.kept.append(x.detach())
        return x * torch.cat([x.detach()] * self.told["times"]).mean(0, keepdim=True).exp()

    def forward(self, x, labels):
        return functional.cross_entropy(self.second(self.spread(self.first(x))), labels)


@pytest.mark.parametrize("told", [{"times": 40}, {"keeps": True}], ids=str)
def test_a_known_path_that_is_prepared_again_is_planned_by_the_most_that_was_measured(told, surveys):
    torch.manual_seed(0)
    model, given = Spreading(), batch()
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=given, memory_limit="300%", **HOW)
    before = hybridremat.get_plan(model)
    hybridremat.prepare(model, kwargs=given)
    assert hybridremat.get_plan(model) is before and len(surveys) == 2
    model.told.update(told), plain.told.update(told)
    hybridremat.prepare(model, kwargs=given)
    model.kept.clear()
    after = hybridremat.get_plan(model)
    assert after.predicted_peak > before.predicted_peak
    assert [part.schedule for part in after.parts] == [part.schedule for part in before.parts]
    found = train(model, given, between=model.kept.clear)
    assert train(plain, given).differences(found) == []
    assert before.predicted_peak < max(found.peaks) <= after.predicted_peak
    model.told.update({"times": 1, "keeps": False})
    hybridremat.prepare(model, kwargs=given)
    assert hybridremat.get_plan(model).predicted_peak == after.predicted_peak


def test_what_does_not_fit_when_it_is_measured_again_leaves_the_plan_that_was():
    torch.manual_seed(0)
    model, given = Spreading(), batch()
    hybridremat.wrap(model, kwargs=given, memory_limit=200_000, **HOW)
    before = hybridremat.get_plan(model)
    model.told["times"] = 400
    for _ in range(2):
        with pytest.raises(InfeasibleLimitError, match="no plan fits"):
            hybridremat.prepare(model, kwargs=given)
    model.told["times"] = 1
    assert hybridremat.prepare(model, kwargs=given) is before
    assert max(train(model, given).peaks) <= before.predicted_peak
