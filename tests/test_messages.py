"""What people pass by mistake, and what a capture that fails says: the user's own line, and what helps."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.errors import (
    CaptureError,
    InfeasibleLimitError,
    InputError,
    LimitError,
    ModelError,
    OptionsError,
)
from hybridremat.integrations.loop_options import loop_options
from hybridremat.integrations.torch_compile import read_options
from support.training import train, train_plain

HOW = {"memory_limit": "100%", "cost_model": "flops", "progress": False}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).square().mean()


class Raises(Net):
    def forward(self, x):
        if x.shape[0] != 3:
            raise ValueError("three rows")
        return super().forward(x)


class Asserts(Net):
    def forward(self, x):
        assert x.shape[0] == 3
        return super().forward(x)


class Branches(Net):
    def forward(self, x):
        hidden = self.linear(x)
        if hidden.sum() > 0:  # here
            hidden = hidden * 2
        return hidden.mean()


class BranchesOnSize(Net):
    def forward(self, x):
        hidden = self.linear(x)
        kept = hidden[x[:, 0] > 0]
        if kept.shape[0] > 2:  # here
            kept = kept * 2
        return kept.mean()


class SizeOfData(Net):
    def forward(self, x):
        return self.linear(x)[x[:, 0] > 0].mean()  # here


class SizesOfData(Net):
    """Sizes that are numbers of the data, in arithmetic that Dynamo cannot decide."""

    def forward(self, x):
        x, found = self.linear(x), []
        for high, wide in (x.detach() * 0 + 3)[:2, :2].long().tolist():
            places = functional.pad(
                torch.arange(high * wide).reshape(high, wide), (0, 2 - wide % 2), value=-1
            )
            found.extend((places.flatten() != -1).cumsum(0).tolist())  # here
        return (x * len(found)).mean()


class BranchesInside(Net):
    """The line that is meant is the innermost of the user's own."""

    def forward(self, x):
        return self.doubled(self.linear(x)).mean()

    def doubled(self, hidden):
        return hidden * 2 if hidden.sum() > 0 else hidden  # here


class FailsInPieces(Net):
    """Fails where Dynamo has cut it."""

    def forward(self, x):
        hidden = self.linear(x)
        torch._dynamo.graph_break()
        if "resume" in sys._getframe().f_code.co_name:
            raise RuntimeError("not in pieces")
        return hidden.mean()


class Differentiates(Net):
    def forward(self, x):
        hidden = self.linear(x)
        torch._dynamo.graph_break()
        torch.autograd.grad(hidden.sum(), self.linear.weight, retain_graph=True)
        return hidden.mean()


def rows():
    return torch.randn(4, 8)


def test_a_limit_of_fifty_bytes_asks_whether_it_was_a_share():
    with pytest.raises(InfeasibleLimitError, match="did you mean 50%"):
        hybridremat.plan(Net(), args=(rows(),), **HOW | {"memory_limit": "50"})


def test_numbers_of_numpy_are_numbers():
    how = HOW | {"memory_limit": numpy.int64(10**6), "max_plans": numpy.int64(3), "reserve": numpy.int32(0)}
    assert hybridremat.plan(Net(), args=(rows(),), **how).memory_limit == 10**6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"args": {"x": rows()}}, "pass kwargs=batch"),
        ({"args": rows()}, r"pass args=\(x,\)"),
        ({"kwargs": (rows(),)}, "not a mapping"),
    ],
)
def test_inputs_in_the_wrong_container_are_named(given, said):
    with pytest.raises(InputError, match=said):
        hybridremat.wrap(Net(), **given, **HOW)


def test_inference_mode_is_named():
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode"):
        hybridremat.wrap(Net(), args=(rows(),), **HOW)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: hybridremat.wrap(Net(), args=(rows(),), limit="50%"), TypeError),
        (lambda: hybridremat.plan(Net(), args=(rows(),), limit="50%"), TypeError),
        (lambda: loop_options({"limit": "50%"}), OptionsError),
        (lambda: read_options(None, {"limit": "50%"}), OptionsError),
    ],
    ids=["wrap", "plan", "callbacks", "torch.compile"],
)
def test_an_unknown_keyword_names_the_nearest(call, error):
    with pytest.raises(error, match="Did you mean 'memory_limit'"):
        call()


@pytest.mark.parametrize(
    ("net", "said"),
    [(Raises, r"raises ValueError\('three rows'\) at "), (Asserts, r"raises AssertionError.* at ")],
)
def test_what_the_model_raises_itself_is_no_graph_break(net, said):
    with pytest.raises(InputError, match=said) as caught:
        hybridremat.wrap(net(), args=(rows(),), **HOW)
    assert __file__ in str(caught.value)


DATA = [Branches, BranchesOnSize, SizeOfData, SizesOfData, BranchesInside]


@pytest.mark.parametrize("net", DATA)
def test_what_depends_on_data_has_its_line_and_the_option_that_helps(net):
    lines = Path(__file__).read_text().splitlines()
    here = [number for number, line in enumerate(lines, 1) if line.endswith("  # here")]
    with pytest.raises(CaptureError) as caught:
        hybridremat.wrap(net(), args=(rows(),), graph_breaks="error", **HOW)
    said = str(caught.value)
    assert f"{__file__}:{here[DATA.index(net)]}" in said
    assert 'graph_breaks="plan"' in said.splitlines()[-1] and len(said) < 1200
    assert "dynamic=False" not in said
    assert ("pad or mask instead" in said) == (net in (BranchesOnSize, SizesOfData))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("net", DATA)
def test_and_with_that_option_it_trains(net):
    torch.manual_seed(0)
    model, batch = net(), {"x": rows()}
    planned = hybridremat.wrap(
        copy.deepcopy(model), kwargs=batch, **HOW | {"memory_limit": "300%"}, graph_breaks="plan"
    )
    assert train_plain(model, batch, measure=False).differences(train(planned, batch, measure=False)) == []


@pytest.mark.parametrize(
    ("net", "said", "not_said"),
    [
        (FailsInPieces, "not in pieces.*wrap the part", "func.grad"),
        (Differentiates, "torch.func.grad", "in pieces"),
    ],
)
def test_what_fails_in_a_survey_alone_gets_the_advice_that_fits(net, said, not_said):
    with pytest.raises(CaptureError, match=said) as caught:
        hybridremat.wrap(net(), args=(rows(),), graph_breaks="plan", **HOW)
    assert not_said not in str(caught.value) and f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize("limit", ["0%", 0])
def test_a_limit_of_nothing_says_so_before_anything_is_planned(limit):
    model = Net()
    with pytest.raises(LimitError, match="leaves no memory at all"):
        hybridremat.wrap(model, args=(rows(),), **HOW | {"memory_limit": limit})
    assert hybridremat.wrap(model, args=(rows(),), **HOW) is model


def test_a_wrapped_model_inside_a_transform_is_refused():
    model = hybridremat.wrap(Net(), args=(rows(),), **HOW)
    parameters, x = dict(model.named_parameters()), rows()
    with pytest.raises(ModelError, match=r"transform of torch\.func"):
        torch.func.grad(lambda each: torch.func.functional_call(model, each, (x,)))(parameters)
