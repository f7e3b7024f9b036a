"""policy=: patterns, what they pin, what is refused; and whole models that train as they say."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat import Plan
from hybridremat.graph.joint import JointGraph, Op, Phase, plain_schedule
from hybridremat.graph.memory import schedule_time
from hybridremat.graph.pins import Pins
from hybridremat.plans.codec import plan_from_dict
from hybridremat.plans.patterns import Pattern
from hybridremat.plans.policy import require_matches, resolve_policy
from hybridremat.reports.what_if import WhatIf
from hybridremat.sequence.repair import PinRepair
from support.pin_oracle import broken_promises
from support.training import Transformer, loss_in, small, train, train_plain
from support.wrapping import HOW, assert_untouched, least_limit, state_of, wrap


def op(module: str, target: str, **fields) -> Op:
    return Op(0, "n", Phase.FORWARD, (), (), target=target, module=module, **fields)


@pytest.mark.parametrize(
    ("pattern", "module", "target", "matches"),
    [
        ("h.3", "h.3.mlp.c_fc", "aten.addmm.default", True),
        ("h.3", "h.31.mlp", "aten.addmm.default", False),
        ("h.*.mlp", "h.3.mlp.c_fc", "aten.addmm.default", True),
        ("h.*.MLP", "h.3.mlp", "aten.addmm.default", False),
        ("*", "", "aten.add.Tensor", True),
        ("h", "", "aten.add.Tensor", False),
        ("h.[0-2]:gelu", "h.1.mlp", "aten.gelu.default", True),
        ("h.[0-2]:gelu", "h.3.mlp", "aten.gelu.default", False),
        ("*:aten.gelu.*", "h.1", "aten.gelu.default", True),
        ("*:gel", "h.1", "aten.gelu.default", False),
        ("*:layer_norm", "h.1", "aten.native_layer_norm.default", True),
        ("*:native_layer_norm", "h.1", "aten.native_layer_norm.default", True),
        ("*:flash_attention", "a", "aten._scaled_dot_product_flash_attention_for_cpu.default", True),
        ("*:own", "a", "mylib.own.default", True),
    ],
)
def test_what_a_pattern_matches(pattern, module, target, matches):
    assert Pattern.of(pattern).matches(op(module, target)) is matches


def traced(name: str) -> JointGraph:
    model, batch = small(name)
    return hybridremat.frontier(model, kwargs=batch, **HOW)._step_frontier.graph


def targets(graph: JointGraph, ops) -> list[str]:
    return sorted({graph.ops[o].target for o in ops})


def test_a_policy_pins_forward_and_optional_ops_and_counts_their_values():
    graph = traced("transformer")
    pinned = resolve_policy(graph, {"blocks.*:gelu": "must_recompute", "blocks.1.first": "must_save"})
    assert targets(graph, pinned.pins.must_recompute) == ["aten.gelu.default"]
    assert targets(graph, pinned.pins.must_save) == ["aten.native_layer_norm.default"]
    assert [(r.pattern, r.action, r.values) for r in pinned.records] == [
        ("blocks.*:gelu", "must_recompute", 2),
        ("blocks.1.first", "must_save", 3),
    ]
    # batch 2, length 24: two layers of 4 · 32 floats a token; one of 32, with a mean and a deviation each
    assert [r.bytes for r in pinned.records] == [2 * 48 * 128 * 4, 48 * (32 + 2) * 4]
    assert not resolve_policy(graph, None).pins and not resolve_policy(graph, {}).pins


def test_values_that_the_backward_cannot_need_are_not_pinned():
    graph = traced("convnet")
    norms = resolve_policy(graph, {"norms*": "must_recompute"}).pins  # the counters are held outputs
    assert targets(graph, norms.must_recompute) == ["aten._native_batch_norm_legit_functional.default"]
    everything = resolve_policy(graph, {"*": "must_recompute"}).pins
    assert "aten.nll_loss_forward.default" in targets(graph, everything.must_recompute)


# What is refused, and that nothing has changed then


def refusal(policy, name="transformer", **how) -> str:
    model, batch = small(name)
    before = state_of(model)
    with pytest.raises(hybridremat.PolicyError) as caught:
        wrap(model, batch, policy=policy, **how)
    assert_untouched(before, model)
    return str(caught.value)


@pytest.mark.parametrize(
    "policy", ["blocks", ["blocks"], {3: "must_save"}, {"": "must_save"}, {"a:": "must_save"}]
)
def test_what_is_no_policy(policy):
    assert "pass {" in refusal(policy) or "MODULE or MODULE:OP" in refusal(policy)


def test_an_action_that_does_not_exist():
    text = refusal({"blocks": "save"})
    assert text == """policy: 'blocks': 'save' is neither "must_save" nor "must_recompute\""""


