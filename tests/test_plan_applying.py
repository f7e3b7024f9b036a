"""Plans from files: what they hold, when they are refused, that nothing is solved or measured for them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

import hybridremat
from hybridremat import Plan, PlanFormatError, PlanMismatchError
from hybridremat.graph.costs import cost_models as costs
from hybridremat.graph.costs import footprints
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.rewrites import by_parts, in_place
from hybridremat.planning import planner
from hybridremat.planning.rank_agreement import plan_digest
from hybridremat.plans import codec as plan_codec
from support.broken_nets import Reader
from support.broken_nets import batch as reader_batch
from support.training import Transformer, small, train, train_plain
from support.wrapping import HOW, assert_untouched, least_limit, state_of, wrap


@pytest.fixture
def nothing_is_made(monkeypatch):
    """From here on, solving a block or running a kernel by itself is an error."""

    def forbidden(*_, **__):
        raise AssertionError("something was solved or measured")

    def forbid():
        monkeypatch.setattr(planner.OPTIONS, "solve", forbidden)
        monkeypatch.setattr(footprints, "_Trial", forbidden)
        monkeypatch.setattr(costs, "measure_times", forbidden)
        monkeypatch.setattr(in_place, "tried", forbidden)
        monkeypatch.setattr(by_parts, "tried", forbidden)

    return forbid


@pytest.fixture(scope="module")
def tight():
    """A tight plan for the small transformer."""
    model, batch = small("transformer")
    return hybridremat.plan(model, kwargs=batch, memory_limit=least_limit(model, batch), **HOW)


@pytest.fixture
def saved(tight, tmp_path):
    """A transformer, its batch, and the file of a tight plan for them."""
    tight.save(tmp_path / "plan.json")
    return *small("transformer"), tight, tmp_path / "plan.json"


def test_a_file_holds_the_whole_plan(saved):
    _, _, plan, path = saved
    again = Plan.load(path)
    assert again == plan and str(again) == str(plan)
    assert step_memory(again.details.graph, again.schedule).peak == plan.predicted_peak


def test_a_plain_step_is_a_plan_too(tmp_path):
    model, batch = small("transformer")
    plain = hybridremat.plan(model, kwargs=batch, memory_limit="200%", **HOW)
    assert not plain.details.decisions
    plain.save(tmp_path / "plain.json")
    assert Plan.load(tmp_path / "plain.json") == plain
    hybridremat.wrap(model, kwargs=batch, plan=tmp_path / "plain.json", progress=False)
    assert hybridremat.get_plan(model).blocks == plain.blocks


@pytest.mark.parametrize("as_path", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_applied_plan_trains_as_plain_and_makes_nothing(saved, nothing_is_made, as_path):
    model, batch, plan, path = saved
    plain = train_plain(model, batch)
    planned = copy.deepcopy(model)
    nothing_is_made()
    hybridremat.wrap(planned, kwargs=batch, plan=path if as_path else Plan.load(path), progress=False)
    assert hybridremat.get_plan(planned).schedule == plan.schedule
    trained = train(planned, batch)
    assert plain.differences(trained) == []
    assert max(trained.peaks) <= plan.memory_limit


def test_what_is_not_proven_on_this_machine_is_not_done(saved, monkeypatch):
    """A file from another machine with a device of this name, where one kernel in place has other bits."""
    model, batch, plan, path = saved
    plain = train_plain(model, batch)
    (op, *_) = (op for op in plan.details.graph.ops if op.overwrites)
    monkeypatch.setattr(KernelStore, "for_device", lambda _: KernelStore())
    tried = in_place.tried

    def of_others(trials, device, how):
        others = [each for each in trials if str(each.node.target) != op.target]
        return {way.name: None for each in trials for way in each.ways} | tried(others, device, how)

    monkeypatch.setattr(in_place, "tried", of_others)
    with pytest.raises(hybridremat.InfeasibleLimitError, match="on this device the plan takes"):
        hybridremat.wrap(model, kwargs=batch, plan=path, progress=False)
    loose = replace(plan, memory_limit=2 * plan.memory_limit)
    hybridremat.wrap(model, kwargs=batch, plan=loose, progress=False)
    found = hybridremat.get_plan(model)
    assert found.predicted_peak > plan.predicted_peak and found.schedule == plan.schedule
    assert not any(each.overwrites for each in found.details.graph.ops if each.target == op.target)
    trained = train(model, batch)
    assert plain.differences(trained) == [] and max(trained.peaks) == found.predicted_peak


def test_the_checker_still_runs(saved):
    model, batch, plan, _ = saved
    wrong = replace(plan, schedule=plain_schedule(plan.details.graph))
    before = state_of(model)
    with pytest.raises(hybridremat.PlanError, match="refused by the checker and has not been run"):
        hybridremat.wrap(model, kwargs=batch, plan=wrong, progress=False)
    assert_untouched(before, model)


def test_a_later_shape_gets_what_the_plan_was_asked_for(tmp_path):
    model, batch = small("mlp")
    hybridremat.plan(model, kwargs=batch, memory_limit="90%", **HOW).save(tmp_path / "p.json")
    hybridremat.wrap(model, kwargs=batch, plan=tmp_path / "p.json", **HOW)
    first = hybridremat.get_plan(model)
    half = {name: tensor[: len(tensor) // 2] for name, tensor in batch.items()}
    assert hybridremat.prepare(model, kwargs=half).memory_limit == first.memory_limit
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    second = hybridremat.prepare(model, kwargs=twice)
    assert second.memory_limit == second.plain_peak * 9 // 10 > first.memory_limit


def smaller_batch(model, batch):
    return model, {name: tensor[:1] for name, tensor in batch.items()}


def deeper(model, batch):
    return Transformer(layers=3), batch


def doubled(model, batch):
    return model.double(), batch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (smaller_batch, r"it is for inputs \(tokens.*and these are \(tokens"),
        (deeper, r"it is for [\d,]+ parameters, and this model has"),
        (doubled, r"its parameters take [\d,]+ bytes"),
    ],
)
def test_another_step_is_refused_and_told_what_differs(saved, change, message):
    model, batch, _, path = saved
    other, inputs = change(copy.deepcopy(model), batch)
    before = state_of(other)
    with pytest.raises(PlanMismatchError, match=message):
        hybridremat.wrap(other, kwargs=inputs, plan=path, progress=False)
    assert_untouched(before, other)


def test_the_first_op_that_differs_is_named(saved):
    model, batch, _, path = saved

    class Transformer(type(model)):  # the same name, parameters and inputs
        def forward(self, *args, **kwargs):
            return {"loss": super().forward(*args, **kwargs)["loss"].sin()}

    other = copy.deepcopy(model)
    other.__class__ = Transformer
    with pytest.raises(PlanMismatchError, match=r"op \d+ is aten\.\S+ .*, and was (aten|hybridremat)\."):
        hybridremat.wrap(other, kwargs=batch, plan=path, progress=False)


def elsewhere(plan: Plan, **changes) -> Plan:
    return replace(plan, origin=replace(plan.origin, device_name="another machine"), **changes)


def test_a_plan_of_another_device_is_counted_anew(saved):
    """Temporaries are other there: here they are found by measuring, and the figures are those of here."""
    model, batch, plan, _ = saved
    graph = plan.details.graph
    foreign = replace(graph, ops=tuple(replace(op, temp=0) for op in graph.ops))
    chain = replace(plan.details.chain, graph=foreign)
    peak = step_memory(foreign, plan.schedule).peak
    there = elsewhere(plan, predicted_peak=peak, details=replace(plan.details, chain=chain))
    hybridremat.wrap(model, kwargs=batch, plan=there, **HOW)
    here = hybridremat.get_plan(model)
    assert (here.predicted_peak, here.plain_peak) == (plan.predicted_peak, plan.plain_peak)
    assert here.details.graph == graph


def test_a_plain_step_of_another_device_shows_what_it_takes_here(saved):
    model, batch, _, _ = saved
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW)
    hybridremat.wrap(model, kwargs=batch, plan=elsewhere(plan), **HOW)
    assert not plan.details.decisions and hybridremat.get_plan(model).blocks == plan.blocks


def test_a_plan_that_does_not_fit_here_is_refused(saved):
    model, batch, plan, _ = saved
    there = elsewhere(plan, memory_limit=plan.predicted_peak - 1)
    before = state_of(model)
    with pytest.raises(hybridremat.InfeasibleLimitError, match="on this device the plan takes") as caught:
        hybridremat.wrap(model, kwargs=batch, plan=there, **HOW)
    assert caught.value.least == plan.predicted_peak
    assert_untouched(before, model)


def test_plan_and_limit_are_not_given_together(saved):
    model, batch, _, path = saved
    with pytest.raises(hybridremat.LimitError, match="not both"):
        wrap(model, batch, plan=path)


@pytest.mark.parametrize(
    ("asked", "brought"),
    [
        ({"reserve": "1MiB"}, "reserve=0"),
        ({"forwards": 2}, "forwards=1"),
        ({"hold_outputs": True}, "hold_outputs=False"),
        ({"grad_outputs": "all"}, "grad_outputs='auto'"),
    ],
)
def test_what_the_plan_was_not_made_for_is_refused_beside_it(saved, asked, brought):
    model, batch, _, path = saved
    before = state_of(model)
    with pytest.raises(hybridremat.LimitError, match=f"beside plan=, which was made with {brought}"):
        hybridremat.wrap(model, kwargs=batch, plan=path, progress=False, **asked)
    assert_untouched(before, model)


def test_what_the_plan_was_made_for_may_be_said_again(tmp_path):
    model, batch = small("mlp")
    how = {"reserve": "1KiB", "forwards": 2, "hold_outputs": True, "grad_outputs": "all"}
    hybridremat.plan(model, kwargs=batch, memory_limit="110%", **how, **HOW).save(tmp_path / "p.json")
    hybridremat.wrap(model, kwargs=batch, plan=tmp_path / "p.json", **how, **HOW)


def test_figures_that_were_edited_are_noticed(saved):
    """Nothing else in the file speaks against them."""
    _, _, plan, path = saved
    data = plan.to_dict()
    for name, changed in (("overhead", plan.overhead / 2), ("saved_bytes", plan.saved_bytes + 1)):
        path.write_text(json.dumps(data | {name: changed}))
        with pytest.raises(PlanFormatError, match="its checksum does not fit"):
            Plan.load(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-30],
        lambda text: text.replace('"predicted_peak": ', '"predicted_peak": 1', 1),
        lambda _: "[]",
        lambda _: "\xff\xfe",
        lambda text: json.dumps(json.loads(text) | {"schema": 1}),
    ],
)
def test_damaged_files_are_refused(saved, damage):
    model, batch, _, path = saved
    path.write_text(damage(path.read_text()), encoding="latin-1")
    before = state_of(model)
    with pytest.raises(PlanFormatError, match=r"plan\.json"):
        hybridremat.wrap(model, kwargs=batch, plan=path, progress=False)
    assert_untouched(before, model)
    with pytest.raises(FileNotFoundError):
        Plan.load(path.with_name("absent.json"))


def test_equal_plans_have_one_name_however_long_they_took(saved):
    _, _, plan, _ = saved
    slower = plan.with_timings({"segment": 99.0})
    other = replace(plan, schedule=plain_schedule(plan.details.graph))
    assert plan_digest(slower) == plan_digest(plan) != plan_digest(other)


def test_a_plan_of_several_graphs_is_saved_whole(tmp_path):
    model, batch = Reader(), reader_batch()
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="100%", graph_breaks="plan", **HOW)
    plan.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == plan
    assert plan.parts and plan.inspect(0).headroom is not None


def test_layouts_belong_to_the_fingerprint_and_fractions_do_not():
    model, batch = small("convnet")
    first = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW)
    assert hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).fingerprint == first.fingerprint
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert hybridremat.plan(last, kwargs=batch, memory_limit="100%", **HOW).fingerprint != first.fingerprint


def forged(path, change):
    """The plan of a file with something changed in it, under a checksum that fits."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data | {"checksum": plan_codec.checksum(data)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["details"]["chain"]["blocks"][0]["forward"].reverse(),
        lambda data: next(b["backward"] for b in data["details"]["chain"]["blocks"] if b["backward"]).pop(),
        lambda data: data["details"]["option_set_of"].__setitem__(0, 10**30),
        lambda data: data["details"]["option_sets"][0]["options"][0][6].pop(),
        lambda data: data["details"]["decisions"].pop(),
        lambda data: data["blocks"][0].update(index=1),
        lambda data: data["blocks"][0].update(forward_peak=float("inf")),
        lambda data: data["pins"].append({"pattern": "*", "action": "keep", "values": 1, "bytes": 1}),
        lambda data: data.update(predicted_peak=data["predicted_peak"] + 1),
    ],
)
def test_what_does_not_hold_together_is_damaged_whatever_its_checksum_says(saved, change):
    _, _, plan, path = saved
    forged(path, lambda data: None)
    assert Plan.load(path) == plan
    forged(path, change)
    with pytest.raises(PlanFormatError, match="the plan is damaged"):
        Plan.load(path)


def test_endless_nesting_is_no_plan(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(PlanFormatError, match=r"deep\.json"):
        Plan.load(tmp_path / "deep.json")
