"""wrap, unwrap, plan, measure on small models, held against plain PyTorch."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn
from training import SMALL, Mlp, allocated_peak, loss_in, small, train, train_plain

import hybridremat
from hybridremat.errors import HeldOutputWarning
from hybridremat.graph.costs import CostModelError

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


def wrap(model, batch=None, limit="80%", **how):
    return hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **HOW, **how)


def least_limit(model, batch, **how):
    with pytest.raises(hybridremat.InfeasibleLimitError) as caught:
        wrap(model, batch, 1, **how)
    return caught.value.least


def three_limits(model, batch, **how):
    """80 % of the plain step, half-way to the least feasible limit, and that limit."""
    plain = hybridremat.plan(model, kwargs=batch, memory_limit="80%", **HOW, **how).plain_peak
    least = least_limit(model, batch, **how)
    easy = max(least, plain * 8 // 10)
    return [easy, (easy + least) // 2, least]


def state_of(model):
    """Everything that a failed or finished call must leave alone."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (id(t), t.detach().clone()) for name, t in tensors.items()},
        {name: p.grad for name, p in model.named_parameters()},
        [m.training for m in model.modules()],
        {k: v for k, v in vars(model).items() if k not in ("_parameters", "_buffers", "_modules")},
        torch.get_rng_state(),
    )


def assert_untouched(before, model):
    after = state_of(model)
    assert before[0].keys() == after[0].keys()
    pairs = zip(before[0].values(), after[0].values(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    assert all(before[1][name] is gradient for name, gradient in after[1].items())
    assert before[2] == after[2]
    assert before[3].keys() == after[3].keys() and before[3].get("_compiled_call_impl") is None
    assert after[3].get("_compiled_call_impl") is None
    assert torch.equal(before[4], after[4])


@pytest.mark.parametrize("name", SMALL)
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
    model, batch = small("transformer")
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
    from hybridremat import session
    from hybridremat.planner import OptionCache

    with pytest.MonkeyPatch.context() as patch:
        plans = []
        for _ in range(2):
            patch.setattr(session, "OPTIONS", OptionCache())
            plans.append(hybridremat.plan(model, kwargs=batch, memory_limit="90%", **HOW))
    assert plans[0] == plans[1] and plans[0].schedule == plans[1].schedule
    assert plans[0].blocks == plans[1].blocks


def test_max_overhead_gives_the_least_memory_within_it():
    model, batch = small("transformer")
    plan = hybridremat.plan(model, kwargs=batch, max_overhead=0.1, **HOW)
    curve = hybridremat.frontier(model, kwargs=batch, **HOW)
    assert 0 <= plan.overhead <= 0.1
    assert plan.predicted_peak == min(p.peak for p in curve.points if p.overhead <= 0.1)


# Errors: the text, and the model as it was


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


def test_a_missing_argument():
    model, batch = small("convnet")
    refuse(hybridremat.InputError, "do not fit ConvNet.forward: missing a required argument: 'labels'", model,
           {"x": batch["x"]})  # fmt: skip


def test_a_wrong_shape():
    model, _ = small("mlp")
    refuse(hybridremat.InputError, "Mlp fails on these inputs", model, {"x": torch.randn(4, 31)})


def test_a_graph_break():
    refuse(hybridremat.CaptureError, "the graph of Broken breaks", Broken(), {"x": torch.ones(2, 8)})


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
    with pytest.raises(hybridremat.ModelError, match="already wrapped or compiled"):
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

        patch.setattr("hybridremat.session.plan_graph", fail)
        refuse(hybridremat.CaptureError, "solver out of order", model, batch)
    wrap(model, batch)


def test_a_second_shape_that_does_not_fit_raises_and_the_first_goes_on():
    model, batch = small("mlp")
    limit = least_limit(model, batch)
    plain = train_plain(model, batch)
    wrap(model, batch, limit)
    with pytest.raises(hybridremat.InfeasibleLimitError, match="no plan fits memory_limit"):
        model(x=torch.randn(640, 32))
    assert plain.differences(train(model, batch)) == []


# Outputs


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


@pytest.mark.parametrize("share", [None, "150%"])
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
