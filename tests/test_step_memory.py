"""What of a step is counted: outputs that are held, a loss outside, copies; and nothing once it is over."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.errors import HeldOutputWarning
from support.training import Mlp, allocated_peak, loss_in, small, train, train_plain
from support.wrapping import least_limit, wrap


def test_a_gradient_into_a_detached_output_is_refused_and_all_allows_it():
    model, batch = small("convnet")
    plain = copy.deepcopy(model)
    planned = copy.deepcopy(model)

    def both(output):
        return output[0] + output[1].pow(2).sum()

    wrap(model, batch)
    text = r'output 1 .* shape \(4, 5\).*grad_outputs="all"'
    with pytest.raises(hybridremat.PlanMismatchError, match=text):
        both(model(**batch)).backward()
    wrap(planned, batch, grad_outputs="all")
    expected, got = train(plain, batch, loss_in=both), train(planned, batch, loss_in=both)
    assert expected.differences(got) == []


def held_step(model, batch):
    output = model(**batch)
    loss_in(output).backward()
    return output


def test_held_outputs_warn_once_and_are_counted_on_request():
    model, batch = small("transformer")
    counted = copy.deepcopy(model)
    wrap(model, batch, "100%")
    with pytest.warns(HeldOutputWarning, match="9.38 KiB of model outputs .* hold_outputs=True"):
        held_step(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held_step(model, batch)
        limit = least_limit(counted, batch, hold_outputs=True)
        wrap(counted, batch, limit, hold_outputs=True)
        for _ in range(2):
            counted.zero_grad()
            predicted = hybridremat.get_plan(counted).predicted_peak
            assert allocated_peak(lambda: held_step(counted, batch)) == predicted


def test_dropped_outputs_do_not_warn():
    model, batch = small("transformer")
    wrap(model, batch, "100%")
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeldOutputWarning)
        loss_in(model(**batch)).backward()


class Masking(Mlp):
    """Returns beside the loss what its backward reads, and what nothing reads, if it is asked for that."""

    def __init__(self, *, scores):
        super().__init__()
        self.scores = scores

    def forward(self, x):
        mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        return super().forward(x * mask), mask, *([x.sum(1)] if self.scores else [])


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("scores", [False, True])
def test_outputs_that_the_backward_holds_itself_do_not_warn(scores, breaks):
    torch.manual_seed(0)
    model, batch = Masking(scores=scores), small("mlp")[1]
    wrap(model, batch, "200%", **({"units": "layers.*"} if breaks else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeldOutputWarning)
        model(**batch)[0].backward()
        kept = model(**batch)[0]
        kept.backward(retain_graph=True)
        kept.backward()
    output = model(**batch)
    with pytest.warns(HeldOutputWarning, match="8.25 KiB" if scores else "8.00 KiB"):
        output[0].backward()


class Scores(nn.Module):
    """No loss inside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(5)))
        self.head = nn.Linear(64, 300)

    def forward(self, x):
        return self.head(self.layers(x))


def outside_loss(scores):
    return torch.logsumexp(scores, -1).pow(2).mean()


@pytest.mark.parametrize("share", [None, pytest.param("150%", marks=pytest.mark.slow)])
def test_a_loss_outside_with_reserve_stays_under_the_limit(share):
    torch.manual_seed(0)
    model, batch = Scores(), {"x": torch.randn(128, 64)}
    plain = train_plain(model, batch, loss_in=outside_loss)
    reserve = hybridremat.measure(model, kwargs=batch, loss_fn=outside_loss, repeats=1).outside
    assert reserve >= 128 * 300 * 4
    wrap(model, batch, share or least_limit(model, batch, reserve=reserve), reserve=reserve)
    plan = hybridremat.get_plan(model)
    assert plan.predicted_peak <= plan.needed <= plan.memory_limit
    trained = train(model, batch, loss_in=outside_loss)
    assert plain.differences(trained) == []
    assert max(trained.peaks) <= plan.memory_limit


# Gradients that autograd would copy