def test_a_pattern_that_matches_nothing_names_what_there_is():
    assert "modules of this model are 'blocks'" in refusal({"block": "must_save"})
    text = refusal({"blocks.*.wide:adm": "must_save"})
    assert (
        text
        == "policy: 'blocks.*.wide:adm' matches no op of the forward; the ops in blocks.*.wide are 'addmm'."
    )


def test_two_patterns_that_contradict_each_other():
    text = refusal({"blocks.0": "must_save", "*:gelu": "must_recompute"})
    assert "'blocks.0' says must_save and '*:gelu' must_recompute of one value, gelu (aten.gelu" in text


def test_an_op_that_runs_once_cannot_be_recomputed():
    text = refusal({"*:add": "must_recompute"}, "running")  # it reads a buffer that is then overwritten
    assert "'*:add' says must_recompute of add" in text and "this op must not run twice" in text


def test_an_output_that_the_backward_reads_cannot_be_recomputed():
    text = refusal({"*:log_softmax": "must_recompute", "head": "must_recompute"}, hold_outputs=True)
    assert "'head' says must_recompute of addmm" in text and "it is an output of the step" in text
    model, batch = small("transformer")  # and where it is dropped, it can
    wrap(model, batch, policy={"head": "must_recompute"})


def test_what_the_backward_needs_nothing_of():
    assert "of what it matches the backward needs nothing" in refusal({"*:mean": "must_recompute"}, "mlp")


def test_a_pattern_has_to_match_in_one_graph_of_several():
    graph = traced("mlp")
    require_matches([graph, traced("transformer")], {"blocks": "must_save", "layers": "must_save"})
    with pytest.raises(hybridremat.PolicyError, match="'blocks' matches no op"):
        require_matches([graph], {"blocks": "must_save"})


@pytest.mark.slow
def test_limits_that_only_the_policy_excludes():
    model, batch = small("transformer")
    free = least_limit(model, batch)
    policy = {"blocks": "must_save"}
    with pytest.raises(hybridremat.InfeasibleLimitError, match=r"under policy= \(blocks\)") as caught:
        wrap(model, batch, free, policy=policy)
    assert caught.value.least > free
    wrap(model, batch, caught.value.least, policy=policy)
    hybridremat.unwrap(model)
    with pytest.raises(hybridremat.PolicyError, match=r"more time than the plain step.*max_overhead 1\.0%"):
        hybridremat.plan(model, kwargs=batch, max_overhead=0.01, policy={"blocks": "must_recompute"}, **HOW)


# Whole models


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("transformer", {"*:native_dropout": "must_recompute"}),
        *(
            pytest.param(name, policy, marks=pytest.mark.slow)
            for name, policy in (
                ("convnet", {"*:relu": "must_recompute", "convs": "must_save"}),
                ("transformer", {"*:native_dropout": "must_save"}),
                ("transformer", {"blocks.*:gelu": "must_recompute", "blocks.*:softmax": "must_save"}),
                ("transformer", {"blocks.0": "must_recompute", "blocks.1": "must_save"}),
                ("running", {"norm": "must_recompute"}),
            )
        ),
    ],
    ids=str,
)
def test_training_under_a_policy_is_bit_equal_and_keeps_the_limit(name, policy):
    model, batch = small(name)
    plain = train_plain(model, batch)
    least = least_limit(model, batch, policy=policy)
    for limit in ("100%", least):
        planned = copy.deepcopy(model)
        wrap(planned, batch, limit, policy=policy)
        plan = hybridremat.get_plan(planned)
        trained = train(planned, batch)
        assert plain.differences(trained) == []
        assert max(trained.peaks) == plan.predicted_peak <= plan.memory_limit
        assert [(pin.pattern, pin.action) for pin in plan.pins] == list(policy.items())
        assert all(pin.values > 0 for pin in plan.pins)


