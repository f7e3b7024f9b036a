"""What is asked and cannot be done is a typed error, and nothing has changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.errors import CostModelError, LimitError, UntriedKernelError
from hybridremat.units import format_bytes
from support.training import Mlp, small, train, train_plain
from support.wrapping import HOW, assert_untouched, least_limit, state_of, wrap


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        if x.sum().item() > 0:
            x = x * 2
        return x.sum()


def refuse(error, match, model, batch=None, **how):
    before = state_of(model)
    how = {"memory_limit": "80%", **HOW, **how}
    for call in (hybridremat.wrap, hybridremat.plan):
        with pytest.raises(error, match=match) as caught:
            call(model, kwargs=batch, **how)
        assert_untouched(before, model)
    return caught.value


def test_infeasible_limit_names_the_least_and_the_least_is_feasible():
    model, batch = small("transformer")
    error = refuse(
        hybridremat.InfeasibleLimitError,
        r"no plan fits memory_limit 1000 B \(1000 bytes\)",
        model,
        batch,
        memory_limit=1000,
    )
    assert error.limit == 1000 and f"({error.least} bytes" in str(error)
    wrap(model, batch, error.least)
    assert hybridremat.get_plan(model).predicted_peak == error.least
    assert max(train(model, batch).peaks) <= error.least
    hybridremat.unwrap(model)
    with pytest.raises(hybridremat.InfeasibleLimitError):
        wrap(model, batch, error.least - 1)


class OneLargeOp(nn.Module):
    """A softmax over far more than everything else; no plan can split it."""

    def __init__(self):
        super().__init__()
        self.first, self.wide = nn.Linear(8, 8), nn.Linear(8, 4096)

    def forward(self, x):
        return self.wide(self.first(x)).softmax(-1)[:, 0].sum()


def test_an_op_that_sets_the_least_limit_alone_is_named():
    model, batch = OneLargeOp(), {"x": torch.randn(64, 8)}
    error = refuse(hybridremat.InfeasibleLimitError, "One op, .*softmax", model, batch, memory_limit=1000)
    alone = 2 * 64 * 4096 * 4
    assert f"takes {format_bytes(alone)} of it alone" in str(error) and alone <= error.least
    deep, inputs = small("mlp")
    error = refuse(hybridremat.InfeasibleLimitError, "no plan fits", deep, inputs, memory_limit=1000)
    assert "One op" not in str(error)


def test_limit_and_overhead_that_exclude_each_other():
    model, batch = small("transformer")
    least = least_limit(model, batch)
    refuse(
        hybridremat.InfeasibleLimitError,
        "no plan keeps both memory_limit .* and max_overhead 0.0%",
        model,
        batch,
        memory_limit=least,
        max_overhead=0,
    )


@pytest.mark.parametrize(
    ("limit", "match"),
    [("lots", "'lots' cannot be read"), (-5, "negative"), ("-5MiB", "negative"),
     (0.5, 'did you mean "50%"'), ("0%", "leaves no memory at all")],
)  # fmt: skip
def test_limits_that_cannot_be_read(limit, match):
    model, batch = small("mlp")
    refuse(hybridremat.LimitError, match, model, batch, memory_limit=limit)


def test_no_limit_at_all():
    model, batch = small("mlp")
    text = "neither memory_limit nor max_overhead is given"
    refuse(hybridremat.LimitError, text, model, batch, memory_limit=None)


def test_no_trainable_parameters():
    model, batch = small("mlp")
    model.requires_grad_(False)
    refuse(hybridremat.ModelError, "Mlp has no trainable parameters", model, batch)


def test_no_module():
    with pytest.raises(hybridremat.ModelError, match=r"expected a torch.nn.Module, got function"):
        hybridremat.wrap(lambda x: x, memory_limit="50%")
    with pytest.raises(hybridremat.ModelError, match=r"expected a torch.nn.Module, got function"):
        hybridremat.frontier(lambda x: x)


def test_a_missing_argument():
    model, batch = small("convnet")
    refuse(hybridremat.InputError, "do not fit ConvNet.forward: missing a required argument: 'labels'", model,
           {"x": batch["x"]})  # fmt: skip


def test_keywords_that_are_a_tensor():
    model, batch = small("mlp")
    with pytest.raises(hybridremat.InputError, match="kwargs= is a Tensor, not a mapping"):
        hybridremat.plan(model, kwargs=batch["x"], memory_limit="80%", **HOW)


def test_parameters_without_a_shape():
    model = nn.Sequential(nn.LazyLinear(4))
    for call in (hybridremat.wrap, hybridremat.plan, hybridremat.frontier, hybridremat.fit):
        limit = {} if call in (hybridremat.frontier, hybridremat.fit) else {"memory_limit": "80%"}
        with pytest.raises(hybridremat.ModelError, match="parameters without a shape yet"):
            call(model, (torch.randn(2, 3),), **limit, **HOW)


def test_an_argument_that_was_forgotten_is_no_graph_break():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x, labels=None):
            return nn.functional.cross_entropy(self.head(x), labels)

    refuse(hybridremat.InputError, "must be Tensor, not NoneType", Classifier(), {"x": torch.randn(2, 4)})


def test_a_dtype_that_no_kernel_takes_points_to_the_inputs():
    model, batch = small("mlp")
    batch = {"x": batch["x"].double()}
    refuse(UntriedKernelError, "Where a plain step fails alike, its inputs do not fit", model, batch)


def test_a_wrong_shape():
    model, _ = small("mlp")
    says = "Mlp fails on these inputs: RuntimeError .*support.training.*: [^()]*31[^()]*. Check their shapes"
    refuse(hybridremat.InputError, says, model, {"x": torch.randn(4, 31)})


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"cache": "x"}, LimitError, "cache='x' is not known; use True or False"),
        ({"hold_outputs": None}, LimitError, "hold_outputs=None is not known; use True or False"),
        ({"plan": 3}, TypeError, "plan=3 is neither a Plan nor the path of a file"),
    ],
    ids=str,
)
def test_values_of_a_wrong_type(how, error, says):
    model, batch = small("mlp")
    limit = {} if "plan" in how else {"memory_limit": "80%"}
    with pytest.raises(error, match=says):
        hybridremat.wrap(model, kwargs=batch, **limit, **how)


class OneOp(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.linear, self.op = nn.Linear(4, 4), op

    def forward(self, x):
        return self.op(self.linear(x)).sum()


@pytest.mark.parametrize(
    "op", [lambda x: torch.bmm(x, x), lambda x: torch.cat([x, x.T]), lambda x: x + x[:, :3], lambda x: x @ x]
)
def test_a_wrong_shape_is_said_once(op, caplog, capfd):
    """torch logs it too, with a traceback through its own code."""
    refuse(hybridremat.InputError, "OneOp fails on these inputs", OneOp(op), {"x": torch.randn(2, 4)})
    assert "failed while" not in caplog.text + capfd.readouterr().err


def test_a_graph_break():
    refuse(hybridremat.CaptureError, "the graph of Broken breaks", Broken(), {"x": torch.ones(2, 8)},
           graph_breaks="error")  # fmt: skip


def test_a_graph_break_below_many_calls_is_named_with_its_line():
    model = Broken()
    for _ in range(5):
        model = nn.Sequential(model)
    where = r"refusals\.py:\d+ \(if x\.sum\(\)"
    refuse(hybridremat.CaptureError, where, model, args=(torch.ones(2, 8),), graph_breaks="error")


def test_an_output_without_gradient():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x).detach().sum()

    refuse(hybridremat.CaptureError, "no backward graph was captured for Detached", Detached(),
           {"x": torch.ones(2, 8)})  # fmt: skip


def test_wrapped_twice():
    model, batch = small("mlp")
    wrap(model, batch)
    call = model._compiled_call_impl
    with pytest.raises(hybridremat.ModelError, match="already wrapped"):
        wrap(model, batch)
    assert model._compiled_call_impl is call


def test_unwrap_and_get_plan_of_a_plain_model():
    for call in (hybridremat.unwrap, hybridremat.get_plan):
        with pytest.raises(hybridremat.ModelError, match="this Mlp is not wrapped by hybridremat"):
            call(Mlp())


def test_unknown_cost_model():
    model, batch = small("mlp")
    text = "cost_model='best' is not known; use one of 'profile'"
    refuse(CostModelError, text, model, batch, cost_model="best")


def test_unknown_grad_outputs():
    model, batch = small("mlp")
    refuse(hybridremat.LimitError, "grad_outputs='some' is not known", model, batch, grad_outputs="some")


def test_an_error_in_the_planner_leaves_the_model():
    model, batch = small("mlp")
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_, **__):
            raise ArithmeticError("solver out of order")

        patch.setattr("hybridremat.planning.planner.plan_graph", fail)
        refuse(hybridremat.CaptureError, "solver out of order", model, batch)
    wrap(model, batch)


@pytest.mark.slow
def test_a_second_shape_that_does_not_fit_raises_and_the_first_goes_on():
    model, batch = small("mlp")
    limit = least_limit(model, batch)
    plain = train_plain(model, batch)
    wrap(model, batch, limit)
    with pytest.raises(hybridremat.InfeasibleLimitError, match="no plan fits memory_limit"):
        model(x=torch.randn(640, 32))
    assert plain.differences(train(model, batch)) == []


# Outputs


@pytest.mark.parametrize(
    ("function", "keyword", "hint"),
    [
        (hybridremat.wrap, "memory_limt", "Did you mean 'memory_limit'"),
        (hybridremat.wrap, "device_spec", "unexpected keyword"),
        (hybridremat.wrap, "reckoning", "unexpected keyword"),
        (hybridremat.plan, "max_plan", "Did you mean 'max_plans'"),
        (hybridremat.frontier, "memory_limit", "unexpected keyword"),
    ],
)
def test_an_unknown_keyword_is_refused_by_its_function(function, keyword, hint):
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got .*'{keyword}'") as told:
        function(Mlp(), (torch.randn(2, 8),), **{keyword: "50%"})
    assert hint in str(told.value)
