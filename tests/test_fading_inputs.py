"""What code between graphs makes for one of them is counted as long as its backward reads it, to the byte."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.errors import InfeasibleLimitError
from support.training import allocated_peak, train
from support.wrapping import HOW


class Rounded(nn.Module):
    """Activations of what is rounded between graphs: that saves where it cut numbers off, and no numbers."""

    def __init__(self, activation, turns=3):
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(32, 32) for _ in range(turns))
        self.activations = nn.ModuleList(activation() for _ in range(turns))
        self.head = nn.Linear(32, 8)
        self.turns = turns

    def forward(self, x, labels):
        for linear, activation in list(zip(self.linear, self.activations, strict=True))[: self.turns]:
            x = torch.fake_quantize_per_tensor_affine(linear(x), 0.1, 0, -128, 127)
            x = self.activated(activation, x)
        return functional.cross_entropy(self.head(x), labels)

    def activated(self, activation, x):
        return activation(x)


class Late(Rounded):
    """Drops what a graph has read when more has been made, and that is gone, too."""

    @torch.compiler.disable
    def activated(self, activation, x):
        y = activation(x)
        return y.add(torch.cat([y.detach(), x.detach()]).mean())


class Shared(Rounded):
    """Gives it to two graphs."""

    def activated(self, activation, x):
        return activation(x) + activation(x)


class Kept(Rounded):
    """The last time, autograd saves it, too."""

    def activated(self, activation, x):
        y = activation(x)
        return y * x if activation is self.activations[-1] else y


class Deep(Rounded):
    """Most runs before the only graph. Autograd saves what is handed to that, and takes more memory later."""

    def __init__(self, activation):
        super().__init__(activation)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x, labels):
        return functional.cross_entropy(self.head(self.activations[0](self.before(x))), labels)

    @torch.compiler.disable
    def before(self, x):
        for linear in self.linear:
            x = (linear(x).unsqueeze(-1) * self.scale).sum(-1).relu()
        return x


class Twice(nn.Module):
    """Reads its input in the backward, too, unless it is made of what was saved in its place."""

    def forward(self, x):
        return functional.gelu(functional.gelu(x))


def batch():
    return {"x": torch.randn(256, 32), "labels": torch.randint(0, 8, (256,))}


@pytest.mark.parametrize(
    ("make", "activation"),
    [*((Rounded, kind) for kind in (nn.ReLU, nn.GELU, nn.Dropout, Twice)), (Late, nn.ReLU), (Deep, Twice)],
)
def test_inputs_are_counted_while_they_are_kept(make, activation):
    torch.manual_seed(0)
    plain, given = make(activation), batch()
    expected = train(copy.deepcopy(plain), given)
    least = max(expected.peaks)
    for _ in range(2):
        model = copy.deepcopy(plain)
        hybridremat.wrap_each(model, "activations.*", kwargs=given, memory_limit=least, **HOW)
        found, plan = train(model, given), hybridremat.get_plan(model)
        assert expected.differences(found) == []
        assert max(found.peaks) == plan.predicted_peak <= least
        least = plan.least_peak


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
@pytest.mark.parametrize("make", [Kept, Shared])
def test_inputs_that_others_hold_are_counted_as_well(make, activation):
    torch.manual_seed(0)
    model, given = make(activation), batch()
    added_up = given["x"].nbytes  # a gradient that several make, of which each is counted
    most = max(train(copy.deepcopy(model), given).peaks) + added_up if make is Kept else "100%"
    hybridremat.wrap_each(model, "activations.*", kwargs=given, memory_limit=most, **HOW)
    assert max(train(model, given).peaks) <= hybridremat.get_plan(model).predicted_peak


@pytest.mark.parametrize(("activation", "nothing"), [(nn.ReLU, True), (Twice, False)])
def test_an_error_says_where_nothing_can_be_saved(activation, nothing):
    with pytest.raises(InfeasibleLimitError, match="of the plain step's") as caught:
        hybridremat.wrap_each(Rounded(activation), "activations.*", kwargs=batch(), memory_limit=1000, **HOW)
    assert ("3 graphs: nothing can be saved here: the least" in str(caught.value)) is nothing


class Outside(Rounded):
    """Returns what a loss is made of elsewhere, from code behind the last graph."""

    @torch.compiler.disable
    def forward(self, x, labels):
        return self.activations[0](self.linear[0](x)) * 2


def test_what_the_caller_holds_in_the_backward_is_counted():
    torch.manual_seed(0)
    wide = nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)
    model, given = Outside(lambda: nn.Sequential(*wide)), batch()
    hybridremat.wrap_each(model, "activations.*", kwargs=given, memory_limit="100%", **HOW)

    def step():
        scores = model(**given)
        scores.backward(torch.ones_like(scores))

    step()
    model.zero_grad()
    assert allocated_peak(step) == hybridremat.get_plan(model).predicted_peak


def test_graphs_of_a_path_that_was_not_surveyed_may_keep_their_inputs():
    torch.manual_seed(0)
    model, given = Rounded(nn.GELU, 5), batch()
    model.turns = 3
    hybridremat.wrap_each(model, "activations.*", kwargs=given, memory_limit="300%", **HOW)
    model.turns = 5
    found, plan = train(model, given), hybridremat.get_plan(model)
    assert len(plan.places) == 5
    assert max(found.peaks) <= plan.predicted_peak
