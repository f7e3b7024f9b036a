"""Losses over classes by chunks of rows: numbers against float64, memory, refusals, the checker."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional

import hybridremat
from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import capture, compile_step
from hybridremat.compiler.chunked_losses import refuse_other_losses
from hybridremat.errors import LimitError, ModelError, PlanError
from hybridremat.graph.rewrites import JointRewrites, loss_chunks
from hybridremat.graph.rewrites.by_chunks import (
    PRODUCT,
    ROWS,
    SUM,
    chunk_sizes,
    loss_by_chunks,
    loss_by_rows,
)
from hybridremat.graph.tracing.signature import target_text
from hybridremat.planning import pipeline
from support.examples import examples
from support.language_heads import CLASSES, KINDS, Head, gradients, reference, tokens
from support.training import FixedPlanner, allocated_peak
from support.wrapping import HOW, least_limit

ATEN = torch.ops.aten
FACTOR = 1.5  # how much farther from float64 than the plain step's a gradient may be
BATCHES = 12  # whose errors are taken together: one batch's are a matter of luck, up to 1.7 in 40 either way


def assert_as_near(model, plain, batches):
    """No tensor is farther from float64 than the plain model's by more than the factor, over the batches."""
    kinds = (partial(gradients, model), partial(gradients, plain), partial(reference, plain))
    each_kind = tuple([step(batch) for batch in batches] for step in kinds)
    for name in each_kind[0][0]:
        mine, plains, exact = (torch.stack([step[name] for step in each]) for each in each_kind)
        error, plain_error = (mine - exact).norm(), (plains - exact).norm()
        rounding = torch.finfo(torch.float32).eps * exact.norm()  # a plain error of nought allows for none
        assert error <= max(FACTOR * plain_error, rounding), name


def traced_by_chunks(model, batch):
    planner = FixedPlanner()
    rewriting = JointRewrites(None, chunked=True)
    backend = Backend(pipeline.PlannedPartition(planner.choose, rewriting=rewriting))
    compiled = compile_step(model, backend)
    capture(model, compiled, backend, (), batch).plan()
    return planner.step


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("how", KINDS, ids="-".join)
def test_gradients_are_as_near_to_float64_as_the_plain_ones(how):
    """At the least limit, which is kept and predicted to the byte."""
    model, batch = Head(*how), tokens()
    limit = least_limit(model, batch, rewrites="chunked")
    hybridremat.wrap(model, kwargs=batch, memory_limit=limit, rewrites="chunked", **HOW)
    assert_as_near(model, Head(*how), [tokens(seed=seed) for seed in range(BATCHES)])
    measured = hybridremat.measure(model, kwargs=batch)
    assert measured.peak == hybridremat.get_plan(model).predicted_peak <= limit


@pytest.mark.parametrize("how", [("z",), ("means",)], ids="-".join)
def test_sums_over_all_logits_do_not_make_them_whole(how):
    batch = tokens(16, 64)
    assert least_limit(Head(*how), batch, rewrites="chunked") < 16 * 64 * CLASSES * 4 / 2


def test_a_later_batch_of_few_rows_is_planned_as_well():
    model = Head()
    hybridremat.wrap(model, kwargs=tokens(), memory_limit="1MiB", rewrites="chunked", **HOW)
    for rows, length in ((1, 9), (1, 1)):
        assert_as_near(model, Head(), [tokens(rows, length, seed) for seed in range(BATCHES)])


def test_low_precision_is_added_up_in_float32():
    model, batch = Head("bias", dtype=torch.bfloat16), tokens(8, 64)
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", rewrites="chunked", **HOW)
    assert_as_near(model, Head("bias", dtype=torch.bfloat16), [batch])
    assert model.head.weight.grad.dtype is torch.bfloat16