def test_every_point_of_a_frontier_obeys():
    model, batch = small("transformer")
    policy = {
        "blocks.*.wide": "must_save",
        "blocks.*:gelu": "must_recompute",
        "*:native_dropout": "must_recompute",
    }
    step_frontier = hybridremat.frontier(model, kwargs=batch, policy=policy, **HOW)._step_frontier
    graph = step_frontier.graph
    kept = {
        o.id for o in graph.ops if o.module.endswith(".wide") and o.phase is not Phase.BACKWARD and o.writes
    }
    remade = {o.id for o in graph.ops if o.target == "aten.gelu.default" or "native_dropout" in o.target}
    pins = Pins(frozenset(kept), frozenset(remade))
    assert len(step_frontier.candidates) > 5 and kept and remade
    for candidate in step_frontier.candidates:
        assert broken_promises(graph, candidate.schedule, pins) == []


def test_the_plan_shows_and_keeps_the_pins(tmp_path, capsys):
    model, batch = small("transformer")
    plan = hybridremat.plan(
        model, kwargs=batch, memory_limit="90%", policy={"*:gelu": "must_recompute"}, **HOW
    )
    assert "policy" in str(plan) and "*:gelu must_recompute (2 values, 48.0 KiB)" in " ".join(
        str(plan).split()
    )
    assert plan_from_dict(json.loads(json.dumps(plan.to_dict())), Plan) == plan
    assert "policy" not in str(hybridremat.plan(model, kwargs=batch, memory_limit="90%", **HOW))


def test_a_later_shape_is_planned_with_the_policy_of_the_first():
    model, batch = small("transformer")
    policy = {"*:gelu": "must_recompute"}
    wrap(model, batch, policy=policy)
    policy["blocks"] = "must_save"  # what the caller does with the mapping later changes nothing
    plain = copy.deepcopy(model)
    other = {"tokens": torch.randint(0, 50, (3, 16))}
    plan = hybridremat.prepare(model, kwargs=other)
    assert [(pin.pattern, pin.values) for pin in plan.pins] == [("*:gelu", 2)]
    assert plan.pins[0].bytes == 2 * 48 * 128 * 4
    torch.manual_seed(1)
    loss_in(plain(**other)).backward()
    torch.manual_seed(1)
    loss_in(model(**other)).backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )


def test_a_plan_from_a_file_brings_its_policy_to_later_shapes(tmp_path):
    model, batch = small("transformer")
    policy = {"*:gelu": "must_recompute"}
    hybridremat.plan(model, kwargs=batch, memory_limit="90%", policy=policy, **HOW).save(tmp_path / "p.json")
    with pytest.raises(hybridremat.PolicyError, match="plan= brings the policy"):
        hybridremat.wrap(model, kwargs=batch, plan=tmp_path / "p.json", policy=policy, **HOW)
    hybridremat.wrap(model, kwargs=batch, plan=tmp_path / "p.json", **HOW)
    later = hybridremat.prepare(model, kwargs={"tokens": torch.randint(0, 50, (3, 16))})
    assert [(pin.pattern, pin.action, pin.values) for pin in later.pins] == [("*:gelu", "must_recompute", 2)]


def test_what_another_option_would_do_is_told_under_the_policy():
    model, batch = small("transformer")
    # the residual stream crosses every cut, so that all schedules of the chains have to be mended
    policy = {"blocks": "must_recompute"}
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="80%", policy=policy, **HOW)
    what_if = WhatIf(plan, plan.details)
    changes = [c for block in range(len(plan.blocks)) for _, _, c in what_if.options(block) if c is not None]
    graph, pins = plan.details.graph, resolve_policy(plan.details.graph, policy).pins
    fastest = schedule_time(graph, PinRepair(graph, pins)(plain_schedule(graph)))  # of all that obey
    time = schedule_time(graph, plan.schedule)
    assert changes and all(time + change.more_time >= fastest for change in changes)


