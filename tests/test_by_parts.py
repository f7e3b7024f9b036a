"""Ops run by parts: the trials, the checker, real steps against plain PyTorch, and what is taken for them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import capture, compile_step
from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.errors import LimitError, ModelError, PlanError
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.random_numbers import DRAWN, repeated
from hybridremat.graph.joint import Phase, Schedule, as_plain, ops_by_parts, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.private_torch import FakeTensor
from hybridremat.graph.rewrites import JointRewrites, by_parts, loss_fusion, trial
from hybridremat.graph.rewrites import part_kernels as kernels
from hybridremat.graph.rewrites.by_parts import BY_PARTS
from hybridremat.graph.rewrites.part_kernels import KERNELS
from hybridremat.planning import pipeline
from hybridremat.planning.rank_agreement import _memory_text, _with_maxima
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.parts import PartsChooser, parts_for_nothing
from support.examples import examples
from support.training import FixedPlanner, train, train_plain
from support.wrapping import HOW, least_limit, three_limits, wrap

ATEN = torch.ops.aten


class Net(nn.Module):
    """Convolutions, BatchNorm, dropout, and a loss over classes with ignored rows."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 32, 3, padding=1) for c in (3, 32, 32))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(3))
        self.head = nn.Linear(32, 500)

    def forward(self, x, labels):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.dropout(functional.relu(norm(conv(x))), 0.2, self.training)
        rows = self.head(x.flatten(2).transpose(1, 2).flatten(0, 1))
        return {"loss": functional.cross_entropy(rows, labels, ignore_index=3), "rows": rows}


def net():
    torch.manual_seed(0)
    labels = torch.randint(0, 20, (4 * 256,))
    return Net(), {"x": torch.randn(4, 3, 16, 16), "labels": labels}


