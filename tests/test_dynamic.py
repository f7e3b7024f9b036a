"""``dynamic=``: one capture for all sizes; at each the numbers of the plain model, and the planned peak."""

from __future__ import annotations

import copy
import logging
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridremat
from hybridremat.errors import CaptureError, InfeasibleLimitError, LimitError
from hybridremat.zoo.models import reference_model
from support.examples import examples
from support.language_heads import Head
from support.language_heads import tokens as language
from support.sized_steps import (
    HOW,
    Embedded,
    captured,
    images,
    portfolios,
    require_exact,
    rows,
    seeded,
    tokens,
)
from support.training import ConvNet, Mlp, Running, Transformer, loss_in, train

NETS = {
    "attention": (lambda: Transformer(1, 16), tokens, [(2, 24), (3, 17), (2, 40)], "80%"),
    "convolutions": (ConvNet, images, [(4,), (7,), (3,)], "90%"),
    "buffers": (Running, lambda batch: rows(batch, 16), [(32,), (9,), (200,)], "100%"),
}


def asked_or_not():
    """The dearest capture is that of attention, which test_any_batch_and_length has too."""
    for name in NETS:
        yield pytest.param(name, None, marks=pytest.mark.slow if name == "attention" else ())
        yield pytest.param(name, True, marks=() if name == "buffers" else pytest.mark.slow)


@pytest.mark.everyday
@pytest.mark.parametrize(("name", "dynamic"), asked_or_not())
def test_one_capture_trains_as_the_plain_model_at_every_size(name, dynamic):
    make, draw, sizes, share = NETS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    largest = draw(*max(sizes, key=prod))
    limit = hybridremat.plan(make(), kwargs=largest, memory_limit=share, **HOW).memory_limit
    hybridremat.wrap(model, kwargs=draw(*sizes[0]), memory_limit=limit, dynamic=dynamic, **HOW)
    for each in sizes:
        plan = require_exact(model, plain, draw(*each), steps=2)
        assert tuple(plan.origin.inputs[0].shape) == tuple(draw(*each)[plan.origin.inputs[0].name].shape)
    assert captured(model)[0] == 1


def test_without_a_word_the_second_shape_is_captured_for_all_sizes():
    model = hybridremat.wrap(Mlp(32, 1), kwargs=rows(8), memory_limit="100%", **HOW)
    for count in (9, 10, 8):
        model(**rows(count)).backward()
    assert captured(model)[0] == 1
    assert len(model._compiled_call_impl._steps) == 1


def test_every_shape_is_captured_by_itself_where_that_is_asked_for():
    model = hybridremat.wrap(Mlp(32, 1), kwargs=rows(8), memory_limit="100%", dynamic=False, **HOW)
    model(**rows(9)).backward()
    assert model._compiled_call_impl.sizes is None and len(model._compiled_call_impl._steps) == 2


def test_the_first_shape_is_captured_as_it_is_unless_all_are_asked_for():
    first = hybridremat.wrap(Mlp(32, 1), kwargs=rows(8), memory_limit="100%", dynamic=None, **HOW)
    assert captured(first) == (0, 0) and len(first._compiled_call_impl._steps) == 1
    every = hybridremat.wrap(Mlp(32, 1), kwargs=rows(8), memory_limit="100%", dynamic=True, **HOW)
    assert captured(every)[0] == 1 and not every._compiled_call_impl._steps


@pytest.fixture(scope="module")
def transformer():
    """A plain and a wrapped model, with dropout, whose limit holds up to batches of 4 and lengths of 40."""
    torch.manual_seed(0)
    model = Transformer(1, 16)
    plain = copy.deepcopy(model)
    limit = hybridremat.plan(model, kwargs=tokens(4, 40), memory_limit="75%", **HOW).memory_limit
    hybridremat.wrap(model, kwargs=tokens(2, 24), memory_limit=limit, dynamic=None, max_plans=2, **HOW)
    hybridremat.prepare(model, kwargs=tokens(4, 33))
    return plain, model


@examples(20)
@given(st.integers(2, 4), st.integers(2, 40))
def test_any_batch_and_length(transformer, batch, length):
    plain, model = transformer
    drawn = tokens(batch, length)
    require_exact(model, plain, drawn)
    assert captured(model)[0] == 1


