"""The list of rewrites: each has a place in a small step, passes here, and is proven by the checker."""

from __future__ import annotations

import ast
import inspect
import types
from collections import Counter
from dataclasses import replace
from math import inf

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import capture, compile_step
from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.errors import PlanError
from hybridremat.graph import rewrites
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.joint import ops_by_parts, plain_schedule
from hybridremat.graph.private_torch import OpOverload
from hybridremat.graph.rewrites import (
    BY_PARTS,
    IN_PLACE,
    LOSS_BY_CHUNKS,
    LOSS_FUSION,
    REWRITES,
    SLICES,
    Form,
    Joint,
    JointRewrites,
    by_parts,
)
from hybridremat.graph.rewrites.by_chunks import loss_by_chunks
from hybridremat.graph.rewrites.part_kernels import KERNELS
from hybridremat.graph.rewrites.slices import INPUT_GRADIENT
from hybridremat.graph.rewrites.trial import Trial, Way, tried
from hybridremat.graph.tracing.trace import NOT_REWRITTEN
from hybridremat.planning.pipeline import PlannedPartition
from support.training import FixedPlanner

ATEN = torch.ops.aten
each_rewrite = pytest.mark.parametrize("rewrite", REWRITES, ids=lambda each: each.name)
each_exact = pytest.mark.parametrize(
    "rewrite", [each for each in REWRITES if each.exact], ids=lambda each: each.name
)