class Broken(nn.Module):
    """A Transformer, a graph break, and a head of its own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Transformer()
        self.after = nn.Linear(50, 50)

    def forward(self, tokens):
        scores = torch.tanh(self.body(tokens)["scores"])
        torch._dynamo.graph_break()
        return functional.gelu(self.after(scores)).pow(2).mean()


@pytest.mark.slow
def test_a_policy_applies_on_all_sides_of_a_graph_break():
    torch.manual_seed(0)
    model, batch = Broken(), {"tokens": torch.randint(0, 50, (2, 24))}
    policy = {"body.blocks.*:gelu": "must_recompute", "after": "must_save"}
    plain = train_plain(model, batch)
    wrap(model, batch, "100%", graph_breaks="plan", policy=policy)
    plan = hybridremat.get_plan(model)
    assert [(pin.pattern, pin.values) for pin in plan.pins] == [("body.blocks.*:gelu", 2), ("after", 1)]
    assert [sum(pin.values for pin in part.pins) for part in plan.parts] == [2, 1]
    trained = train(model, batch)
    assert plain.differences(trained) == [] and max(trained.peaks) <= plan.memory_limit


def test_a_pattern_that_matches_on_no_side_of_a_break_and_a_value_that_crosses_it():
    torch.manual_seed(0)
    model, batch = Broken(), {"tokens": torch.randint(0, 50, (2, 24))}
    for policy, text in (
        ({"before": "must_save"}, "'before' matches no op"),
        ({"*:tanh": "must_recompute", "after": "must_save"}, "or crosses a graph break"),
    ):
        with pytest.raises(hybridremat.PolicyError, match=text):
            wrap(model, batch, "100%", graph_breaks="plan", policy=policy)


def test_a_model_without_breaks_may_drop_what_a_part_would_hold():
    model, batch = small("transformer")
    wrap(model, batch, graph_breaks="plan", policy={"head": "must_recompute"})
    assert hybridremat.get_plan(model).pins[0].values == 1


def test_torch_compile_takes_a_policy():
    torch._dynamo.reset()
    model, batch = small("transformer")
    plans = []
    options = {"memory_limit": "90%", "policy": {"*:gelu": "must_recompute"}, "on_plan": plans.append}
    options |= {"cost_model": "flops", "workers": 1, "progress": False}
    compiled = torch.compile(model, backend="hybridremat", dynamic=False, options=options)
    loss_in(compiled(**batch)).backward()
    assert [(pin.pattern, pin.values) for pin in plans[0].pins] == [("*:gelu", 2)]


class Named(nn.Module):
    """Layers under names of one's choice: the graph is the same whatever they are called."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(32, 32))

    def forward(self, x, first: int = 0):
        for name in self.names[first : first + 2]:
            x = functional.gelu(getattr(self, name)(x))
        return x.sin().mean()


def runs_of(plan: hybridremat.Plan, module: str) -> int:
    (op,) = [o for o in plan.details.graph.ops if o.module == module and o.phase is not Phase.BACKWARD]
    return plan.schedule.steps.count(op.id)


def test_a_kept_plan_is_for_the_modules_that_its_policy_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("HYBRIDREMAT_CACHE_SIZE", "64MiB")
    batch, policy = {"x": torch.randn(32, 32)}, {"a": "must_recompute", "b": "must_save"}
    for names in ("ab", "ba", "ab"):
        plan = hybridremat.plan(Named(names), kwargs=batch, memory_limit="120%", policy=policy, **HOW)
        assert (runs_of(plan, "a"), runs_of(plan, "b")) == (2, 1)
        assert plan.blocks[0].modules[0] == names[0]
    assert next(iter(plan.timings)) == "read the kept plan"


def test_a_plan_from_a_file_is_for_the_modules_that_its_policy_names(tmp_path):
    batch, policy = {"x": torch.randn(32, 32)}, {"a": "must_recompute"}
    hybridremat.plan(Named("ab"), kwargs=batch, memory_limit="120%", policy=policy, **HOW).save(
        tmp_path / "p"
    )
    with pytest.raises(hybridremat.PlanMismatchError, match=r"op .* is in 'b', and was in 'a'"):
        hybridremat.wrap(Named("ba"), kwargs=batch, plan=tmp_path / "p", **HOW)
    hybridremat.wrap(Named("ab"), kwargs=batch, plan=tmp_path / "p", **HOW)


def test_equal_graphs_of_one_model_through_other_modules_are_planned_each_by_the_policy():
    model, policy = Named("abc"), {"a": "must_recompute", "b": "must_save"}
    batch = {"x": torch.randn(32, 32)}
    wrap(model, batch | {"first": 0}, "120%", policy=policy)
    first, second = hybridremat.get_plan(model), hybridremat.prepare(model, kwargs=batch | {"first": 1})
    assert (runs_of(first, "a"), runs_of(first, "b")) == (2, 1)
    assert (runs_of(second, "b"), runs_of(second, "c")) == (1, 1) and [p.values for p in second.pins] == [
        0,
        1,
    ]
