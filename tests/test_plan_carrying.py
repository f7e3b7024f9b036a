"""Plans made for another device, applied on this one: carried over op by op, counted anew, or refused."""

import copy
import json
from dataclasses import replace

import pytest

import hybridremat
from hybridremat import InfeasibleLimitError, Plan, PlanMismatchError
from hybridremat.graph.joint import Schedule, Value, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.planning.port import kernel_kind, not_run_once, port_obstacle, ported_chain
from support.nets import transformer
from support.training import small, train, train_plain
from support.wrapping import HOW, assert_untouched, state_of

NAMES_THERE = {
    "aten._scaled_dot_product_flash_attention_for_cpu": "aten._scaled_dot_product_efficient_attention",
    "aten.native_layer_norm": "aten.cudnn_layer_norm",
}


@pytest.fixture(scope="module")
def planned():
    """A net, its batch, and a plan for it on another device with room for what its kernels take here."""
    model, batch = small("transformer")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="60%", device_spec="h200", **HOW)
    # what kernels allocate while they run is not known there: room for it on any device
    return model, batch, replace(plan, memory_limit=2 * plan.predicted_peak)


def named_there(target: str) -> str:
    name = target.removesuffix(".default")
    return f"{NAMES_THERE[name]}.default" if name in NAMES_THERE else target


def other_graph(plan: Plan) -> Plan:
    """As if captured on that device: other names, one more value that a kernel hands out, another hash."""
    graph = plan.details.graph
    extra = Value(len(graph.values), 512, graph.ops[2].id, "state", (2,), "int64")
    ops = [replace(op, target=named_there(op.target)) for op in graph.ops]
    assert [op.target for op in ops] != [op.target for op in graph.ops]
    ops[2] = replace(ops[2], writes=(*ops[2].writes, extra.id))
    graph = replace(graph, ops=tuple(ops), values=(*graph.values, extra), fingerprint="0" * 32)
    chain = replace(plan.details.chain, graph=graph)
    chain = replace(chain, always=chain.always | {extra.id})
    return replace(plan, fingerprint="0" * 32, details=replace(plan.details, chain=chain))


@pytest.mark.parametrize("change", [pytest.param(lambda plan: plan, marks=pytest.mark.slow), other_graph])
def test_it_trains_as_plain_under_its_limit(planned, change):
    model, batch, plan = planned
    plain, trained = train_plain(model, batch), copy.deepcopy(model)
    there = change(plan)
    hybridremat.wrap(trained, kwargs=batch, plan=there, **HOW)
    here = hybridremat.get_plan(trained)
    assert here.fingerprint == plan.fingerprint  # that of the graph here, whatever its name was there
    assert here.schedule == there.schedule != plain_schedule(here.details.graph)
    assert here.predicted_peak != there.predicted_peak  # sizes are not rounded here, temporaries are counted
    assert here.predicted_peak == step_memory(here.details.graph, here.schedule).peak <= there.memory_limit
    run = train(trained, batch)
    assert plain.differences(run) == []
    assert max(run.peaks) == here.predicted_peak


def test_the_result_is_a_plan_of_this_device(planned, tmp_path):
    model, batch, plan = planned
    applied = copy.deepcopy(model)
    hybridremat.wrap(applied, kwargs=batch, plan=other_graph(plan), **HOW)
    here = hybridremat.get_plan(applied)
    assert here.origin.device == "cpu" and not here.origin.from_spec
    assert [op.time for op in here.details.graph.ops] == [op.time for op in plan.details.graph.ops]
    assert here.details.chain.boundary == plan.details.chain.boundary
    assert here.details.chain.always == plan.details.chain.always
    assert "recomputed values" in str(here)
    here.save(tmp_path / "here.json")
    again = copy.deepcopy(model)
    hybridremat.wrap(again, kwargs=batch, plan=tmp_path / "here.json", **HOW)
    assert hybridremat.get_plan(again) == here