def test_rows_that_are_all_ignored_give_what_the_plain_loss_gives():
    model, batch = Head(), tokens()
    batch["labels"] = torch.full_like(batch["labels"], 3)
    plain = gradients(model, batch)
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", rewrites="chunked", **HOW)
    found = gradients(model, batch)
    assert found["loss"].isnan() and plain["loss"].isnan()
    assert all(torch.equal(found[name].isnan(), each.isnan()) for name, each in plain.items())


def test_the_logits_never_exist_whole():
    model, batch = Head("capped", "float"), tokens(16, 64)
    logits = 16 * 64 * CLASSES * 4
    assert allocated_peak(lambda: gradients(model, batch)) > 3 * logits
    least = least_limit(model, batch, rewrites="chunked")
    assert least < logits / 2
    exact = least_limit(model, batch)
    assert exact > 1.9 * logits
    hybridremat.wrap(model, kwargs=batch, memory_limit=least, rewrites="chunked", **HOW)
    loss = model(**batch)
    assert allocated_peak(loss.backward) < logits / 2


def test_flops_are_the_same():
    model, batch = Head(), tokens()
    planner = FixedPlanner()
    backend = Backend(pipeline.PlannedPartition(planner.choose))
    capture(model, compile_step(model, backend), backend, (), batch).plan()
    ops = traced_by_chunks(model, batch).graph.ops
    assert sum(op.flops for op in ops) == sum(op.flops for op in planner.step.graph.ops)
    (op,) = (op for op in ops if "chunks" in op.target)
    assert op.flops > 0 and op.target == "hybridremat.loss_by_chunks" and op.recomputable