class PartedPlanner(FixedPlanner):
    """Hands out the plain step, or one in which every op runs twice, with all ops by parts that can be."""

    def __init__(self, twice, worth):
        super().__init__()
        self.twice, self.worth = twice, worth

    def choose(self, step):
        made = super().choose(step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(by_parts, "WORTH", self.worth)
            graph = ops_by_parts(BY_PARTS.applied(made.step, KernelStore()).graph)
        self.schedule = plain_schedule(graph)
        if self.twice:
            again = [op.id for op in graph.ops if op.phase is not Phase.BACKWARD and op.recomputable]
            split = self.schedule.num_forward
            forward, rest = self.schedule.steps[:split], self.schedule.steps[split:]
            self.schedule = Schedule((*forward, *again, *rest), len(forward))
        self.step = replace(made.step, graph=graph)
        self.predicted = step_memory(graph, self.schedule).peak
        return replace(made, step=self.step, schedule=self.schedule)


def run_by_parts(model, batch, *, twice, worth=inf):
    """``worth``: by parts go all ops that can, or only those that then take less than this share."""
    planner = PartedPlanner(twice, worth)
    backend = Backend(pipeline.PlannedPartition(planner.choose, rewriting=JointRewrites(None)))
    compiled = compile_step(model, backend)
    capture(model, compiled, backend, (), batch).plan()
    model._compiled_call_impl = compiled
    return planner


@pytest.mark.parametrize("twice", [False, True])
def test_steps_with_all_ops_by_parts_train_as_plain(twice):
    model, batch = net()
    expected = train_plain(model, batch)
    planner = run_by_parts(model, batch, twice=twice)
    names = {op.runs.kernel for op in planner.step.graph.ops}
    others = {"convolution_backward_by_samples", "convolution_backward_by_halves", "loss_by_rows"}
    assert names | others == {*KERNELS, ""}
    trained = train(model, batch)
    assert expected.differences(trained) == []
    assert set(trained.peaks) == {planner.predicted}


@cache
def planned_net(worth=inf):
    model, batch = net()
    return run_by_parts(model, batch, twice=False, worth=worth)


def test_each_variant_takes_less_and_the_plain_graph_has_none():
    graph = planned_net(by_parts.WORTH).step.graph
    able = [op for op in graph.ops if op.variants]
    assert {op.variant for op in able} == {1} and len(able) >= 8
    for op in able:
        own, parts = op.variants
        assert (own.kernel, own.parts) == ("", 1) and parts.parts > 1
        assert parts.temp < own.temp or (parts.overwrites and not own.overwrites)
    plain = as_plain(graph)
    assert {op.variant for op in plain.ops} == {0} and all(op.temp == op.runs_alone.temp for op in plain.ops)


def bare(step):
    """The step with every op in its own kernel alone."""
    ops = tuple(replace(op.run_as(0), variants=()) for op in step.graph.ops)
    return replace(step, graph=replace(step.graph, ops=ops))


def test_a_kernel_with_other_bits_is_not_used(monkeypatch):
    """Nor one that leaves the generator in another state."""
    step, store = planned_net().step, KernelStore()

    def other(given, probability, train, *, parts, over=None):
        made = ATEN.native_dropout.default(given, probability, train)
        torch.rand(1)  # the bits are the same
        return made

    wrong = {
        ATEN.native_dropout.default: other,
        ATEN.native_batch_norm_backward.default: lambda *a, parts, over=None: tuple(
            t + 1 for t in ATEN.native_batch_norm_backward.default(*a)
        ),
    }
    table = {
        target: tuple(replace(each, run=wrong.get(target, each.run)) for each in known)
        for target, known in kernels._BY_OP.items()
    }
    monkeypatch.setattr(kernels, "_BY_OP", table)
    found = {op.target for op in BY_PARTS.applied(bare(step), store).graph.ops if op.variants}
    assert found and not any("dropout.default" in name or "batch_norm_backward" in name for name in found)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_a_loss_by_rows_is_that_of_autograd(reduction, weighted):
    """Rows that do not divide evenly, ignored ones, and the result over the log-probabilities."""
    torch.manual_seed(0)
    logits, labels = torch.randn(37, 50, requires_grad=True), torch.randint(0, 50, (37,))
    labels[::5] = -100
    weight = torch.rand(50) if weighted else None
    loss = functional.cross_entropy(logits, labels, weight, reduction=reduction)
    arriving = torch.randn_like(loss)
    loss.backward(arriving)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    probabilities = logits.detach().log_softmax(-1)
    _, total = ATEN.nll_loss_forward.default(probabilities, labels, weight, number, -100)
    given = (arriving, probabilities, labels, weight, number, -100, total)
    assert torch.equal(loss_fusion.LOSS_BACKWARD(*given), logits.grad)
    assert torch.equal(kernels.loss_backward_by_rows(*given, parts=8), logits.grad)
    made = kernels.loss_backward_by_rows(*given, parts=8, over=probabilities)
    assert made is probabilities and torch.equal(made, logits.grad)


class Classifier(nn.Module):
    """Log-probabilities along the last dimension, by its number or from the end."""

    def __init__(self, dim):
        super().__init__()
        self.body, self.dim = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50)), dim

    def forward(self, x, labels):
        return functional.nll_loss(functional.log_softmax(self.body(x), self.dim), labels)


@pytest.mark.parametrize("dim", [1, -1])
def test_a_loss_over_the_last_dimension_is_planned_however_it_is_named(dim):
    torch.manual_seed(0)
    model, batch = Classifier(dim), {"x": torch.randn(37, 16), "labels": torch.randint(0, 50, (37,))}
    plain = train_plain(model, batch)
    wrap(model, batch, least_limit(model, batch))
    assert plain.differences(train(model, batch)) == []


def test_trials_are_kept(monkeypatch):
    step, store = planned_net().step, KernelStore()
    first = BY_PARTS.applied(step, store)
    monkeypatch.setattr(by_parts, "tried", lambda *_: pytest.fail("tried again"))
    assert BY_PARTS.applied(step, store).graph == first.graph


def test_what_cannot_pay_is_not_tried(monkeypatch):
    """A kernel without workspace, whose result goes over nothing that it reads."""
    step, tried = planned_net().step, []
    monkeypatch.setattr(by_parts, "laid_out_alike", lambda *_: ())
    monkeypatch.setattr(by_parts, "workspaces", lambda trials, _: tried.extend(t.node for t in trials) or {})

    def nodes(temp):
        tried.clear()
        ops = tuple(replace(op, temp=temp, overwrites=()) for op in bare(step).graph.ops)
        BY_PARTS.applied(replace(step, graph=replace(step.graph, ops=ops)), KernelStore())
        return set(tried)

    assert not nodes(0) and len(nodes(10**9)) >= 4


