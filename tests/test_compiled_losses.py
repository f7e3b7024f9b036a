"""Losses by chunks of rows in steps that Inductor compiles."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.compiler import compiled_losses
from hybridremat.graph.rewrites.by_chunks import loss_by_chunks
from support.compiled import needs_compiler, nothing_kept_by_inductor
from support.language_heads import CLASSES, KINDS, Head, gradients, reference, tokens
from support.wrapping import HOW

pytestmark = needs_compiler
COMPILED = {"compiler": "inductor", **HOW, "progress": False}


@pytest.fixture(autouse=True)
def _nothing_kept_by_inductor():
    with nothing_kept_by_inductor():
        yield


def wrapped(model, batch, limit="100%", **how):
    return hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=limit, **COMPILED, **how)


SLOW = [pytest.param(how, marks=pytest.mark.slow, id="-".join(how)) for how in KINDS[:-1]]


@pytest.mark.parametrize("how", [*SLOW, KINDS[-1]], ids="-".join)
def test_gradients_are_as_near_to_float64_as_compiled_ones_of_whole_logits(how):
    model, batches = Head(*how), [tokens(8, 33, seed) for seed in range(8)]
    made = wrapped(model, batches[0], rewrites="chunked")
    steps = [made, model, *([] if made is model else [wrapped(model, batches[0])])]
    mine, plain, whole = ([gradients(each, batch) for batch in batches] for each in steps)
    exact = [reference(model, batch) for batch in batches]
    for name in exact[0]:
        truth = torch.stack([step[name] for step in exact])
        mine_off, plain_off, whole_off = (
            (torch.stack([step[name] for step in each]) - truth).norm() for each in (mine, plain, whole)
        )
        rounding = torch.finfo(torch.float32).eps * truth.norm()
        assert mine_off <= max(1.5 * plain_off, 1.5 * whole_off, rounding), name
    plan = hybridremat.get_plan(made)
    assert hybridremat.measure(made, kwargs=batches[0]).peak == plan.predicted_peak


@cache
def peak_of_whole_logits():
    plan = hybridremat.plan(Head(), kwargs=tokens(32, 64), memory_limit="100%", **COMPILED)
    return plan.predicted_peak


@pytest.mark.parametrize(
    ("how", "limit"),
    [
        ({}, "100%"),
        pytest.param({}, "95%", marks=pytest.mark.slow),
        pytest.param({"gradients": "in_backward"}, "100%", marks=pytest.mark.slow),
        ({"gradients": "in_backward"}, "95%"),
    ],
    ids=str,
)
def test_the_logits_never_exist_whole(how, limit):
    model, batch = Head(), tokens(32, 64)
    logits = batch["tokens"].numel() * CLASSES * 4
    made = wrapped(model, batch, limit, rewrites="chunked", **how)
    plan = hybridremat.get_plan(made)
    if how:
        for parameter in made.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    assert hybridremat.measure(made, kwargs=batch).peak <= plan.predicted_peak < 0.9 * logits
    assert peak_of_whole_logits() > 1.5 * plan.predicted_peak


class TwoHeads(nn.Module):
    """Two losses: one has too few classes for chunks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, 16)
        self.head, self.other = nn.Linear(16, CLASSES), nn.Linear(16, 4)

    def forward(self, tokens, labels):
        hidden, labels = self.embed(tokens).flatten(0, 1), labels.flatten()
        few = functional.cross_entropy(self.other(hidden), labels % 4)
        return functional.cross_entropy(self.head(hidden), labels) + few


def test_a_loss_that_is_left_whole_is_decomposed_as_ever():
    model, batch = TwoHeads(), tokens(8, 32)
    made = wrapped(model, batch, rewrites="chunked")
    targets = [op.target for op in hybridremat.get_plan(made).details.graph.ops]
    assert "aten._log_softmax.default" in targets and "hybridremat.loss_by_chunks" in targets
    mine, plain = trained(made, batch), trained(model, batch)
    for name, value in plain.items():
        torch.testing.assert_close(mine[name], value)
    assert hybridremat.measure(made, kwargs=batch).peak == hybridremat.get_plan(made).predicted_peak


def trained(model, batch):
    loss = model(**batch)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def test_a_plan_file_is_followed(tmp_path):
    model, batch = Head("tied"), tokens(16, 64)
    first = wrapped(model, batch, rewrites="chunked")
    hybridremat.get_plan(first).save(tmp_path / "plan.json")
    second = hybridremat.wrap(model, kwargs=batch, plan=tmp_path / "plan.json", progress=False)
    assert gradients(first, batch).keys() == gradients(second, batch).keys()
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_the_op_names_its_body_by_what_it_computes():
    """So that code from a cache runs what was planned, and nothing else."""

    def called(*, double=False):
        graph = torch.fx.Graph()
        rows = graph.placeholder("rows")
        body = torch.fx.Graph()
        given = body.placeholder("given")
        body.output((body.call_function(torch.ops.aten.mul.Tensor, (given, 2.0 if double else 1.0)),))
        module = torch.fx.GraphModule(nn.Module(), body)
        name = graph.get_attr("body")
        node = graph.call_function(loss_by_chunks, (name, ["rows"], [2, 2], [rows], []))
        node.meta["val"] = (torch.empty(4, 3),)
        graph.output(node)
        whole = torch.fx.GraphModule({"body": module}, graph)
        compiled_losses.as_ops(whole)
        (call,) = whole.graph.find_nodes(op="call_function", target=compiled_losses.LOSS)
        return whole, call.args[-1]

    (first, one), (_, same), (second, other) = called(), called(), called(double=True)
    assert one == same != other
    given = torch.randn(4, 3)
    assert torch.equal(first(given)[0], given) and torch.equal(second(given)[0], 2 * given)