def gradients(model, losses):
    """What some steps leave in the parameters, and the generator afterwards."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    losses(model)
    return [*(each.grad for each in model.parameters()), torch.get_rng_state()]


def in_flight(model):
    made = [loss_in(model(**tokens(2, length))) for length in (30, 11, 24)]
    for which in (1, 0, 2):
        made[which].backward()


def twice(model):
    one, other = (loss_in(model(**tokens(3, length))) for length in (13, 21))
    one.backward(retain_graph=True)
    other.backward()
    one.backward()


def between(model):
    loss_in(model(**tokens(2, 17))).backward()
    model.eval()
    with torch.no_grad():
        model(**tokens(2, 29))
    model.train()
    loss_in(model(**tokens(3, 29))).backward()


@pytest.mark.filterwarnings("ignore::hybridremat.errors.OutstandingForwardWarning")
@pytest.mark.parametrize("losses", [in_flight, twice, between])
def test_forwards_of_several_lengths_add_their_gradients(transformer, losses):
    plain, model = transformer
    assert all(map(torch.equal, gradients(model, losses), gradients(plain, losses)))
    assert captured(model)[0] == 1


def test_a_limit_that_a_size_breaks_is_refused_before_anything_runs(monkeypatch):
    torch.manual_seed(0)
    model = Mlp(32, 3)
    plain = copy.deepcopy(model)
    limit = hybridremat.plan(model, kwargs=rows(64), memory_limit="80%", **HOW).memory_limit
    hybridremat.wrap(model, kwargs=rows(64), memory_limit=limit, dynamic=None, **HOW)
    with pytest.raises(InfeasibleLimitError):  # the sample of the capture
        model(**rows(640))
    assert model.layers[0].weight.grad is None and captured(model) == (1, 0)
    monkeypatch.setattr("hybridremat.planning.sized_capture.capture", None)
    for batch in (48, 20):
        require_exact(model, plain, rows(batch))
    with pytest.raises(InfeasibleLimitError, match="no plan fits"):
        model(**rows(800))
    monkeypatch.setattr("hybridremat.planning.sized_capture.SizedCapture.plan", None)
    with pytest.raises(InfeasibleLimitError):  # at once
        model(**rows(800))
    assert captured(model)[0] == 1


def test_a_share_is_of_the_largest_size_so_far():
    sizes = (64, 4, 96, 20)
    plain = {n: hybridremat.plan(Mlp(), kwargs=rows(n), memory_limit="100%", **HOW).plain_peak for n in sizes}
    model = hybridremat.wrap(Mlp(), kwargs=rows(64), memory_limit="100%", dynamic=None, **HOW)
    limits = [hybridremat.prepare(model, kwargs=rows(size)).memory_limit for size in sizes]
    assert limits == [plain[64], plain[64], plain[96], plain[96]]


class Branches(torch.nn.Module):
    """Another graph for long inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        y = self.first(x)
        return (self.second(y.sin()) if len(x) <= 10 else self.second(y.cos()).tanh()).pow(2).sum()


def test_sizes_outside_of_a_capture_are_captured_once_more_for_each_side(caplog):
    torch.manual_seed(0)
    model = Branches()
    plain, captures = copy.deepcopy(model), []
    limit = hybridremat.plan(model, kwargs=rows(40), memory_limit="100%", **HOW).memory_limit
    hybridremat.wrap(model, kwargs=rows(6), memory_limit=limit, dynamic=None, **HOW)
    with caplog.at_level(logging.INFO, logger="hybridremat"):
        for batch in (6, 3, 9, 12, 40, 10, 1):
            require_exact(model, plain, rows(batch))
            captures.append(captured(model)[0])
    assert captures == [0, 1, 1, 2, 2, 2, 2]  # of 1 row PyTorch makes a number: a capture of its own
    assert caplog.text.count("is captured once more") == 1
    assert len(model._compiled_call_impl._steps) == 2