class Broadcast(nn.Module):
    """Gradients that are one value twice, a broadcast scalar, and a tangent itself."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(256, 256), nn.Linear(256, 256)
        self.summed = nn.Parameter(torch.randn(200, 200))
        self.added = nn.Parameter(torch.randn(4, 256))

    def forward(self, x):
        return self.left(x) + self.right(x) + self.added, self.summed.sum()


def test_copies_of_gradients_are_planned():
    torch.manual_seed(0)
    model, batch = Broadcast(), {"x": torch.randn(4, 256)}
    both = lambda output: output[0].pow(2).sum() + output[1]  # noqa: E731
    plain = train_plain(model, batch, loss_in=both)
    reserve = hybridremat.measure(model, kwargs=batch, loss_fn=both, repeats=1).outside
    how = {"grad_outputs": "all", "reserve": reserve}
    wrap(model, batch, least_limit(model, batch, **how), **how)
    plan = hybridremat.get_plan(model)
    trained = train(model, batch, loss_in=both)
    assert plain.differences(trained) == []
    sizes = 4 * (2 * (256 * 256 + 256) + 200 * 200 + 4 * 256)
    assert plan.predicted_peak >= sizes
    assert all(sizes <= peak <= plan.memory_limit for peak in trained.peaks), trained.peaks


# measure


def test_measure_leaves_everything_alone():
    model, batch = small("convnet")
    wrap(model, batch)
    loss_in(model(**batch)).backward()
    gradients = {n: (p.grad, p.grad.clone()) for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    state = torch.get_rng_state()
    model.eval()
    plan = hybridremat.get_plan(model)
    measured = hybridremat.measure(model, kwargs=batch, repeats=2)
    assert not any(m.training for m in model.modules())
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name][0] and torch.equal(parameter.grad, gradients[name][1])
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert measured.peak == measured.predicted == plan.predicted_peak
    assert measured.outside == 0 and measured.seconds > 0 and 0 < measured.saved <= measured.peak


def test_measure_needs_a_loss():
    with pytest.raises(hybridremat.InputError, match="no scalar loss in the model's output"):
        hybridremat.measure(Scores(), kwargs={"x": torch.randn(2, 64)}, repeats=1)


def test_nothing_of_a_step_survives_it():
    model, batch = small("convnet")
    wrap(model, batch)
    loss_in(model(**batch)).backward()
    model.zero_grad()
    gc.collect()
    before = {id(o) for o in gc.get_objects() if isinstance(o, torch.Tensor)}
    loss_in(model(**batch)).backward()
    model.zero_grad()
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and id(o) not in before]


def test_what_a_model_stores_on_itself_is_noticed():
    class Keeping(Mlp):
        def forward(self, x):
            self.last = self.layers[0](x).detach()
            return super().forward(x)

    torch.manual_seed(0)
    model, batch = Keeping(), small("mlp")[1]
    wrap(model, batch)
    with pytest.warns(HeldOutputWarning, match="stores on itself"):
        model(**batch).backward()


def test_outputs_that_are_inputs_are_not_taken_for_held_ones():
    class Passing(Mlp):
        def forward(self, x):
            return super().forward(x), x

    torch.manual_seed(0)
    model, batch = Passing(), small("mlp")[1]
    wrap(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeldOutputWarning)
        loss, given = model(**batch)
        loss.backward()
    assert given is not None


@pytest.mark.slow
def test_a_model_that_is_gone_leaves_no_graph_behind():
    def graphs_after_a_model():
        model, batch = small("mlp")
        wrap(model, batch)
        model(**batch).backward()
        del model
        for _ in range(3):  # a code object, what was compiled for it, and what that held go one after another
            gc.collect()
        return sum(isinstance(o, torch.fx.Graph) for o in gc.get_objects())

    graphs_after_a_model()
    first = graphs_after_a_model()
    assert [graphs_after_a_model() for _ in range(3)] == 3 * [first]


def test_warnings_are_told_at_the_callers_line():
    torch.manual_seed(0)
    model, batch = Masking(scores=True), small("mlp")[1]
    with pytest.warns(hybridremat.InfeasibleLimitWarning) as told:
        wrap(model, batch, 1000, on_infeasible="least")
    assert [each.filename for each in told] == [wrap.__code__.co_filename]
    output = model(**batch)
    with pytest.warns(HeldOutputWarning) as told:
        output[0].backward()
    assert [each.filename for each in told] == [__file__]