def test_each_way_by_parts_runs_once_over_each_value_and_beside_them(monkeypatch):
    """In each draw. And an input that refuses to be written over leaves the way as it is without."""
    step, ran = planned_net().step, []
    monkeypatch.setattr(trial, "draws", lambda _: 1)

    def counted(run):
        def by_parts(*args, parts, over=None):
            ran.append(over is not None)
            if over is not None:
                raise RuntimeError("not over this one")
            return run(*args, parts=parts)

        by_parts.__name__ = run.__name__
        return by_parts

    table = {
        target: tuple(replace(each, run=counted(each.run)) for each in known)
        for target, known in kernels._BY_OP.items()
    }
    monkeypatch.setattr(kernels, "_BY_OP", table)
    store = KernelStore()
    found = BY_PARTS.applied(bare(step), store)
    assert len(ran) == len(store.by_parts) and set(ran) == {False, True}
    assert {workspace for name, workspace in store.by_parts.items() if " over " in name} == {-1}
    parted = [op.variants[1] for op in found.graph.ops if op.variants]
    assert parted and not any(each.overwrites for each in parted)


@pytest.mark.parametrize(
    ("workspace", "tried"), [(0, ["samples"]), (10**8, ["samples", "halves"]), (-1, ["samples"])]
)
def test_a_further_way_by_parts_is_tried_where_the_first_has_the_same_bits_and_saves_little(
    workspace, tried, monkeypatch
):
    """Whatever a store knows of the further one already."""
    step, store, names = planned_net().step, KernelStore(), []
    target = ATEN.convolution_backward.default
    ops = [op for op in bare(step).graph.ops if step.op_nodes[op.id].target is target]
    ops = [replace(op, temp=10**6, overwrites=()) for op in ops if step.op_nodes[op.id].args[-1][0]]
    graph = replace(step.graph, ops=tuple({op.id: op for op in ops}.get(op.id, op) for op in step.graph.ops))

    def figures(trials, _):
        ways = [way for each in trials for way in each.ways]
        names.extend(way.form.target.__name__.rsplit("_", 1)[1] for way in ways if way.over is None)
        return {way.name: workspace for way in ways}

    monkeypatch.setattr(by_parts, "workspaces", figures)
    monkeypatch.setattr(by_parts, "parted_kernels", lambda n: known(n) if n.target is target else [])
    known = kernels.parted_kernels
    step = replace(step, graph=graph)
    first = BY_PARTS.applied(step, store).graph
    assert ops and names == [each for each in tried for _ in ops]
    further = {form.name for site in BY_PARTS.find(step) for form in site.forms[1:]}
    store.by_parts.update(dict.fromkeys(further, 0))
    assert further and (BY_PARTS.applied(step, store).graph == first) == ("halves" not in tried)


