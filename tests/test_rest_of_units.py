"""What runs between units is captured as well, and outputs beside a loss get no gradient."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.errors import CaptureError, GraphBreakWarning, InfeasibleLimitError, PlanMismatchError
from support.towers import DroppingLayer
from support.training import train
from support.wrapping import HOW, state_of


class Body(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(DroppingLayer() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Head(nn.Module):
    """A body between an embedding and a head with its loss; logits are returned beside the loss."""

    def __init__(self, classes=256):
        super().__init__()
        self.embed, self.body = nn.Linear(32, 32), Body()
        self.head = nn.Linear(32, classes)
        self.also = False

    def forward(self, x, labels):
        logits = self.head(functional.gelu(self.body(torch.relu(self.embed(x)))))
        loss = functional.cross_entropy(logits, labels)
        return self.more(loss, logits), logits

    def more(self, loss, logits):
        return loss


class Counting(Head):
    """Its own code is another in each call."""

    calls = 0

    def more(self, loss, logits):
        self.calls += 1
        return loss * (1 + 0 * self.calls)


class Reading(nn.Module):
    """Reads a number in a loop, at which PyTorch gives up on all of its forward."""

    def __init__(self, classes=256):
        super().__init__()
        self.embed, self.head = nn.Linear(32, 32), nn.Linear(32, classes)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))

    def forward(self, x, labels):
        for _ in range(2):
            x = torch.tanh(self.embed(x))
            if x.detach().sum() > 1e9:
                x = 2 * x
        logits = self.head(self.body(x))
        return functional.cross_entropy(logits, labels)


def batch(classes=256, rows=96):
    return {"x": torch.randn(rows, 32), "labels": torch.randint(0, classes, (rows,))}


def loss_of(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("how", [{}, {"gradients": "in_backward"}, {"forwards": 2}], ids=str)
def test_the_code_around_units_is_captured_and_planned_to_the_byte(how):
    torch.manual_seed(0)
    model, given = Head(), batch()
    plain = copy.deepcopy(model)
    hybridremat.wrap_each(model, "body.layers.*", kwargs=given, memory_limit="80%", **HOW, **how)
    plan = hybridremat.get_plan(model)
    assert len(plan.places) == 5  # the embedding before, the head and its loss after three layers
    assert plan.breaks == ()  # a unit is no break that anyone could remove
    expected, found = train(plain, given, loss_in=loss_of), train(model, given, loss_in=loss_of)
    assert expected.differences(found) == []
    if not how:
        assert max(found.peaks) == plan.predicted_peak


def test_logits_beside_a_loss_get_no_gradient_of_their_size():
    torch.manual_seed(0)
    given = batch()
    plans = []
    for how in ({}, {"grad_outputs": "all"}):
        model = Head()
        hybridremat.wrap_each(model, "body.layers.*", kwargs=given, memory_limit="100%", **HOW, **how)
        plans.append(hybridremat.get_plan(model))
    logits = 96 * 256 * 4
    assert plans[1].predicted_peak - plans[0].predicted_peak >= logits
    loss, out = model(**given)
    (loss + out.mean()).backward()  # grad_outputs="all"
    model = hybridremat.wrap_each(Head(), "body.layers.*", kwargs=given, memory_limit="100%", **HOW)
    loss, out = model(**given)
    with pytest.raises(PlanMismatchError, match="grad_outputs"):
        (loss + out.mean()).backward()


class Often(Head):
    """The loss is made of the logits, too, on one of its paths."""

    def forward(self, x, labels):
        x = self.body(torch.relu(self.embed(x)))
        logits = self.head(x)
        loss = functional.cross_entropy(logits, labels)
        float(loss.detach().numpy())
        return (loss + logits.square().mean() if self.also else loss), logits


def often(given):
    model = hybridremat.wrap(Often(), kwargs=given, memory_limit="100%", graph_breaks="plan", **HOW)
    loss, _ = model(**given)
    loss.backward()
    model.also = True
    return model


def test_a_path_on_which_they_take_part_in_the_loss_is_refused_and_says_what_to_do():
    given = batch()
    model = often(given)
    with pytest.raises((PlanMismatchError, CaptureError), match="grad_outputs"):
        loss, _ = model(**given)
        loss.backward()


def test_such_a_path_cannot_be_prepared():
    given = batch()
    model = often(given)
    before = state_of(model)[0]
    with pytest.raises(PlanMismatchError, match=r"output \d of a graph was planned .*grad_outputs=\"all\""):
        hybridremat.prepare(model, kwargs=given)
    assert all(torch.equal(tensor, before[name][1]) for name, (_, tensor) in state_of(model)[0].items())
    model.also = False
    loss, _ = model(**given)
    loss.backward()


def test_code_that_is_another_in_each_call_runs_as_it_is(caplog):
    torch.manual_seed(0)
    model, given = Counting(), batch()
    plain = copy.deepcopy(model)
    with caplog.at_level("INFO"):
        hybridremat.wrap_each(model, "body.layers.*", kwargs=given, memory_limit="90%", **HOW)
    assert "runs as it is" in caplog.text
    assert len(hybridremat.get_plan(model).places) == 3
    expected, found = train(plain, given, loss_in=loss_of), train(model, given, loss_in=loss_of)
    assert expected.differences(found) == []


class Counted(Head):
    """Counts its calls, in what is captured."""

    calls = 0

    def forward(self, x, labels):
        self.calls += 1
        return super().forward(x, labels)


@pytest.mark.parametrize(("made", "times"), [(Counted, 3), (Counting, 9)])
def test_the_forward_runs_as_often_as_the_documentation_says(made, times):
    model = made()
    hybridremat.wrap_each(model, "body.layers.*", kwargs=batch(), memory_limit="100%", **HOW)
    assert model.calls == times


@pytest.mark.parametrize("how", [{}, {"graph_breaks": "plan"}], ids=str)
def test_units_are_found_where_nothing_of_the_own_forward_can_be_captured(how):
    torch.manual_seed(0)
    model, given = Reading(), batch()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hybridremat.wrap(model, kwargs=given, memory_limit="90%", **HOW, **how)
    told = [each for each in said if issubclass(each.category, GraphBreakWarning)]
    assert len(told) == (not how)
    plan = hybridremat.get_plan(model)
    assert set(plan.request.units) == {"embed", "body", "head"}
    expected, found = train(plain, given), train(model, given)
    assert expected.differences(found) == []
    assert max(found.peaks) <= plan.predicted_peak <= plan.memory_limit


def test_a_break_is_planned_with_a_warning_that_names_the_line_unless_it_is_refused():
    class Breaking(Head):
        def forward(self, x, labels):
            x = self.body(self.embed(x))
            if x.detach().sum() > 1e9:
                x = 2 * x
            return functional.cross_entropy(self.head(x), labels)

    given = batch()
    with pytest.warns(GraphBreakWarning, match=r"if x.detach\(\).sum\(\) > 1e9"):
        model = hybridremat.wrap(Breaking(), kwargs=given, memory_limit="100%", **HOW)
    assert len(hybridremat.get_plan(model).parts) == 2
    with pytest.warns(GraphBreakWarning):
        assert len(hybridremat.frontier(Breaking(), kwargs=given, **HOW).points) > 1
    with pytest.raises(CaptureError, match="breaks"):
        hybridremat.wrap(Breaking(), kwargs=given, memory_limit="100%", graph_breaks="error", **HOW)
    with pytest.raises(InfeasibleLimitError, match=r"for this step of 2 graphs: .*remove graph breaks") as no:
        hybridremat.wrap(Breaking(), kwargs=given, memory_limit=5000, **HOW)
    said = str(no.value)
    assert no.value.limit == 5000 and f"({no.value.least} bytes" in said
    assert "Breaking is not one graph" in said and "if x.detach().sum() > 1e9" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphBreakWarning)
        hybridremat.wrap(Breaking(), kwargs=given, memory_limit="100%", graph_breaks="plan", **HOW)
        hybridremat.wrap(Head(), kwargs=given, memory_limit="100%", **HOW)


def test_code_between_units_with_breaks_of_its_own_runs_as_it_is(caplog):
    """It may be another graph for other data, as with experts that are called for the tokens they get."""

    class Experts(Head):
        def forward(self, x, labels):
            x = self.body(self.embed(x))
            for sign in (1, -1):
                chosen = torch.nonzero(sign * x[:, 0] > 0)[:, 0]
                x = x.index_add(0, chosen, torch.tanh(x[chosen]))
            return functional.cross_entropy(self.head(x), labels)

    torch.manual_seed(0)
    model, given = Experts(), batch()
    plain = copy.deepcopy(model)
    with caplog.at_level("INFO"):
        hybridremat.wrap_each(model, "body.layers.*", kwargs=given, memory_limit="100%", **HOW)
    assert "breaks elsewhere" in caplog.text and len(hybridremat.get_plan(model).places) == 3
    captures = hybridremat.measure(model, kwargs=given)
    assert captures.peak <= hybridremat.get_plan(model).predicted_peak
    other = batch()  # other rows for each expert
    expected, found = train(plain, other, measure=False), train(model, other, measure=False)
    assert expected.differences(found) == []
