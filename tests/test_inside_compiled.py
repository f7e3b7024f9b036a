"""Wrapped models that compiled code calls: their plans run, whatever ``torch.compile`` is put around them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

import hybridremat
from support.training import Mlp, allocated_peak, small, train, train_plain
from support.wrapping import least_limit, wrap


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """Dynamo compiles a function eight times at most, and one of ``Around`` for each model in one."""
    torch._dynamo.reset()


class Around(nn.Module):
    """Calls a model, of which it is the outer module."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model(**batch)


class Calling(Around):
    """Calls a model in a compiled function, which finds it in a list."""

    def __init__(self, model, backend="aot_eager"):
        super().__init__(model)
        found = [model]

        @torch.compile(backend=backend)
        def call(batch):
            return found[0](**batch)

        self.call = call

    def forward(self, **batch):
        return self.call(batch)


WAYS = {
    "the model": lambda model: torch.compile(model, backend="aot_eager"),
    "a module": lambda model: torch.compile(Around(model), backend="aot_eager"),
    "a function": Calling,
}


def assert_runs_its_plan(called, model, batch, plain):
    plan = hybridremat.get_plan(model)
    trained = train(called, batch)
    assert set(trained.peaks) == {plan.predicted_peak}
    made, expected = list(trained.tensors.values()), list(plain.tensors.values())
    assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


