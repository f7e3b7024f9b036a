"""Steps that need more than was measured: they are measured again, and run again from their start."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import hybridremat
from hybridremat.errors import CaptureError, InfeasibleLimitError, UnsurveyedPathWarning
from hybridremat.planning.auto_breaks import BesideGraphsError, with_breaks
from hybridremat.planning.breaks import graphs
from hybridremat.planning.settings import Settings
from hybridremat.runtime.planned_call import PlannedCall
from support.training import allocated_peak, train

ROWS, WIDTH, TURNS = 512, 32, 4
HOW = {"cost_model": "flops", "graph_breaks": "plan", "progress": False}


def layer():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


class Loop(nn.Module):
    """The first graph ends at a loop of as many turns as the numbers say, around modules of PyTorch's."""

    def __init__(self, norm=None):
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(TURNS))

    def forward(self, x):
        y, turn = self.norm(torch.relu(self.first(x))), 0
        while turn < int(x[0, 0]):
            y, turn = y + self.layers[turn](y), turn + 1
        return self.last(y).square().mean()


class PlainLoop(Loop):
    """What a turn runs is no module, and no function of its own."""

    def __init__(self, norm=None):
        super().__init__(norm)
        self.layers = None
        self.weight = nn.Parameter(torch.randn(TURNS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        y, turn = self.norm(torch.relu(self.first(x))), 0
        while turn < int(x[0, 0]):
            y, turn = y + torch.sin(torch.tanh(y @ self.weight[turn]).exp()), turn + 1
        return self.last(y).square().mean()


def of_turns(turns):
    x = torch.randn(ROWS, WIDTH)
    x[0, 0] = float(turns)
    return x


def wrapped(model, turns, limit, **how):
    return hybridremat.wrap(model, (of_turns(turns),), memory_limit=limit, **HOW | how)


def plain_peak(model, turns):
    own, x = copy.deepcopy(model), of_turns(turns)
    return allocated_peak(lambda: own(x).backward())


def trained_peak(model, turns):
    """The peak of a step whose path has been met before: nothing can be measured anew beside a profiler."""
    x = of_turns(turns)
    model(x).backward()
    model.zero_grad()
    return allocated_peak(lambda: model(x).backward())


def bytes_there(*but):
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    tensors = [each for each in found if not isinstance(each, but)]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.fixture
def again(monkeypatch):
    """For each step that was surveyed again: the bytes of the tensors that were there then."""
    found, survey = [], PlannedCall._with_path

    def noted(*args):
        found.append(bytes_there())
        return survey(*args)

    monkeypatch.setattr(PlannedCall, "_with_path", noted)
    return found


def test_layers_that_run_between_graphs_become_units():
    torch.manual_seed(0)
    plan = hybridremat.plan(Loop(), (of_turns(1),), memory_limit="100%", **HOW)
    assert plan.request.units == ("layers.*",)
    assert len(plan.parts) == 2  # the beginning is captured as it was
    assert hybridremat.plan(PlainLoop(), (of_turns(1),), memory_limit="100%", **HOW).request.units == ()


@pytest.mark.everyday
def test_more_turns_than_were_planned_are_planned_or_refused_by_what_they_take(again):
    torch.manual_seed(0)
    model = Loop()
    plain = {turns: plain_peak(model, turns) for turns in range(1, TURNS + 1)}
    planned = hybridremat.plan(copy.deepcopy(model), (of_turns(2),), memory_limit="100%", **HOW)
    limit = round(1.02 * planned.least_peak)
    wrapped(model, 1, limit)
    for turns in (1, 2, 1):
        assert trained_peak(model, turns) <= limit < plain[2]
    with pytest.raises(InfeasibleLimitError) as no:
        model(of_turns(TURNS))
    assert no.value.limit == limit < no.value.least < 0.7 * plain[TURNS]
    assert len(again) == 2
    assert trained_peak(model, 2) <= limit  # the refusal has changed nothing
    hybridremat.unwrap(model)
    wrapped(model, TURNS, no.value.least)
    assert trained_peak(model, TURNS) <= no.value.least


@pytest.mark.everyday
def test_more_turns_of_code_that_is_in_no_graph_are_measured_or_refused(again):
    torch.manual_seed(0)
    model = PlainLoop()
    plain = {turns: plain_peak(model, turns) for turns in range(1, TURNS + 1)}
    wrapped(model, 1, plain[3])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsurveyedPathWarning)
        for turns in (1, 3, 2, 1):
            assert trained_peak(model, turns) <= plain[3]
            assert hybridremat.get_plan(model).predicted_peak <= plain[3]
        assert len(again) == 1
        for _ in range(2):
            with pytest.raises(InfeasibleLimitError, match=f"{plain[TURNS]} bytes, 100.0 % of the plain"):
                model(of_turns(TURNS))
        assert trained_peak(model, 3) <= plain[3]


def test_what_the_step_had_made_is_gone_when_it_is_measured_again(again):
    torch.manual_seed(0)
    model = PlainLoop()
    wrapped(model, 1, 2 * plain_peak(model, TURNS))
    gc.collect()
    x = of_turns(TURNS)
    before = bytes_there()
    model(x)
    assert len(again) == 1
    assert again[0] < before + x.nbytes  # one activation has as many


class Dropping(Loop):
    """Leaves layers out by random numbers of PyTorch, Python and NumPy, and draws one in plain code."""

    def forward(self, x):
        y = self.first(x)
        for turn, run in enumerate(self.layers):
            drawn = (torch.rand(()).item(), random.random(), np.random.random())[turn % 3]
            if drawn < 0.5:
                y = y + drawn * run(y)
        return self.last(y).square().mean()


@pytest.mark.parametrize("how", [{}, {"rewrites": "none"}, {"outputs": "loss"}], ids=str)
def test_a_step_that_runs_again_draws_the_same_numbers(how, again):
    x, models, trained = torch.randn(ROWS, WIDTH), [], []
    torch.manual_seed(0)
    model = Dropping()
    seeded(5)
    peak = plain_peak(model, 0)
    for each in (model, copy.deepcopy(model)):
        models.append(each)
        if len(models) == 2:
            seeded(5)
            hybridremat.wrap(each, (x,), memory_limit=round(0.8 * peak), **HOW | how)
        seeded(7)
        trained.append(train(each, {"x": x}, steps=8, measure=False))
    assert trained[0].differences(trained[1]) == []
    assert again


def seeded(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def test_a_step_that_has_written_to_a_buffer_is_not_run_again(again):
    torch.manual_seed(0)
    model = PlainLoop(nn.BatchNorm1d(WIDTH))
    wrapped(model, 1, "100%")
    with pytest.warns(UnsurveyedPathWarning, match="more turns of a loop"):
        model(of_turns(TURNS)).backward()
    assert not again
    assert model.norm.num_batches_tracked == 1


@pytest.fixture
def no_collection():
    """Cycles stay, and what they hold."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def of_which_two_turns_just_fit():
    """A model with a buffer that its forward writes, wrapped for one turn, and its limit."""
    torch.manual_seed(0)
    model = Loop(nn.BatchNorm1d(WIDTH))
    least = hybridremat.plan(copy.deepcopy(model), (of_turns(2),), memory_limit="100%", **HOW).least_peak
    return wrapped(model, 1, round(1.1 * least)), round(1.1 * least)


def test_a_step_that_is_refused_holds_nothing_that_it_has_made(no_collection):
    (model, _), x = of_which_two_turns_just_fit(), of_turns(TURNS)
    for attempt in range(2):
        before = bytes_there(FakeTensor)
        with pytest.raises(InfeasibleLimitError):
            model(x).backward()
        assert attempt == 0 or bytes_there(FakeTensor) == before
    assert model.norm.num_batches_tracked == 2  # refused in the midst of it


def test_a_path_that_does_not_fit_beside_others_is_prepared_alone():
    model, limit = of_which_two_turns_just_fit()
    hybridremat.prepare(model, (of_turns(2),))
    assert trained_peak(model, 2) <= limit
    with pytest.raises(InfeasibleLimitError):
        hybridremat.prepare(model, (of_turns(TURNS),))
    assert trained_peak(model, 2) <= limit


class WithOutput(Loop):
    """Returns what its loss is made of, too."""

    def forward(self, x):
        y, turn = torch.relu(self.first(x)), 0
        while turn < int(x[0, 0]):
            y, turn = y + self.layers[turn](y), turn + 1
        y = self.last(y)
        return y.square().mean(), y


@pytest.mark.filterwarnings("error::hybridremat.errors.HeldOutputWarning")
@pytest.mark.filterwarnings("ignore::hybridremat.errors.UnsurveyedPathWarning")
def test_what_a_step_returned_is_gone_after_a_path_that_was_not_planned(no_collection):
    torch.manual_seed(0)
    model = WithOutput()
    wrapped(model, 1, round(1.2 * plain_peak(Loop(), 2)), rewrites="none")
    for turns in (1, TURNS - 1, 2):
        with suppress(InfeasibleLimitError):
            model(of_turns(turns))[0].backward()


def test_a_path_that_was_refused_is_refused_again_without_a_search(monkeypatch):
    torch.manual_seed(0)
    model, searches = WithOutput(), []
    wrapped(model, 1, round(0.8 * plain_peak(Loop(), 2)), rewrites="none")
    choose = graphs.choose_path
    monkeypatch.setattr(graphs, "choose_path", lambda *asked: searches.append(asked) or choose(*asked))
    model(of_turns(1))[0].backward()
    said = []
    for _ in range(4):
        before = len(searches)
        with pytest.raises(InfeasibleLimitError) as refused:
            model(of_turns(TURNS))
        said.append((str(refused.value), refused.value.least, len(searches) > before))
    assert len({each[:2] for each in said}) == 1
    assert said[0][2] and not said[-1][2]
    model(of_turns(1))[0].backward()


def test_an_error_that_is_being_handled_keeps_its_traceback():
    torch.manual_seed(0)
    model = WithOutput()
    wrapped(model, 1, round(1.2 * plain_peak(Loop(), 2)), rewrites="none")
    model(of_turns(1))[0].backward()
    try:
        raise ValueError
    except ValueError as error:
        with suppress(InfeasibleLimitError):
            model(of_turns(TURNS - 1))[0].backward()
        assert error.__traceback__ is not None


class Counting(PlainLoop):
    """Changes buffers so that their version counters do not tell."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.how == "replaced":
            self.calls = self.calls + 1
        elif self.how == "written through data":
            self.calls.data.add_(1)
        y, turn = torch.relu(self.first(x)), 0
        while turn < int(x[0, 0]):
            y, turn = y + torch.sin(torch.tanh(y @ self.weight[turn]).exp()), turn + 1
            if self.how == "replaced in a turn":
                self.calls = self.calls + 1
            elif self.how == "written in a turn":
                self.calls.data.add_(1)
            elif self.how == "a weight in a turn":
                self.first.bias.data.add_(1)
        return self.last(y).square().mean()


CHANGES = "replaced", "written through data", "replaced in a turn", "written in a turn", "a weight in a turn"


@pytest.mark.filterwarnings("ignore", category=UnsurveyedPathWarning)
@pytest.mark.parametrize("how", CHANGES)
def test_what_a_forward_changes_is_changed_once(how, again):
    torch.manual_seed(0)
    model = Counting(how)
    bias = model.first.bias.detach().clone()
    wrapped(model, 1, "100%")
    model(of_turns(TURNS)).backward()
    if how != "a weight in a turn":
        assert model.calls == (TURNS if "turn" in how else 1)
    else:
        assert torch.allclose(model.first.bias, bias + TURNS)
    assert not again


class NormedAtLast(PlainLoop):
    """Writes to its buffers behind the loop."""

    def forward(self, x):
        y, turn = torch.relu(self.first(x)), 0
        while turn < int(x[0, 0]):
            y, turn = y + torch.sin(torch.tanh(y @ self.weight[turn]).exp()), turn + 1
        return normed_loss(self, y)


def normed_loss(model, y):
    """A graph of its own: what the function of the loop calls itself is in none."""
    return model.norm(model.last(y)).square().mean()


def test_a_step_runs_again_that_would_write_to_a_buffer_later(again):
    torch.manual_seed(0)
    model = NormedAtLast(nn.BatchNorm1d(WIDTH))
    wrapped(model, 1, "100%")
    with suppress(InfeasibleLimitError):
        model(of_turns(TURNS)).backward()
    assert again


def test_a_step_may_call_none_of_the_units_that_nobody_named():
    torch.manual_seed(0)
    model = Loop()
    for module in model.layers:
        module[2].p = 0.0
    plain = copy.deepcopy(model)
    wrapped(model, 2, "100%")
    for turns in (0, 2, 0, 1):
        x = of_turns(turns)
        assert torch.equal(model(x), plain(x))


class Unlike(nn.Module):
    """Leaves out layers of several widths at random."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide * WIDTH), nn.GELU(), nn.Linear(wide * WIDTH, WIDTH))
            for wide in range(2, 8)
        )

    def forward(self, x):
        y = torch.relu(self.first(x))
        for run in self.layers:
            if random.random() < 0.5:
                y = y + run(y) * 1.5
        return self.last(y).square().mean()


def test_a_layer_that_was_refused_as_it_was_met_is_planned_as_it_was_measured(again):
    torch.manual_seed(0)
    model, x = Unlike(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    random.seed(5)
    hybridremat.wrap(model, (x,), memory_limit=2_187_474, **HOW)
    for number in range(100, 104):
        losses = []
        for each in (model, plain):
            random.seed(number)
            losses.append(each(x))
        assert torch.equal(*losses)
    assert again


@pytest.mark.parametrize("turns", [2, TURNS])
def test_gradients_of_alike_units_stay_where_another_step_calls_several(turns):
    torch.manual_seed(0)
    model, x = Loop(), of_turns(turns)
    for module in model.layers:
        module[2].p = 0.0
    plain = copy.deepcopy(model)
    wrapped(model, 1, plain_peak(plain, TURNS), gradients="in_backward")
    for each in (model, plain):
        each(x).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


def test_beside_a_profiler_a_step_is_refused_or_warned_of_as_it_is():
    torch.manual_seed(0)
    model = Loop()
    wrapped(model, 1, plain_peak(model, 1))
    with torch.profiler.profile(), pytest.raises(InfeasibleLimitError):
        model(of_turns(TURNS))
    model = PlainLoop()
    wrapped(model, 1, "100%")
    with torch.profiler.profile(), pytest.warns(UnsurveyedPathWarning, match="more turns of a loop"):
        model(of_turns(TURNS)).backward()


class Catching(nn.Module):
    """Catches whatever goes wrong inside."""

    def __init__(self):
        super().__init__()
        self.loop = PlainLoop()

    def forward(self, x):
        try:
            return self.loop(x)
        except Exception:  # noqa: BLE001
            return self.loop.weight.sum() * 0


def test_a_model_that_catches_exceptions_is_measured_again_too(again):
    torch.manual_seed(0)
    model = Catching()
    plain = copy.deepcopy(model)
    wrapped(model, 1, 2 * plain_peak(model, TURNS))
    for turns in (1, TURNS, 2):
        x = of_turns(turns)
        assert torch.equal(model(x), plain(x))
    assert len(again) == 1


def test_a_step_that_fails_holds_nothing_of_its_inputs():
    torch.manual_seed(0)
    model = PlainLoop()
    wrapped(model, 1, plain_peak(model, 1))
    for turns, error in ((TURNS, InfeasibleLimitError), (TURNS + 1, Exception)):
        x = of_turns(turns)
        there, refused = weakref.ref(x), False
        try:
            model(x)
        except error:
            refused = True
        del x
        gc.collect()
        assert refused and there() is None


NO = CaptureError("no"), InfeasibleLimitError("no", limit=1, least=2)


@pytest.mark.parametrize("error", NO, ids=lambda error: type(error).__name__)
def test_layers_run_between_graphs_where_they_cannot_be_units(error):
    asked = []

    def run(settings):
        asked.append((settings.units, settings.own_units))
        if settings.units:
            raise error
        if settings.own_units:
            raise BesideGraphsError("layers run between graphs", units=("layers.*",))
        return "planned"

    assert with_breaks(Loop(), Settings(memory_limit="50%", graph_breaks="plan"), run) == "planned"
    assert asked == [((), True), (("layers.*",), True), ((), False)]