class Unroll(torch.nn.Module):
    """As many calls as there are rows: no graph is right for two sizes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, x):
        y = self.layer(x)
        for row in range(len(x)):
            y = y + row
        return y.pow(2).mean()


def test_a_model_without_symbols_is_planned_by_shape_or_refused(caplog):
    torch.manual_seed(0)
    model = Unroll()
    plain = copy.deepcopy(model)
    with pytest.raises(CaptureError, match="dynamic=False"):
        hybridremat.wrap(Unroll(), kwargs=rows(4), memory_limit="100%", dynamic=True, **HOW)
    hybridremat.wrap(model, kwargs=rows(4), memory_limit="110%", dynamic=None, **HOW)
    with caplog.at_level(logging.WARNING, logger="hybridremat"):
        for batch in (3, 2):
            require_exact(model, plain, rows(batch))
    assert captured(model) == (0, 0) and len(model._compiled_call_impl._steps) == 3
    assert caplog.text.count("for each input shape by itself") == 1


class Strict(Mlp):
    def forward(self, x):
        if len(x) > 16:
            raise ValueError("more than 16 rows")
        return super().forward(x)


@pytest.mark.parametrize("dynamic", [None, True])
def test_inputs_that_the_model_refuses_cost_nothing(dynamic):
    model = hybridremat.wrap(Strict(32, 1), kwargs=rows(8), memory_limit="100%", dynamic=dynamic, **HOW)
    with pytest.raises(ValueError, match="more than 16 rows"):
        model(**rows(17))
    for batch in (9, 5):
        model(**rows(batch)).backward()
    assert captured(model)[0] == 1


def test_inputs_with_gaps_are_planned_by_shape_and_others_beside_them_are_not(caplog):
    torch.manual_seed(0)
    model = Mlp(32, 1)
    plain = copy.deepcopy(model)

    def slices(batch):
        return {"x": rows(batch, 40)["x"][:, :32]}

    limit = hybridremat.plan(model, kwargs=rows(20), memory_limit="100%", **HOW).memory_limit
    hybridremat.wrap(model, kwargs=rows(20), memory_limit=limit, dynamic=None, **HOW)
    with caplog.at_level(logging.WARNING, logger="hybridremat"):
        for batch in (rows(9), slices(12), slices(7), slices(5), rows(4)):
            mine, theirs = (train(each, batch, steps=1, measure=False) for each in (model, plain))
            assert theirs.differences(mine) == []
    families = model._compiled_call_impl.sizes._families.values()
    assert [each.backend.graphs for family in families for each in family.captures] == [1]
    assert caplog.text.count("contiguous()") == 1
    with pytest.raises(CaptureError, match="contiguous"):
        hybridremat.wrap(Mlp(32, 1), kwargs=slices(8), memory_limit="100%", dynamic=True, **HOW)


def test_an_input_whose_first_row_is_cut_short_is_planned_by_itself():
    """Its idle stride would be a symbol of its own."""
    torch.manual_seed(0)
    model = Embedded()
    plain = copy.deepcopy(model)

    def cut(length):
        return {"tokens": tokens(1, 40)["tokens"][:1, :length]}

    hybridremat.wrap(model, kwargs=tokens(3, 40), memory_limit="100%", dynamic=None, **HOW)
    for batch in (tokens(2, 31), cut(17), tokens(3, 12), cut(23)):
        require_exact(model, plain, batch)
    assert captured(model)[0] == 1


@pytest.mark.parametrize("dynamic", [None, False])
def test_a_tensor_that_is_passed_twice_is_captured_so(dynamic):
    """Tokens that are their own labels: Dynamo captures again, in the step, where they are two tensors."""
    model = hybridremat.wrap(Head(), kwargs=language(4, 37), memory_limit="100%", dynamic=dynamic, **HOW)
    for batch in (language(3, 50), {name: each.clone() for name, each in language(3, 50).items()}):
        plan = hybridremat.prepare(model, kwargs=batch)
        known = model._compiled_call_impl.captures
        assert train(model, batch, steps=1).peaks == [plan.predicted_peak]
        assert model._compiled_call_impl.captures == known


def test_optimizers_that_step_in_the_backward_do_so_at_every_size():
    torch.manual_seed(0)
    model = Mlp(32, 3)
    plain = copy.deepcopy(model)
    hybridremat.optimizer_in_backward(model, lambda each: torch.optim.SGD(each, lr=0.1))
    hybridremat.wrap(
        model, kwargs=rows(64), memory_limit="100%", gradients="in_backward", dynamic=None, **HOW
    )
    plans = [hybridremat.prepare(model, kwargs=rows(batch)) for batch in (48, 20)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in (64, 20, 48, 20):
        loss_in(plain(**rows(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_in(model(**rows(batch))).backward()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is None and torch.equal(mine, its)
    assert captured(model)[0] == 1 and all(plan.needed <= plan.memory_limit for plan in plans)


OTHER_LOSSES = [pytest.param(how, marks=pytest.mark.slow) for how in ((), ("padded", "tied"))]


@pytest.mark.parametrize("how", [("shifted", "bias"), *OTHER_LOSSES])
def test_losses_are_made_by_chunks_of_the_rows_of_each_size(how):
    asked = {**HOW, "rewrites": "chunked", "memory_limit": "100%"}
    model = hybridremat.wrap(Head(*how), kwargs=language(4, 37), dynamic=True, **asked)
    for sizes in ((3, 50), (2, 21), (5, 50), (3, 50)):
        batch = language(*sizes)
        plan = hybridremat.prepare(model, kwargs=batch)
        alone = hybridremat.wrap(Head(*how), kwargs=batch, dynamic=False, **asked)
        model.load_state_dict(alone.state_dict())
        mine, its = train(model, batch, steps=1), train(alone, batch, steps=1)
        assert max(mine.peaks) == plan.predicted_peak <= plan.memory_limit
        assert its.differences(mine) == []
    assert captured(model)[0] == 1


def test_a_plan_of_the_caller_is_that_of_the_first_sizes():
    plan = hybridremat.plan(Mlp(32, 3), kwargs=rows(64), memory_limit="80%", **HOW)
    model = hybridremat.wrap(Mlp(32, 3), kwargs=rows(64), plan=plan, dynamic=True, **HOW)
    assert hybridremat.get_plan(model).schedule == plan.schedule
    assert hybridremat.prepare(model, kwargs=rows(20)).memory_limit >= plan.memory_limit


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dynamic": "yes"}, "dynamic='yes'"),
        ({"dynamic": 1, "units": "layers.*"}, "dynamic=1 is not known"),
        ({"dynamic": True, "compiler": "inductor"}, "inductor"),
        ({"dynamic": True, "graph_breaks": "plan"}, "graph_breaks"),
        ({"dynamic": True, "units": "layers.*"}, "units"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_is_named(given, says):
    with pytest.raises(LimitError, match=says):
        hybridremat.wrap(Mlp(), kwargs=rows(8), memory_limit="100%", **given)


@pytest.mark.parametrize(
    "given",
    [
        {"max_overhead": 0.2},
        {"memory_limit": "80%", "policy": {"layers.0": "must_recompute"}},
        {"memory_limit": "80%", "forwards": 2},
        {"memory_limit": "90%", "gradients": "in_backward"},
        {"memory_limit": "95%", "strategy": "sqrt"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::hybridremat.errors.KeptGradientWarning")
def test_other_settings_are_kept_at_every_size(given):
    torch.manual_seed(0)
    model = Mlp(32, 3)
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=rows(64), dynamic=None, **given, **HOW)
    for batch in (48, 20):
        plan = hybridremat.prepare(model, kwargs=rows(batch))
        mine, theirs = (train(each, rows(batch), steps=1, measure=False) for each in (model, plain))
        assert theirs.differences(mine) == []
        assert plan.memory_limit is None or plan.needed <= plan.memory_limit
        assert plan.overhead <= given.get("max_overhead", 1.0)
        assert [pin.action for pin in plan.pins] == [*given.get("policy", {}).values()]
    assert captured(model)[0] == 1


def test_figures_of_dropped_plans_are_kept(transformer):
    _, model = transformer
    figures = {}
    for length in (5, 6, 7, 8):
        figures[length] = hybridremat.prepare(model, kwargs=tokens(2, length)).predicted_peak
    assert len(model._compiled_call_impl.context.store) == 2
    for length, peak in figures.items():
        loss_in(model(**tokens(2, length))).backward()
        assert hybridremat.get_plan(model).predicted_peak == peak
    assert captured(model)[0] == 1


def test_the_first_shape_has_its_plan_when_those_of_other_sizes_have_taken_its_place():
    torch.manual_seed(0)
    model = hybridremat.wrap(Mlp(32, 3), kwargs=rows(64), memory_limit="80%", max_plans=1, **HOW)
    first = hybridremat.get_plan(model)
    for batch in (20, 30, 64):
        loss_in(model(**rows(batch))).backward()
    plan = hybridremat.get_plan(model)
    assert captured(model)[0] == 1 and plan.origin == first.origin
    assert (plan.predicted_peak, plan.overhead) == (first.predicted_peak, first.overhead)


def test_a_plan_of_known_schedules_is_written_and_read(transformer, tmp_path):
    _, model = transformer
    plan = hybridremat.prepare(model, kwargs=tokens(3, 38))
    assert plan.reused_options and plan.predicted_peak <= plan.memory_limit
    plan.save(tmp_path / "plan.json")
    read = hybridremat.Plan.load(tmp_path / "plan.json")
    assert read.predicted_peak == plan.predicted_peak and read.schedule == plan.schedule
    assert "38" in str(read.origin.inputs[0]) and str(read)


def drawn_for(name, batch, size):
    """Inputs of a built-in model for a batch and a length (of images: sides)."""
    generator = seeded(batch * size)

    def ids(*shape):
        return torch.randint(0, 100, shape, generator=generator)

    images = torch.randn(batch, 3, size, size, generator=generator)
    if name == "unet":
        return {"x": images, "labels": torch.zeros(batch, size, size, dtype=torch.int64)}
    if name in ("vit", "resnet50"):
        return {"pixel_values": images, "labels": torch.randint(0, 10, (batch,), generator=generator)}
    return {"input_ids": ids(batch, size), "labels": ids(batch, size)}


TEXTS = [(2, 96), (3, 41), (5, 128), (4, 19), (2, 104), (5, 77)]
SHORT = [(2, 64), (3, 50), (4, 77), (2, 70), (4, 33)]
MODELS = {
    "gpt2": ({"n_layer": 2}, 0.1, TEXTS, "70%", 1),
    "llama": ({"num_hidden_layers": 2}, 0.0, TEXTS, "70%", 1),
    "bert": ({"num_hidden_layers": 2}, 0.1, TEXTS, "70%", 1),
    "t5": ({"num_layers": 1, "num_decoder_layers": 1}, 0.1, SHORT, "80%", 1),
    "vit": ({"num_hidden_layers": 2, "pixels": 64}, 0.0, [(n, 64) for n in (17, 8, 11, 16, 9)], "70%", 1),
    "resnet50": ({"pixels": 32}, 0.0, [(n, 32) for n in (15, 8, 6, 7, 12, 16, 17)], "92%", 2),
    "unet": ({"pixels": 32, "depth": 2, "base": 16}, 0.0, [(6, 32), (3, 32), (7, 32)], "80%", 1),
}
TRACED = {"unet"}  # at each size: gradients of slices come in another layout than PyTorch traces


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS])
def test_built_in_models_train_as_plain_ones_at_every_size(name):
    changes, dropout, sizes, share, captures = MODELS[name]
    model, _ = reference_model(name, dropout, changes)
    if name == "resnet50":  # what its forward would set in the first call
        model.config.problem_type = "single_label_classification"
    plain = copy.deepcopy(model)
    largest = drawn_for(name, *max(sizes, key=prod))
    limit = hybridremat.plan(copy.deepcopy(model), kwargs=largest, memory_limit=share, **HOW).memory_limit
    hybridremat.wrap(model, kwargs=drawn_for(name, *sizes[0]), memory_limit=limit, dynamic=None, **HOW)
    for each in sizes:
        require_exact(model, plain, drawn_for(name, *each), steps=3)
    assert captured(model)[0] == captures
    found = portfolios(model)[0]
    assert bool(found._trust.lost) == (name in TRACED)
    assert (found.traces < len(found.numbers)) == (name not in TRACED)


def test_times_are_measured_at_the_first_sizes_alone(monkeypatch):
    torch.manual_seed(0)
    model, how = Mlp(32, 3), HOW | {"cost_model": "profile"}
    plain = copy.deepcopy(model)
    first = hybridremat.wrap(model, kwargs=rows(256), memory_limit="85%", dynamic=True, **how)
    times = [op.time for op in hybridremat.get_plan(first).details.graph.ops]
    monkeypatch.setattr("hybridremat.planning.step_costs.with_times", None)
    plan = require_exact(model, plain, rows(128))
    halved = zip(times, (op.time for op in plan.details.graph.ops), strict=True)
    assert all(other <= time for time, other in halved) and plan.overhead >= 0
    assert 0.3 * sum(times) < sum(op.time for op in plan.details.graph.ops) < sum(times)
