"""wrap, unwrap and plan on small models, held against plain PyTorch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import hybridremat
from support.training import allocated_peak, loss_in, small, train, train_plain
from support.wrapping import HOW, assert_untouched, least_limit, state_of, three_limits, wrap


@pytest.mark.parametrize(
    "name", ["running", *(pytest.param(n, marks=pytest.mark.slow) for n in ("convnet", "mlp", "transformer"))]
)
def test_training_is_bit_equal_under_three_limits(name):
    model, batch = small(name)
    plain = train_plain(model, batch)
    for limit in three_limits(model, batch):
        planned = copy.deepcopy(model)
        wrap(planned, batch, limit)
        plan = hybridremat.get_plan(planned)
        trained = train(planned, batch)
        assert plain.differences(trained) == []
        assert max(trained.peaks) <= limit
        assert all(abs(peak - plan.predicted_peak) <= 0.001 * peak for peak in trained.peaks), trained.peaks


def test_tight_limits_recompute():
    model, batch = small("mlp")
    wrap(model, batch, least_limit(model, batch))
    plan = hybridremat.get_plan(model)
    assert len(plan.schedule.steps) > len(set(plan.schedule.steps))
    assert plan.predicted_peak == plan.least_peak < plan.plain_peak and plan.extra_flops > 0


def test_names_type_and_optimizer_stay():
    model, batch = small("convnet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kind, keys = type(model), list(model.state_dict())
    parameters = [(n, id(p)) for n, p in model.named_parameters()]
    modules = [n for n, _ in model.named_modules()]
    before = optimizer.state_dict()
    wrapped = wrap(model, batch)
    assert wrapped is model and type(model) is kind and isinstance(model, kind)
    assert list(model.state_dict()) == keys and [n for n, _ in model.named_modules()] == modules
    assert [(n, id(p)) for n, p in model.named_parameters()] == parameters
    assert optimizer.state_dict() == before
    loss_in(model(**batch)).backward()
    optimizer.step()
    assert list(model.state_dict()) == keys


def test_eval_and_no_grad_run_the_plain_model():
    model, batch = small("convnet")
    plain = copy.deepcopy(model)
    wrap(model, batch)
    calls = []
    call = model._compiled_call_impl
    step = call._step
    call._step = lambda *inputs: calls.append(1) or step(*inputs)
    for module in (model, plain):
        module.eval()
    assert torch.equal(model(**batch)[1], plain(**batch)[1])
    for module in (model, plain):
        module.train()
    with torch.no_grad():
        torch.manual_seed(3)
        mine = model(**batch)[1]
        torch.manual_seed(3)
        assert torch.equal(mine, plain(**batch)[1])
    assert not calls
    model(**batch)
    assert calls == [1]


def test_a_plain_model_that_reads_values_in_eval_mode_still_does():
    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            if not self.training:
                return float(self.layer(x).sum().item())
            return self.layer(x).sum()

    model = Curious()
    wrap(model, {"x": torch.ones(2, 8)}, "100%")
    assert isinstance(model.eval()(x=torch.ones(2, 8)), float)


def test_unwrap_restores():
    model, batch = small("mlp")
    before = state_of(model)
    wrap(model, batch)
    assert hybridremat.unwrap(model) is model
    assert_untouched(before, model)
    wrap(model, batch)  # and it can be wrapped again


def test_a_model_in_eval_mode_is_planned_for_training_and_keeps_its_flags():
    model, batch = small("convnet")
    trained = hybridremat.plan(model, kwargs=batch, memory_limit="80%", **HOW)
    model.eval()
    model.norms[1].train()
    flags = [m.training for m in model.modules()]
    wrap(model, batch)
    assert [m.training for m in model.modules()] == flags
    assert hybridremat.get_plan(model) == trained
    model.train()
    loss_in(model(**batch)).backward()
    assert hybridremat.get_plan(model) == trained


@pytest.mark.slow
def test_a_frozen_part_stays_frozen_in_plan_and_measurement():
    model, batch = small("convnet")
    model.norms[1].eval()
    for parameter in model.convs[0].parameters():
        parameter.requires_grad_(False)
    plain = train_plain(model, batch)
    wrap(model, batch)
    plan = hybridremat.get_plan(model)
    hybridremat.measure(model, kwargs=batch, repeats=1)
    assert hybridremat.get_plan(model) is plan
    assert plain.differences(train(model, batch)) == []
    assert not model.norms[1].training


def pickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_is_plain(copied):
    model, batch = small("mlp")
    wrap(model, batch)
    twin = copied(model)
    with pytest.raises(hybridremat.ModelError, match="is not wrapped"):
        hybridremat.get_plan(twin)
    assert hybridremat.get_plan(model)
    assert torch.equal(twin(**batch), model(**batch))


@pytest.mark.slow
def test_two_wrapped_models_do_not_disturb_each_other():
    (first, batch), second = small("convnet"), small("convnet")[0]
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(0.5)
    expected = [train_plain(m, batch) for m in (first, second)]
    wrap(first, batch, "80%")
    wrap(second, batch, least_limit(second, batch))
    assert hybridremat.get_plan(first).predicted_peak != hybridremat.get_plan(second).predicted_peak
    start = copy.deepcopy(second.state_dict())

    def disturb():
        with torch.random.fork_rng():
            loss_in(second(**batch)).backward()

    results = [train(first, batch, between=disturb)]
    second.load_state_dict(start)
    results.append(train(second, batch))
    assert [e.differences(r) for e, r in zip(expected, results, strict=True)] == [[], []]


def test_both_models_in_one_step():
    (first, batch), second = small("mlp"), small("mlp")[0]
    both = copy.deepcopy(nn.ModuleList([first, second]))
    loss = both[0](**batch) + both[1](**batch)
    loss.backward()
    wrap(first, batch)
    wrap(second, batch)
    planned = first(**batch) + second(**batch)
    planned.backward()
    assert torch.equal(loss, planned)
    pairs = zip(both.parameters(), [*first.parameters(), *second.parameters()], strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.slow
def test_a_second_shape_gets_its_own_plan():
    model, batch = small("mlp")
    other = {"x": torch.randn(96, 32)}
    plain = [train_plain(model, b) for b in (batch, other)]
    wrap(model, batch)
    first = hybridremat.get_plan(model)
    start = copy.deepcopy(model.state_dict())
    results = []
    for case in (batch, other):
        hybridremat.prepare(model, kwargs=case)
        model.load_state_dict(start)
        results.append(train(model, case))
    second = hybridremat.get_plan(model)
    assert second.fingerprint != first.fingerprint and second.memory_limit > first.memory_limit
    assert max(results[1].peaks) == second.predicted_peak <= second.memory_limit
    assert [p.differences(r) for p, r in zip(plain, results, strict=True)] == [[], []]


def test_gradients_accumulate_over_steps():
    model, batch = small("convnet")
    plain = copy.deepcopy(model)
    wrap(model, batch, least_limit(model, batch))
    for module in (plain, model):
        torch.manual_seed(5)
        for _ in range(2):
            loss_in(module(**batch)).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_plans_are_identical_twice():
    model, batch = small("running")
    from hybridremat.planning import planner
    from hybridremat.planning.option_cache import OptionCache

    with pytest.MonkeyPatch.context() as patch:
        plans = []
        for _ in range(2):
            patch.setattr(planner, "OPTIONS", OptionCache())
            plans.append(hybridremat.plan(model, kwargs=batch, memory_limit="90%", **HOW))
    assert plans[0] == plans[1] and plans[0].schedule == plans[1].schedule
    assert plans[0].blocks == plans[1].blocks


@pytest.mark.slow
@pytest.mark.exchanges
def test_max_overhead_gives_the_least_memory_within_it():
    model, batch = small("transformer")
    plan = hybridremat.plan(model, kwargs=batch, max_overhead=0.1, **HOW)
    curve = hybridremat.frontier(model, kwargs=batch, **HOW)
    assert 0 <= plan.overhead <= 0.1
    assert plan.predicted_peak <= min(p.peak for p in curve.points if p.overhead <= 0.1)


# Errors: the text, and the model as it was


class Frozen(nn.Module):
    """Without trained parameters: gradients flow to its input alone."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.layers = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm1d(16)
        self.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.layers(x)).square().mean()


def test_a_frozen_model_is_planned_for_the_gradients_of_its_inputs(caplog):
    torch.manual_seed(0)
    plain, x = Frozen(), torch.randn(64, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(plain(x), x)
    model = copy.deepcopy(plain)
    how = {"memory_limit": "60%", **HOW}
    hybridremat.wrap(model, (x,), **how)
    plan = hybridremat.get_plan(model)
    model(x).backward()
    assert torch.equal(x.grad, wanted)
    x.grad = None
    assert allocated_peak(lambda: model(x).backward()) <= plan.memory_limit
    model.eval()
    for _ in range(2):
        model(x).backward()
    assert caplog.text.count("in eval mode, where the plain model runs") == 1
    model.training = True
    model(x).backward()  # planned here: BatchNorm is in eval mode now
    x.grad = None
    assert allocated_peak(lambda: model(x).backward()) <= plan.memory_limit
    with pytest.raises(hybridremat.ModelError, match="no sample input requires a gradient"):
        hybridremat.wrap(Frozen(), (x.detach(),), **how)