def test_a_limit_that_kernels_here_break_is_refused(planned):
    model, batch, plan = planned
    tight = replace(plan, memory_limit=plan.predicted_peak)
    before = state_of(model)
    with pytest.raises(InfeasibleLimitError, match=r"the plan takes .* made \(h200 ") as caught:
        hybridremat.wrap(model, kwargs=batch, plan=tight, **HOW)
    assert caught.value.limit == plan.predicted_peak < caught.value.least
    assert_untouched(before, model)


def renamed(plan: Plan) -> Plan:
    """One op computes something else."""
    there = other_graph(plan)
    graph = there.details.graph
    ops = (*graph.ops[:3], replace(graph.ops[3], target="aten.tanh.default"), *graph.ops[4:])
    chain = replace(there.details.chain, graph=replace(graph, ops=ops))
    return replace(there, details=replace(there.details, chain=chain))


def reordered(plan: Plan) -> Plan:
    steps = plan.schedule.steps
    return replace(other_graph(plan), schedule=Schedule(steps[::-1], plan.schedule.num_forward))


def other_inputs(plan: Plan) -> Plan:
    return replace(other_graph(plan), origin=replace(plan.origin, inputs=plan.origin.inputs[:0]))


def other_outputs(plan: Plan) -> Plan:
    there = other_graph(plan)
    graph = replace(there.details.graph, held_outputs=frozenset())
    return replace(there, details=replace(there.details, chain=replace(there.details.chain, graph=graph)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, r"op 3 .*, and was tanh .*\(forward\)"),
        (reordered, r"step 0 \(.*\) reads .*, which was not computed before"),
        (other_inputs, r"it is for inputs \(\), and these are"),
        (other_outputs, r"held outputs differ"),
    ],
)
def test_what_is_no_plan_for_this_step_is_refused(planned, change, message):
    model, batch, plan = planned
    before = state_of(model)
    with pytest.raises(PlanMismatchError, match=message):
        hybridremat.wrap(model, kwargs=batch, plan=change(plan), **HOW)
    assert_untouched(before, model)


def test_on_the_device_it_was_made_on_the_graph_must_be_the_same(planned):
    model, batch, plan = planned
    here = hybridremat.plan(model, kwargs=batch, memory_limit="90%", **HOW).origin
    with pytest.raises(PlanMismatchError, match="the plan was not made for this step"):
        hybridremat.wrap(model, kwargs=batch, plan=replace(other_graph(plan), origin=here), **HOW)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "scaled_dot_product_attention"),
        ("aten._scaled_dot_product_flash_attention.default", "scaled_dot_product_attention"),
        ("aten._scaled_dot_product_cudnn_attention.default", "scaled_dot_product_attention"),
        (
            "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
            "scaled_dot_product_attention_backward",
        ),
        ("aten._native_batch_norm_legit_functional.default", "batch_norm"),
        ("aten.cudnn_batch_norm_backward.default", "batch_norm_backward"),
        ("aten.native_batch_norm_backward.default", "batch_norm_backward"),
        ("aten.add.Tensor", "add"),
        ("mylib.native_op.default", "mylib.native_op.default"),
    ],
)
def test_kernels_of_one_kind(target, kind):
    assert kernel_kind(target) == kind


def test_ops_that_run_once_are_found():
    graph = transformer(1)
    steps = plain_schedule(graph)
    split = steps.num_forward
    twice = Schedule((*steps.steps[:split], 3, *steps.steps[split:]), split)
    assert not_run_once(graph, twice) is None
    once = replace(graph, ops=tuple(replace(op, recomputable=op.id != 3) for op in graph.ops))
    assert not_run_once(once, steps) is None
    assert not_run_once(once, twice).id == 3
    assert port_obstacle(graph, once) is None
    assert port_obstacle(graph, transformer(2)) is not None


def test_a_chain_over_the_same_graph_stays(planned):
    chain = planned[2].details.chain
    assert ported_chain(chain, chain.graph) == chain


def test_made_and_shown_on_the_command_line(models, capsys):
    from hybridremat.cli import main as cli

    words = [f"{models}:make", "--limit", "97%", "--device-spec", "h200", "--workers", "1"]
    assert cli.main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["origin"]["device_name"] == "h200 (spec)"
