"""What users do with a compiled step: loops, files, caches, other shapes, reports, commands."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
import torch
import torch._functorch.config
from torch.nn import functional

import hybridremat
from hybridremat.cli import main as cli
from hybridremat.graph.private_inductor import compiler_settings
from hybridremat.integrations.loop import LoopWatch
from hybridremat.integrations.loop_options import loop_options
from hybridremat.planning.plan_cache import plan_key
from hybridremat.planning.settings import Settings
from support.command_line import QUICK
from support.compiled import compiled, error, gradients, needs_compiler, nothing_kept_by_inductor
from support.loop_cases import MEASURED, PREDICTED
from support.processes import run_ranks
from support.training import Mlp, allocated_peak, small, train
from support.wrapping import HOW, assert_untouched, state_of

built = [pytest.mark.slow, needs_compiler]
SHARE = "90%"
OWN = 512  # bytes of small tensors that DistributedDataParallel makes in a step, in threads of its own


def slow(test):
    for mark in built:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def _nothing_kept():
    with nothing_kept_by_inductor():
        yield


@cache
def plan():
    """One plan of the small net, for all tests that need not see it made."""
    model, batch = small("mlp")
    return hybridremat.plan(model, kwargs=batch, memory_limit=SHARE, compiler="inductor", **HOW)


def planned():
    """A plain model, its compiled twin, and their batch."""
    model, batch = small("mlp")
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=batch, plan=plan(), progress=False)
    return plain, model, batch


def exact(model):
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def found(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def step_peak(model, batch):
    model.zero_grad()
    return allocated_peak(lambda: model(**batch).backward())


# --- other backwards


@slow
def test_a_backward_that_runs_once_refuses_to_be_retained():
    _, model, batch = planned()
    loss = model(**batch)
    with pytest.raises(hybridremat.DoubleBackwardError, match=r"retain_graph=True.*donated_buffer = False"):
        loss.backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()  # nothing was lost
    with pytest.raises(hybridremat.DoubleBackwardError, match="create_graph=True"):
        model(**batch).backward(create_graph=True)


@slow
def test_without_donated_buffers_a_graph_can_be_retained(monkeypatch):
    """Also where Inductor has kept the code of a backward that overwrites what is saved."""
    model, batch = small("mlp")
    plain, usual = copy.deepcopy(model), plan()
    with torch._inductor.config.patch(fx_graph_cache=True):
        compiled(copy.deepcopy(model), batch, SHARE)
        with torch._functorch.config.patch(donated_buffer=False):
            compiled(model, batch, SHARE)
            made = hybridremat.get_plan(model)
            assert step_peak(model, batch) == made.predicted_peak
            assert made.plain_peak > usual.plain_peak
            model.zero_grad()
            loss = model(**batch)
            for _ in range(2):
                loss.backward(retain_graph=True)
    plain(**batch).mul(2).backward()
    assert error(found(model), exact(plain)) < 1e-5


@slow
def test_gradients_add_up_over_micro_batches():
    plain, model, batch = planned()
    parts = [{"x": torch.randn_like(batch["x"])} for _ in range(3)]
    for part in parts:
        plain(**part).backward()
    peaks = [allocated_peak(lambda part=part: model(**part).backward()) for part in parts]
    assert error(found(model), exact(plain)) < 1e-5
    assert max(peaks) <= plan().memory_limit


# --- what may change between steps


@slow
def test_eval_mode_frozen_layers_and_unwrap_between_steps():
    plain, model, batch = planned()
    names = list(plain.state_dict())
    assert list(model.state_dict()) == names
    assert step_peak(model, batch) <= plan().memory_limit
    for one in (plain, model):
        one.eval()
    assert torch.equal(model(**batch), plain(**batch))  # op by op
    for one in (plain, model):
        one.train()
        one.layers[0].requires_grad_(False)
        one.zero_grad()
    model(**batch).backward()  # captured again
    assert step_peak(model, batch) <= hybridremat.get_plan(model).memory_limit < plan().memory_limit
    plain(**batch).backward()
    assert model.layers[0].weight.grad is None
    for mine, its in zip(model.layers[1:].parameters(), plain.layers[1:].parameters(), strict=True):
        assert torch.allclose(mine.grad, its.grad, rtol=1e-5, atol=1e-8)
    hybridremat.unwrap(model)
    assert torch.equal(model(**batch), plain(**batch))
    assert list(model.state_dict()) == names


@slow
def test_another_shape_gets_a_compiled_plan_of_its_own():
    plain, model, batch = planned()
    half = {"x": batch["x"][:48]}
    other = hybridremat.prepare(model, kwargs=half)
    assert other.compiler == "inductor"
    assert other.timings["lowering"] > 0
    assert step_peak(model, half) == other.predicted_peak <= other.memory_limit == plan().memory_limit
    plain(**half).backward()
    assert error(found(model), exact(plain)) < 1e-5
    assert step_peak(model, batch) == plan().predicted_peak


@slow
def test_autocast():
    """Within autocast the products run in bfloat16, planned and as torch.compile runs them."""
    model, batch = small("mlp")
    stock = torch.compile(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        _, theirs = gradients(stock, batch)
        compiled(model, batch, SHARE)
        _, ours = gradients(model, batch)
        peak = step_peak(model, batch)
    assert peak == hybridremat.get_plan(model).predicted_peak
    assert error(ours, {name: gradient.double() for name, gradient in theirs.items()}) < 0.02


class Scores(Mlp):
    """Returns what a loss outside the model reads."""

    def forward(self, x):
        for layer in self.layers:
            x = functional.gelu(layer(x)) * 1.5
        return x


def square(scores):
    return scores.pow(2).mean()


@slow
def test_a_loss_outside_the_model():
    torch.manual_seed(0)
    model, batch = Scores(), small("mlp")[1]
    plain = copy.deepcopy(model)
    compiled(model, batch, "160%", reserve="36KiB")
    measured = hybridremat.measure(model, kwargs=batch, loss_fn=square)
    assert 0 < measured.outside <= 36 * 1024
    made = hybridremat.get_plan(model)
    assert measured.peak <= made.needed <= made.memory_limit
    assert max(train(model, batch, loss_in=square).peaks) <= made.memory_limit
    square(plain(**batch)).backward()
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    square(model(**batch)).backward()
    assert error(found(model), exact(plain)) < 1e-5


@slow
def test_measure_finds_what_was_predicted():
    _, model, batch = planned()
    measured = hybridremat.measure(model, kwargs=batch)
    assert measured.peak == measured.predicted == plan().predicted_peak


@slow
def test_ranks_share_a_plan_and_each_compiles_it(tmp_path):
    first, second = run_ranks("support.rank_cases:compiled", tmp_path)
    assert first["plan"] == second["plan"]
    assert first["lowered"] > 0 == second["lowered"]
    for rank in (first, second):
        assert sum(peak > rank["limit"] + OWN for peak in rank["peaks"]) <= 1  # DDP rebuilds its buckets once
        assert max(rank["peaks"]) <= rank["limit"] + rank["buckets"] + OWN
    assert first["weights"] == second["weights"]
    assert first["losses"] != second["losses"]  # of batches of their own


# --- requests


@slow
def test_an_overhead_alone_and_pins():
    model, batch = small("mlp")
    compiled(model, batch, None, max_overhead=0.3)
    made = hybridremat.get_plan(model)
    assert made.overhead <= 0.3
    assert max(train(model, batch).peaks) == made.predicted_peak < plan().plain_peak
    model, batch = small("mlp")
    compiled(model, batch, "100%", policy={"layers.1": "must_recompute"})
    pinned = hybridremat.get_plan(model)
    again = pinned.schedule.steps[pinned.schedule.num_forward :]
    assert pinned.pins[0].values == 1
    assert [op.target for op in pinned.details.graph.ops if op.module == "layers.1" and op.id in again]
    assert max(train(model, batch).peaks) <= pinned.memory_limit


# --- plans that are kept, given, shown


def test_a_kept_plan_is_one_of_the_same_compiler_settings():
    asked = Settings(memory_limit="50%", compiler="inductor")
    key = plan_key("f", asked, "cpu", reused=False)
    before = compiler_settings()
    for other in (
        torch._functorch.config.patch(donated_buffer=False),
        torch._inductor.config.patch(max_fusion_size=2),
    ):
        with other:
            assert plan_key("f", asked, "cpu", reused=False) != key
            eager = plan_key("f", Settings(memory_limit="50%"), "cpu", reused=False)
    with torch._inductor.config.patch(custom_partitioner_fn=object()):  # as within a compilation
        assert compiler_settings() == before
    assert plan_key("f", asked, "cpu", reused=False) == key
    assert plan_key("f", Settings(memory_limit="50%"), "cpu", reused=False) == eager


@slow
def test_a_second_run_lowers_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("HYBRIDREMAT_CACHE_SIZE", "64MiB")
    model, batch = small("mlp")
    compiled(copy.deepcopy(model), batch, SHARE)
    monkeypatch.setattr("hybridremat.compiler.inductor.lower_forward", None)
    compiled(model, batch, SHARE)
    made = hybridremat.get_plan(model)
    assert next(iter(made.timings)) == "read the kept plan"
    assert max(train(model, batch).peaks) == made.predicted_peak <= made.memory_limit


def test_a_plan_of_another_compiler_is_refused():
    model, batch = small("mlp")
    before = state_of(model)
    eager = hybridremat.plan(model, kwargs=batch, memory_limit=SHARE, **HOW)
    with pytest.raises(hybridremat.LimitError, match="compiler='inductor' beside plan="):
        hybridremat.wrap(model, kwargs=batch, plan=eager, compiler="inductor", progress=False)
    assert_untouched(before, model)


@slow
def test_the_command_line_plans_and_shows_compiled_plans(models, capsys):
    how = ["--limit", "100%", "--compiler", "inductor", *QUICK]
    assert cli.main(["plan", f"{models}:make", "-o", "plan.json", *how]) == 0
    made = hybridremat.Plan.load("plan.json")
    assert made.compiler == "inductor"
    assert "peaks are those of its code" in capsys.readouterr().out
    assert cli.main(["inspect", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["compiler"] == "inductor"
    assert cli.main(["inspect", "plan.json", "--html", "plan.html"]) == 0


# --- loops


@slow
def test_callbacks_of_loops_compile():
    model, batch = small("mlp")
    asked = {"memory_limit": SHARE, "compiler": "inductor", **HOW}
    watch = LoopWatch(loop_options(asked, measure_every=1))
    watch.begin(model)
    entries = []
    for _ in range(3):
        watch.step_begins()
        model(**batch).backward()
        watch.backward_ends()
        watch.step_ends()
        model.zero_grad()
        entries.append(watch.log.entry())
    assert hybridremat.get_plan(model).compiler == "inductor"
    watch.end()
    assert [entry[MEASURED] for entry in entries[1:]] == [entries[1][PREDICTED]] * 2
    assert model._compiled_call_impl is None