class Net(nn.Module):
    """A concatenation, a convolution, elementwise ops, dropout, a loss over classes: all have a place."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(3, 8, 3, padding=1) for _ in range(2))
        self.joint, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8, 200)

    def forward(self, x, labels):
        joined = torch.cat([branch(x).relu() for branch in self.branches], 1)
        rows = functional.dropout((self.joint(joined).abs() * 2 + 1).sqrt(), 0.2)
        rows = rows.flatten(2).transpose(1, 2).flatten(0, 1)
        return functional.cross_entropy(self.head(rows), labels)


class Planner(FixedPlanner):
    """The plain step, with all ops in place and by parts that pass, as the list says."""

    def choose(self, step):
        made = super().choose(step)
        self.bare = self.step
        for each in rewrites.REWRITES:
            self.step = each.applied(self.step, KernelStore()) if each.of_ops else self.step
        self.step = replace(self.step, graph=ops_by_parts(self.step.graph))
        return replace(made, step=self.step, schedule=plain_schedule(self.step.graph))


def step_with(rewriting):
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 200, (4 * 256,))}
    planner, model = Planner(), Net()
    backend = Backend(PlannedPartition(planner.choose, rewriting=rewriting))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_parts, "WORTH", inf)
        capture(model, compile_step(model, backend), backend, (), batch).plan()
    return planner.bare if rewriting is None else planner.step


def rewriting(*, chunked=False):
    return JointRewrites(lambda _: KernelStore(), chunked=chunked)


def emitted(step):
    return emit(step, plain_schedule(step.graph))


# Places and trials


@each_rewrite
def test_each_finds_a_place_and_passes_here(rewrite):
    """Where it has to be tried, trials are kept: a second look runs nothing, and finds the same."""
    found = []

    def look(graph):
        sites, store = rewrite.find(graph), KernelStore()
        assert sites
        if rewrite.proven is not None:
            first = rewrite.proven(graph, sites, store)
            kept = len(store.in_place) + len(store.by_parts)
            again = rewrite.proven(graph, sites, store)
            assert first and kept and again == first and len(store.in_place) + len(store.by_parts) == kept
        found.append(len(sites))
        return NOT_REWRITTEN

    if rewrite.of_ops:
        look(step_with(None))
    else:
        step_with(lambda module, num_outputs: look(Joint(module, num_outputs)))
    assert len(found) == 1


def with_allocation(x):
    torch.empty(1 << 16)
    return -x


def with_draw(x):
    torch.rand(1)
    return -x


def refused(x):
    raise ValueError("not of this size")


@pytest.mark.parametrize(
    ("run", "figures"),
    [
        (lambda x: -x, (32 * 8 * 4, 32 * 8 * 4)),
        (with_allocation, (1 << 18, 32 * 8 * 4)),
        (lambda x: (-x).nextafter(x), None),
        (lambda x: torch.where(x.abs() > 100, x, -x), None),
        (lambda x: (-x).t().contiguous().t(), None),
        (with_draw, None),
        (refused, None),
    ],
    ids=["the same", "workspace", "other bits", "rarely", "other strides", "another draw", "refused"],
)
def test_a_trial_tells_what_is_not_the_same_and_what_is_allocated(run, figures, caplog):
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(ATEN.neg.default, (x,))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(32, 8)
    trial = Trial(node, (Way("a way", Form(run, "")),))
    assert tried([trial], "cpu", "as a test") == {"a way": figures}
    assert ("cannot be tried as a test: not of this size" in caplog.text) == (run is refused)


def test_a_way_that_differs_on_later_numbers_is_not_the_same():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(ATEN.neg.default, (x,))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(32, 8)
    first: list[torch.Tensor] = []

    def by_chance(x):
        first.append(x)
        return -x if torch.equal(x, first[0]) else -x + 1

    trial = Trial(node, (Way("a way", Form(by_chance, "")),))
    assert tried([trial], "cpu", "as a test") == {"a way": None}


def test_all_are_written_into_a_step():
    step = step_with(rewriting())
    calls = Counter(node.target for node in step.op_nodes)
    assert calls[INPUT_GRADIENT] == 2 and calls[ATEN.nll_loss_backward.default] == 0
    forward, backward = emitted(step)
    targets = {node.target for module in (forward, backward) for node in module.graph.nodes}
    assert len(targets & {kernel.run for kernel in KERNELS.values()}) >= 4
    assert any(isinstance(each, OpOverload) and each._schema.is_mutable for each in targets)
    check(step, forward, backward)


@pytest.mark.parametrize("rewrite", [SLICES, IN_PLACE, BY_PARTS], ids=lambda each: each.name)
def test_what_does_not_pass_is_not_written(rewrite, monkeypatch):
    broken(monkeypatch, rewrite, proven=lambda graph, sites, store: [])
    step = step_with(rewriting())
    written = {
        SLICES.name: any(node.target is INPUT_GRADIENT for node in step.op_nodes),
        IN_PLACE.name: any(op.overwrites for op in step.graph.ops if not op.variant),
        BY_PARTS.name: any(op.variants for op in step.graph.ops),
    }
    assert [name for name, found in written.items() if not found] == [rewrite.name]


# The checker


def calls_of(modules, wanted):
    nodes = (node for each in modules for node in each.graph.nodes)
    return [node for node in nodes if node.op == "call_function" and wanted(node)]


def change(node, place, item):
    node.args = (*node.args[:place], item, *node.args[place + 1 :])


def other_op(modules):
    calls = calls_of(modules, lambda node: node.target is ATEN.sqrt.out)
    calls[0].target = ATEN.neg.out


def other_class(modules):
    calls = calls_of(modules, lambda node: "loss_backward" in getattr(node.target, "__name__", ""))
    change(calls[0], 5, 4)


def other_channels(modules):
    change(calls_of(modules, lambda node: node.target is INPUT_GRADIENT)[0], 3, 1)


def other_kernel(modules):
    samples, halves = (KERNELS[f"convolution_backward_by_{each}"].run for each in ("samples", "halves"))
    calls = calls_of(modules, lambda node: node.target in (samples, halves))
    calls[0].target = KERNELS["convolution_by_samples"].run


@pytest.mark.parametrize(
    "damage", [other_op, other_class, other_channels, other_kernel], ids=lambda each: each.__name__
)
def test_a_call_of_a_rewrite_that_computes_another_term_is_refused(damage):
    step = step_with(rewriting())
    modules = emitted(step)
    check(step, *modules)
    damage(modules)
    with pytest.raises(PlanError, match="refused by the checker"):
        check(step, *modules)


def test_a_loss_by_chunks_that_computes_another_term_is_refused():
    step = step_with(rewriting(chunked=True))
    modules = emitted(step)
    check(step, *modules)
    module = step.originals.exact or step.module
    (call,) = module.graph.find_nodes(op="call_function", target=loss_by_chunks)
    body = module.get_submodule(call.args[0].target)
    (loss,) = body.graph.find_nodes(op="call_function", target=ATEN.nll_loss_forward.default)
    change(loss, 4, 4)
    with pytest.raises(PlanError, match="a loss by chunks of rows does not compute the same"):
        check(step, *modules)


# A piece of a record that is broken


def broken(monkeypatch, rewrite, **pieces):
    listed = tuple(replace(each, **pieces) if each is rewrite else each for each in REWRITES)
    monkeypatch.setattr(rewrites, "REWRITES", listed)


@each_exact
def test_without_its_term_a_rewrite_is_refused(rewrite, monkeypatch):
    broken(monkeypatch, rewrite, term=lambda call, plain: None)
    with pytest.raises(PlanError, match="refused by the checker"):
        step_with(rewriting())


@each_exact
def test_with_the_term_of_another_call_a_rewrite_is_refused(rewrite, monkeypatch):
    def other(call, plain):
        right = rewrite.term(call, plain)
        return None if right is None else replace(right, kwargs={"alpha": 2})

    broken(monkeypatch, rewrite, term=other)
    with pytest.raises(PlanError, match="refused by the checker"):
        step_with(rewriting())


def test_a_rewrite_with_other_bits_is_not_taken_for_an_exact_one(monkeypatch):
    broken(monkeypatch, LOSS_BY_CHUNKS, exact=True)
    with pytest.raises(PlanError, match="do not compute the same"):
        step_with(rewriting())


@pytest.mark.parametrize("rewrite", [IN_PLACE, BY_PARTS], ids=lambda each: each.name)
def test_the_form_of_another_op_is_refused(rewrite, monkeypatch):
    forms = {IN_PLACE.name: (ATEN.sqrt.out, "out"), BY_PARTS.name: (ATEN.relu.default, "")}
    target, out = forms[rewrite.name]

    def other(step, op, over):
        right = rewrite.form(step, op, over)
        return None if right is None else (Form(target, out, right[0].fixed), right[1])

    broken(monkeypatch, rewrite, form=other)
    with pytest.raises(PlanError, match="refused by the checker"):
        step_with(rewriting())


def test_what_is_written_for_another_place_is_refused(monkeypatch):
    def swapped(joint, sites):
        for site in sites:
            bounds = reversed(list(site.slices.values()))
            site.slices.update(zip(list(site.slices), bounds, strict=True))
        return SLICES.write(joint, sites)

    broken(monkeypatch, SLICES, write=swapped)
    with pytest.raises(PlanError, match="do not compute the same"):
        step_with(rewriting())


@pytest.mark.parametrize("rewrite", [IN_PLACE, BY_PARTS, SLICES, LOSS_FUSION], ids=lambda each: each.name)
def test_terms_share_nothing_with_what_finds_tries_and_writes(rewrite):
    """But the ops and functions that are called: what a name of these stands for, no mistake can change."""
    pieces = (rewrite.find, rewrite.proven, rewrite.write, rewrite.form)
    others = set().union(*(reached(each) for each in pieces if each is not None))
    assert reached(rewrite.term) & others == set()


def reached(function, seen=None):
    """The functions and tables of the rewrites' files that a function goes by, and those that these do."""
    seen = set() if seen is None else seen
    space = vars(inspect.getmodule(function))
    tree = ast.parse(inspect.getsource(inspect.unwrap(function)))
    for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & space.keys() - {"_"}:
        item = space[name]
        is_function = isinstance(item, types.FunctionType) or hasattr(item, "__wrapped__")
        of_rewrites = is_function and item.__module__.startswith("hybridremat.graph.rewrites")
        if isinstance(item, (tuple, dict, frozenset)) or of_rewrites:
            key = name, space["__name__"]
            if key not in seen:
                seen.add(key)
                if of_rewrites:
                    reached(item, seen)
    return seen