def test_the_same_kernel_may_write_over_what_the_step_makes_and_not_over_what_it_is_given():
    """Whichever comes first, and whatever the store knows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(256, 256), nn.Dropout(0.2), nn.Linear(256, 1))
    planner = run_by_parts(model, {"input": torch.randn(512, 256)}, twice=False)
    step, store = bare(planner.step), KernelStore()
    first, again = (BY_PARTS.applied(step, store).graph for _ in range(2))
    assert first == again
    dropouts = [op for op in first.ops if op.target == "aten.native_dropout.default"]
    assert [bool(op.variants and op.variants[1].overwrites) for op in dropouts] == [False, True]


def test_parts_are_timed_on_real_tensors_in_the_middle_of_a_trace(monkeypatch):
    """Where every tensor that is made without care is a fake one."""
    timed = []

    class Clock:
        def least(self, call):
            timed.extend(each for each in call.args if isinstance(each, torch.Tensor))
            return 1000

    class TimedPlanner(PartedPlanner):
        def choose(self, step):
            made = super().choose(step)
            BY_PARTS.timed(BY_PARTS.applied(step, KernelStore()), KernelStore())
            return made

    monkeypatch.setattr(by_parts, "clock_for", lambda _: Clock())
    model, batch = net()
    planner = TimedPlanner(twice=False, worth=inf)
    backend = Backend(pipeline.PlannedPartition(planner.choose, rewriting=JointRewrites(None)))
    capture(model, compile_step(model, backend), backend, (), batch).plan()
    assert timed and not any(isinstance(each, FakeTensor) for each in timed)


def test_numbers_repeat_after_a_prime():
    draws = []

    def draw(count):
        draws.append(count)
        return torch.arange(count)

    assert torch.equal(repeated(200_000, draw), torch.arange(200_000) % DRAWN)
    assert torch.equal(repeated(DRAWN, draw), torch.arange(DRAWN)) and draws == [DRAWN, DRAWN]
    assert all(DRAWN % divisor for divisor in range(2, 257))


def test_times_of_parts_are_never_below_the_ops_own():
    step = BY_PARTS.timed(planned_net().step, KernelStore())
    for op in step.graph.ops:
        assert all(each.time >= op.variants[0].time for each in op.variants)


@examples(30)
@given(st.integers(0, 2**30))
def test_fewest_parts_keep_the_peak(seed):
    """Each that runs by parts is needed, unless that costs nothing."""
    graph = parts_for_nothing(planned_net().step.graph)
    random = torch.Generator().manual_seed(seed)
    able = [op.id for op in graph.ops if op.variants]
    few = {able[i] for i in torch.randperm(len(able), generator=random)[:5].tolist()}
    slow = {op: int(torch.randint(0, 100_000, (1,), generator=random)) for op in few}
    ops = [
        replace(op, variants=(op.variants[0], replace(op.variants[1], time=op.time + slow[op.id])))
        if op.id in few
        else replace(op, variants=(), variant=0)
        for op in graph.ops
    ]
    graph = replace(graph, ops=tuple(ops))
    point = Judge(graph)(plain_schedule(graph))
    found, *others = PartsChooser(Judge(graph))(point)
    assert found.peak <= point.peak and found.parted <= few
    times = [each.time for each in (found, *others)]
    assert times == sorted(times, reverse=True)
    for each in others:
        assert each.peak == step_memory(ops_by_parts(graph, each.parted), each.schedule).peak
    if others:
        assert times[-1] == point.time and all(slow[op] == 0 for op in others[-1].parted)
    for op in found.parted:
        assert not fits(graph, point, found.parted - {op})


def fits(graph, point, parted):
    return step_memory(ops_by_parts(graph, parted), point.schedule).peak <= point.peak


def test_ranks_run_by_parts_what_all_of_them_can():
    """With the most workspace of any, and over what all may write."""
    mine = ops_by_parts(planned_net(by_parts.WORTH).step.graph, ())
    first, second, third = [op.id for op in mine.ops if op.variants][:3]
    ops = list(mine.ops)
    ops[first] = replace(ops[first], variants=())
    own, parts = ops[second].variants
    ops[second] = replace(ops[second], variants=(own, replace(parts, temp=parts.temp + 7, overwrites=())))
    own, parts = ops[third].variants
    ops[third] = replace(ops[third], variants=(own, replace(parts, kernel="another")))
    theirs = replace(mine, ops=tuple(ops))
    for graph in (mine, theirs):
        agreed = _with_maxima(graph, [_memory_text(mine), _memory_text(theirs)]).ops
        assert agreed[first].variants == agreed[third].variants == ()
        assert agreed[second].variants[1].temp == mine.ops[second].variants[1].temp + 7
        assert agreed[second].variants[1].overwrites == ()
        rest = [op for op in mine.ops if op.id not in (first, second, third)]
        assert [agreed[op.id].variants for op in rest] == [op.variants for op in rest]


# The checker


def emitted(step):
    return emit(step, plain_schedule(step.graph))


@pytest.mark.parametrize(
    "target", [kernels.loss_backward_by_rows, kernels.dropout_by_rows, kernels.convolution_by_samples]
)
def test_a_kernel_by_parts_of_other_inputs_is_refused(target):
    planned = planned_net()
    forward, backward = emitted(planned.step)
    check(planned.step, forward, backward)
    module = forward if target is kernels.dropout_by_rows else backward
    if target is kernels.convolution_by_samples:
        backwards = (kernels.convolution_backward_by_samples, kernels.convolution_backward_by_halves)
        call = next(n for n in module.graph.nodes if n.target in backwards)
        call.target = target
    else:
        calls = [n for n in module.graph.nodes if n.target is target]
        call = calls[0]
        call.args = (*call.args[:-1], 0.5 if isinstance(call.args[-1], float) else None)
    with pytest.raises(PlanError):
        check(planned.step, forward, backward)


def test_what_a_kernel_by_parts_writes_over_must_not_be_read_again():
    planned = planned_net()
    forward, backward = emitted(planned.step)
    for module in (forward, backward):
        for node in module.graph.nodes:
            if node.op == "call_function" and node.kwargs.get("over") is not None:
                gone = (node.kwargs["over"],)
                node.append(module.graph.create_node("call_function", ATEN.neg.default, gone))
                with pytest.raises(PlanError, match="which has been written over"):
                    check(planned.step, forward, backward)
                return
    pytest.fail("nothing is written over")


def test_ops_that_were_made_one_have_to_compute_what_they_did():
    planned = planned_net()
    step = planned.step
    assert step.originals.exact is not step.module
    target = ATEN.nll_loss_backward.default
    (call,) = step.originals.exact.graph.find_nodes(op="call_function", target=target)
    call.args = (*call.args[:5], 4, *call.args[6:])
    forward, backward = emitted(step)
    try:
        with pytest.raises(PlanError, match="ops were made one that do not compute the same"):
            check(step, forward, backward)
    finally:
        call.args = (*call.args[:5], 3, *call.args[6:])


# Plans


def test_plans_run_by_parts_only_what_has_to():
    model, batch = net()
    loose, *_, least = three_limits(model, batch)
    plans = {at: hybridremat.plan(model, kwargs=batch, memory_limit=at, **HOW) for at in (loose, least)}
    parted = {at: sum(op.variant for op in plan.details.graph.ops) for at, plan in plans.items()}
    assert parted[least] > 0
    none = hybridremat.plan(model, kwargs=batch, memory_limit="100%", rewrites="none", **HOW)
    assert plans[least].predicted_peak < none.least_peak
    assert "kernel calls go by rows, channels or samples" in str(plans[least])
    assert "by parts" not in str(none)


@pytest.mark.parametrize("at", [0, 2])
def test_planned_steps_train_as_plain(at):
    model, batch = net()
    limit = three_limits(model, batch)[at]
    expected = train_plain(model, batch)
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, **HOW)
    trained = train(model, batch)
    assert expected.differences(trained) == [] and max(trained.peaks) <= limit
    assert set(trained.peaks) == {hybridremat.get_plan(model).predicted_peak}


def test_a_plan_file_brings_its_parts(tmp_path):
    model, batch = net()
    path = tmp_path / "plan.json"
    plan = hybridremat.plan(model, kwargs=batch, memory_limit=least_limit(model, batch), **HOW)
    plan.save(path)
    expected = train_plain(model, batch)
    hybridremat.wrap(model, kwargs=batch, plan=path, progress=False)
    trained = train(model, batch)
    assert expected.differences(trained) == [] and max(trained.peaks) <= plan.memory_limit
    told = [v.parts for block in range(len(plan.blocks)) for v in plan.explain(block).values if v.parts]
    assert all(each.startswith("by ") for each in told)


# The loss alone


def test_the_loss_alone_needs_less_and_is_the_same():
    model, batch = net()
    all_outputs, alone = least_limit(model, batch), least_limit(model, batch, outputs="loss")
    assert alone < all_outputs
    expected = train_plain(model, batch)
    hybridremat.wrap(model, kwargs=batch, memory_limit=alone, outputs="loss", **HOW)
    assert model(**batch)["rows"] is None
    torch.manual_seed(0)
    again, _ = net()
    hybridremat.wrap(again, kwargs=batch, memory_limit=alone, outputs="loss", **HOW)
    trained = train(again, batch)
    assert expected.differences(trained) == [] and max(trained.peaks) <= alone
    again.eval()
    assert again(**batch)["rows"] is not None


@pytest.mark.parametrize(
    "other", [{"grad_outputs": "all"}, {"hold_outputs": True}]
)
def test_what_needs_other_outputs_excludes_the_loss_alone(other):
    model, batch = net()
    with pytest.raises(LimitError, match=r'outputs="loss" and .* cannot be combined'):
        hybridremat.wrap(model, kwargs=batch, memory_limit="90%", outputs="loss", **other, **HOW)


def test_a_model_without_a_loss_cannot_return_it_alone():
    model = nn.Linear(8, 8)
    with pytest.raises(ModelError, match="no output of this model is a scalar"):
        hybridremat.wrap(model, (torch.randn(4, 8),), memory_limit="90%", outputs="loss", **HOW)
    assert model._compiled_call_impl is None