@pytest.mark.parametrize("settings", [{}, {"units": "layers.*"}], ids=["whole", "units"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_code_around_a_wrapped_model_runs_its_plan(way, settings):
    model, batch = small("mlp")
    plain = train_plain(model, batch)
    wrap(model, batch, least_limit(model, batch, **settings), **settings)
    assert_runs_its_plan(WAYS[way](model), model, batch, plain)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_so_does_code_that_ran_before_the_model_was_wrapped(way, hooked):
    model, batch = small("mlp")
    limit, plain = least_limit(model, batch), train_plain(model, batch)
    if hooked:
        model.register_forward_pre_hook(lambda module, inputs: None)
    called = WAYS[way](model)
    called(**batch).backward()
    model.zero_grad()
    assert allocated_peak(lambda: called(**batch).backward()) > limit
    model.zero_grad()
    wrap(model, batch, limit)
    assert_runs_its_plan(called, model, batch, plain)


class Listing(Around):
    """Calls the models of a list one after another, which Dynamo guards as what a dictionary holds."""

    def __init__(self, model):
        super().__init__(None)
        self.models = nn.ModuleList([nn.Identity(), model])

    def forward(self, **batch):
        for model in self.models[1:]:
            output = model(**batch)
        return output


def test_code_that_found_the_model_in_a_list_runs_its_plan():
    model, batch = small("mlp")
    limit, plain = least_limit(model, batch), train_plain(model, batch)
    called = torch.compile(Listing(model), backend="aot_eager")
    for _ in range(2):
        called(**batch).backward()
        model.zero_grad()
    wrap(model, batch, limit)
    assert_runs_its_plan(called, model, batch, plain)


@pytest.mark.parametrize("held", [Around, Listing])
def test_code_that_another_of_its_class_went_through_runs_its_plan(held):
    model, batch = small("mlp")
    other, plain = copy.deepcopy(model), train_plain(model, batch)
    wrap(model, batch, least_limit(model, batch))
    torch.compile(held(other), backend="aot_eager")(**batch).backward()
    assert_runs_its_plan(torch.compile(held(model), backend="aot_eager"), model, batch, plain)


def test_a_model_whose_class_changes_runs_its_plan():
    model, batch = small("mlp")
    other, plain = copy.deepcopy(model), train_plain(model, batch)
    wrap(model, batch, least_limit(model, batch))
    other.__class__ = model.__class__ = type("Sharded", (Mlp,), {})
    torch.compile(Around(other), backend="aot_eager")(**batch).backward()
    assert_runs_its_plan(torch.compile(Around(model), backend="aot_eager"), model, batch, plain)


@pytest.mark.parametrize("before", [False, True])
def test_others_of_its_class_stay_in_the_graph(before):
    model, batch = small("mlp")
    other, counter = copy.deepcopy(model), CompileCounter()
    compiled = torch.compile(Around(other), backend=counter, fullgraph=True)
    if before:
        compiled(**batch)
    wrap(model, batch)
    for _ in range(2):
        assert torch.equal(compiled(**batch), other.forward(**batch))
    assert counter.frame_count == 1 + before  # what is known of a module is its class


def test_outside_of_training_the_plain_model_is_compiled():
    model, batch = small("mlp")
    wrap(model, batch)
    counter = CompileCounter()
    compiled = torch.compile(Around(model.eval()), backend=counter, fullgraph=True)
    assert torch.equal(compiled(**batch), model.forward(**batch))
    with torch.no_grad():
        assert torch.equal(compiled(**batch), model.forward(**batch))
    assert counter.frame_count == 2
    model.train()
    with pytest.raises(RuntimeError, match="wrapped by hybridremat"):
        compiled(**batch)
    hybridremat.unwrap(model)
    assert torch.equal(compiled(**batch), model.forward(**batch))
    assert counter.frame_count == 3


def test_a_wrapped_model_is_not_compiled_in_place():
    model, batch = small("mlp")
    wrap(model, batch)
    with pytest.raises(hybridremat.ModelError, match="either planned or compiled"):
        model.compile(backend="aot_eager")
    assert hybridremat.get_plan(model) is not None
    model.layers[0].compile(backend="aot_eager")  # a part: what is planned takes no notice
    hybridremat.unwrap(model).compile(backend="aot_eager")
    assert torch.equal(model(**batch), model.forward(**batch))


class CallingForward(Mlp):
    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


class CallingImpl(Mlp):
    def __call__(self, *args, **kwargs):
        return self._call_impl(*args, **kwargs)


class BeingForward(Mlp):
    __call__ = Mlp.forward


class CallingSuper(Mlp):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def test_a_class_whose_call_goes_around_the_usual_one_is_refused():
    batch = small("mlp")[1]
    for kind in (CallingForward, CallingImpl, BeingForward):
        with pytest.raises(hybridremat.ModelError, match="no plan would run"):
            wrap(kind(), batch)
    torch.manual_seed(0)
    model = CallingSuper()
    plain = train_plain(model, batch)
    wrap(model, batch, least_limit(model, batch))
    assert_runs_its_plan(model, model, batch, plain)


HINTS = {"hint_override": 8, "specialize_on": [lambda rows: rows == 4]}
MARKS = {
    "dynamic": lambda tensor: torch._dynamo.mark_dynamic(tensor, 0, **HINTS),
    "unbacked": lambda tensor: torch._dynamo.decorators.mark_unbacked(tensor, 0),
    "static": lambda tensor: torch._dynamo.mark_static(tensor, 0),
}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("mark", MARKS)
def test_marks_of_sizes_change_nothing(mark, dynamic):
    model, batch = small("mlp")
    wrap(model, batch, "100%", dynamic=dynamic)
    for rows in (64, 48, 32, 48):
        x = batch["x"][:rows].clone()
        MARKS[mark](x)
        marks = dict(vars(x))
        assert torch.equal(model(x=x), model.forward(batch["x"][:rows])) and vars(x) == marks


@pytest.mark.parametrize("settings", [{}, {"units": "layers.*"}], ids=["whole", "units"])
def test_what_compiled_code_of_dynamic_shapes_made_is_an_input_like_others(settings):
    model, batch = small("mlp")
    encode = torch.compile(torch.sin, backend="aot_eager", dynamic=True)
    plain = train(Around(copy.deepcopy(model)), {"x": encode(batch["x"])})
    marked = {"x": encode(batch["x"])}
    assert any("dynamic_indices" in name for name in vars(marked["x"]))
    torch._dynamo.mark_dynamic(marked["x"], 0)
    wrap(model, marked, least_limit(model, marked, **settings), **settings)
    assert_runs_its_plan(Around(model), model, marked, plain)
    shorter = encode(batch["x"][:32])
    assert torch.equal(model(x=shorter), model.forward(shorter))
    assert marked["x"]._dynamo_dynamic_indices == {0}
    assert any("dynamic_indices" in name for name in vars(shorter))


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "eager_then_compile", "eager"])
def test_plans_run_whatever_stance_compiled_code_takes(stance):
    how = {"force_backend": stance} if stance == "eager" else {"stance": stance}
    model, batch = small("mlp")
    shorter = {"x": batch["x"][:48].clone()}
    plain = train_plain(model, shorter)
    limit = least_limit(model, batch)
    with torch.compiler.set_stance(**how):
        wrap(model, batch, limit)
        hybridremat.prepare(model, kwargs=shorter)
        assert_runs_its_plan(model, model, shorter, plain)
    assert hybridremat.get_plan(model).predicted_peak < min(plain.peaks)


def test_a_compiler_that_is_switched_off_is_named(monkeypatch):
    model, batch = small("mlp")
    off = pytest.raises(hybridremat.CaptureError, match="switched off")
    with torch._dynamo.config.patch(disable=True), off:
        wrap(model, batch)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with off:
        wrap(model, batch)


@pytest.mark.parametrize("settings", [{}, {"units": "layers.*"}], ids=["whole", "units"])
def test_in_a_dispatch_mode_nothing_runs_instead_of_the_plan(settings):
    model, batch = small("mlp")
    limit, plain = least_limit(model, batch, **settings), train_plain(model, batch)
    wrapped = wrap(copy.deepcopy(model), batch, limit, **settings)
    with FlopCounterMode(display=False) as flops:
        for fails in (lambda: wrapped(**batch), lambda: wrap(model, batch, limit, **settings)):
            with pytest.raises(hybridremat.ModelError, match="inside of a TorchDispatchMode"):
                fails()
        assert flops.get_total_flops() == 0
        wrapped.forward(**batch)
        assert flops.get_total_flops() > 0
    assert model._compiled_call_impl is None
    assert_runs_its_plan(wrapped, wrapped, batch, plain)