def test_an_optimizer_in_the_backward_and_a_plan_file(tmp_path):
    """Two steps with SGD; a plan that is loaded does the same, bit for bit."""

    def trained(**how):
        model, batch = Head("tied", "bias"), tokens(16, 64)
        optimizer = hybridremat.optimizer_in_backward(model, lambda p: torch.optim.SGD(p, lr=0.1))
        hybridremat.wrap(model, kwargs=batch, **how, cost_model="flops", progress=False)
        for _ in range(2):
            model(**batch).backward()
            optimizer.step()
        return model

    how = {"memory_limit": "90%", "rewrites": "chunked", "gradients": "in_backward"}
    first = trained(**how)
    hybridremat.get_plan(first).save(tmp_path / "plan.json")
    assert hybridremat.get_plan(first).request.rewrites == "chunked"
    second = trained(plan=tmp_path / "plan.json")
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    plain = Head("tied", "bias")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain(**tokens(16, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(first.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


# Refusals


class Returned(Head):
    def forward(self, tokens, labels):
        logits = self.logits(self.embed(tokens))
        return {"loss": self.loss(logits, labels), "logits": logits}


class Clamped(Head):
    def forward(self, tokens, labels):
        logits = self.logits(self.embed(tokens))
        logits.register_hook(lambda gradient: gradient.clamp(-1e-6, 1e-6))
        return self.loss(logits, labels)


def through(backward):
    """A model whose loss passes a function with this backward."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient)

    class Model(Head):
        def forward(self, tokens, labels):
            return Through.apply(super().forward(tokens, labels))

    return Model()


class Squared(Head):
    """The gradient of a square of the loss needs the loss."""

    def forward(self, tokens, labels):
        return super().forward(tokens, labels) ** 2


class Picked(Head):
    def forward(self, tokens, labels):
        chances = self.logits(self.embed(tokens)).softmax(-1)
        return -chances.gather(-1, labels[..., None]).log().mean()


class Ordered(Head):
    def forward(self, tokens, labels):
        return functional.cross_entropy(self.logits(self.embed(tokens)).permute(0, 2, 1), labels)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Returned(), r"the step returns .*outputs=.loss. drops"),
        (Clamped(), r"clamp.* is not linear"),
        (through(lambda g: torch.div(g, 0.25, rounding_mode="floor")), r"div.* is not linear"),
        (through(lambda g: g.to(torch.bool).to(g.dtype)), r"_to_copy.* is not linear"),
        (through(lambda g: g.sum(dtype=torch.int64).to(g.dtype)), r"sum.* is not linear"),
        (through(lambda g: g * g), r"mul.* is not linear"),
        (through(lambda g: torch.ones_like(g)), r"ones_like.* is not linear"),
        (Squared(), r"which is made of all rows"),
        (Picked(), r"gather.* is not known to go row by row"),
        (Ordered(), r"permute|transpose|another view"),
        (Head(dtype=torch.float16), "use bfloat16"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_what_cannot_be_done_by_chunks_is_refused_with_a_reason(model, why):
    batch = tokens()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(ModelError, match=why):
        hybridremat.wrap(model, kwargs=batch, memory_limit="80%", rewrites="chunked", **HOW)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_with_the_loss_alone_returned_logits_are_no_hindrance():
    model, batch = Returned("bias"), tokens(16, 64)
    wrapped = hybridremat.wrap(
        model, kwargs=batch, memory_limit="100%", rewrites="chunked", outputs="loss", **HOW
    )
    assert wrapped(**batch)["logits"] is None


def test_a_model_without_a_loss_over_classes_is_refused():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x):
            return self.down(self.up(x).relu()).square().mean()

    with pytest.raises(ModelError, match=r"another product.*leave rewrites=.chunked. out"):
        hybridremat.plan(Mlp(), args=(torch.randn(256, 8),), memory_limit="80%", rewrites="chunked", **HOW)


@pytest.mark.parametrize(
    "other", [{"grad_outputs": "all"}], ids=str
)
def test_what_excludes_chunks_is_said(other):
    with pytest.raises(LimitError, match=r"rewrites=.chunked. and .* cannot be combined"):
        hybridremat.plan(Head(), kwargs=tokens(), memory_limit="80%", rewrites="chunked", **HOW, **other)


# The call and the checker


@given(data=st.data())
@examples(40)
def test_chunks_of_any_size_give_the_same(data):
    """Rows in their places, sums and products added up, whatever is left for the last chunk."""
    length, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 17))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    one, other = (torch.randint(-4, 5, (length, width)).to(dtype) for width in (5, 19))
    weight = torch.randint(-4, 5, (5, 3)).to(dtype)

    def body(a, b, w):
        return a @ w, b.t(), a, b.sum(0), b.sum()

    given = [ROWS, PRODUCT, SUM, SUM], [size, 1], [one, other], [weight]
    if data.draw(st.booleans()):
        rows, product, kept, total = loss_by_rows(body, *given, parts=-(-length // size))
    else:
        rows, product, kept, total = loss_by_chunks(body, *given)
    wide = torch.float64
    summed = torch.float32 if dtype is torch.bfloat16 else dtype
    assert torch.equal(rows, one @ weight)
    assert (product.dtype, kept.dtype, total.dtype) == (summed, summed, summed)
    if dtype is not torch.bfloat16:  # whole numbers, which are added up exactly
        assert torch.equal(product.to(wide), other.to(wide).t() @ one.to(wide))
        assert torch.equal(kept.to(wide), other.to(wide).sum(0)) and total == other.to(wide).sum()
    else:
        torch.testing.assert_close(product.to(wide), other.to(wide).t() @ one.to(wide), rtol=2e-2, atol=1)


@given(rows=st.integers(1, 1 << 20), classes=st.integers(1, 300_000), width=st.integers(1, 20_000))
def test_chunks_are_few_and_not_tiny(rows, classes, width):
    size, least = chunk_sizes(rows, classes, width)
    for rows_of_chunk, most, fewest in ((size, 8, 64), (least, 32, 16)):
        assert rows_of_chunk >= fewest and rows_of_chunk & (rows_of_chunk - 1) == 0
        assert -(-rows // rows_of_chunk) <= most
    assert least <= size and least >= min(rows * width // classes, rows // 32)


def test_where_memory_is_short_chunks_are_smaller():
    """The cost model flops takes more chunks to cost nothing: what they cost is up to the clock."""
    model, batch = Head(), tokens(16, 64)
    least = least_limit(model, batch, rewrites="chunked")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit=least, rewrites="chunked", **HOW)
    (op,) = (op for op in plan.details.chain.graph.ops if "chunks" in op.target)
    own, parts = op.variants
    assert op.parts_text == "by 32 rows" and parts.temp < own.temp / 2


def test_what_a_call_runs_has_the_same_name_in_every_process():
    call = fx.Graph().call_function(loss_by_chunks)
    assert target_text(call) == "hybridremat.loss_by_chunks"
    one, other = (traced_by_chunks(Head(), tokens()).graph for _ in range(2))
    assert one.fingerprint == other.fingerprint


def calls(module, target):
    return list(module.graph.find_nodes(op="call_function", target=target))


def wrong_target(module, body):
    (call,) = calls(module, loss_by_chunks)
    call.args = (*call.args[:3], [call.args[3][0], call.args[3][0]], call.args[4])


def wrong_kind(module, body):
    (call,) = calls(module, loss_by_chunks)
    items = [node for node in call.users if node.args[1] in (1, 2)]
    for node in items:
        node.args = (call, 3 - node.args[1])


def wrong_ignored(module, body):
    (loss,) = calls(body, ATEN.nll_loss_forward.default)
    loss.args = (*loss.args[:4], 4)


def wrong_gradient(module, body):
    (loss,) = calls(body, ATEN.nll_loss_backward.default)
    loss.args = (*loss.args[:5], 4, *loss.args[6:])


def wrong_cap(module, body):
    first = calls(body, ATEN.tanh.default)[0]
    first.args = (first.args[0].args[0],)


def wrong_total(module, body):
    (count,) = calls(module, ATEN.ne.Scalar)
    count.args = (count.args[0], 4)


def no_mean(module, body):
    (call,) = calls(module, loss_by_chunks)
    for item in list(call.users):
        for user in list(item.users):
            if user.target is ATEN.div.Tensor:
                user.replace_all_uses_with(item)


def wrong_rows(module, body):
    for node in calls(module, ATEN.slice.Tensor):
        if node.args[1:4] == (1, 0, 36):
            node.args = (node.args[0], 1, 1, 37)


def wrong_places(module, body):
    (node,) = calls(module, ATEN.slice_backward.default)
    node.args = (*node.args[:3], 1, 37, 1)


@pytest.mark.parametrize(
    "broken",
    [
        *(wrong_target, wrong_kind, wrong_ignored, wrong_gradient, wrong_cap, wrong_total),
        *(no_mean, wrong_rows, wrong_places),
    ],
)
def test_the_checker_refuses_a_loss_that_does_not_compute_the_same(broken):
    step = traced_by_chunks(Head("capped", "shifted"), tokens())
    whole, module = step.originals.whole, step.originals.exact or step.module
    refuse_other_losses(whole, module)
    broken(module, module.get_submodule("hybridremat_loss_0"))
    with pytest.raises(PlanError):
        refuse_other_losses(whole, module)


def test_a_wrong_rewrite_is_refused_before_it_runs(monkeypatch):
    """Every row counted, the ignored ones too."""
    total = loss_chunks._Rewriter._total

    def of_all_rows(self, loss):
        found = total(self, loss)
        self.graph.find_nodes(op="call_function", target=ATEN.ne.Scalar)[0].args = (loss.args[1], -1)
        return found

    monkeypatch.setattr(loss_chunks._Rewriter, "_total", of_all_rows)
    with pytest.raises(PlanError, match="a loss by chunks of rows does not compute the same"):
        hybridremat.wrap(Head(), kwargs=tokens(), memory_limit="100%", rewrites="chunked", **HOW)
