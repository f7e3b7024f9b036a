"""Attention as a CUDA device has it, in graphs that are captured without one."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import hybridremat
from hybridremat.compiler.attention_kernels import AttentionCall, kernel_of
from hybridremat.compiler.cuda_attention import cuda_attention
from hybridremat.planning.port import port_obstacle

HERE = {"workers": 1, "progress": False}
SAMPLES, TOKENS, HEADS, SIZE = 2, 48, 4, 16


class Attention(nn.Module):
    """Causal attention of one layer, or with a mask of truth values."""

    def __init__(self, size=SIZE, dropout=0.0, masked=False):
        super().__init__()
        width = HEADS * size
        self.joined, self.out = nn.Linear(32, 3 * width), nn.Linear(width, 32)
        self.size, self.dropout, self.masked = size, dropout, masked

    def forward(self, x):
        parts = self.joined(x).view(*x.shape[:2], 3, HEADS, self.size).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        mixed = scaled_dot_product_attention(*parts, mask, dropout_p=self.dropout, is_causal=not self.masked)
        return self.out(mixed.transpose(1, 2).flatten(2)).float().pow(2).mean()


def planned(spec, dtype=torch.float32, tokens=TOKENS, **how):
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, tokens, 32, dtype=dtype)
    return hybridremat.plan(Attention(**how).to(dtype), (x,), memory_limit="100%", device_spec=spec, **HERE)


def attention_ops(plan):
    return [op for op in plan.details.graph.ops if "dot_product" in op.target]


KERNELS = [
    ("h100", torch.bfloat16, {}, "cudnn", (SAMPLES, HEADS, TOKENS, 1)),
    ("h100", torch.bfloat16, {"dropout": 0.1}, "flash", (SAMPLES, HEADS, TOKENS)),
    ("a100-80g", torch.bfloat16, {}, "flash", (SAMPLES, HEADS, TOKENS)),
    ("a100-80g", torch.bfloat16, {"size": 12}, "flash", (SAMPLES, HEADS, TOKENS)),
    ("a100-80g", torch.float16, {"masked": True, "tokens": 40}, "efficient", (SAMPLES, HEADS, 64)),
    ("h100", torch.float32, {"dropout": 0.1}, "efficient", (SAMPLES, HEADS, 64)),
    ("t4", torch.float16, {}, "efficient", (SAMPLES, HEADS, 64)),
]


@pytest.mark.parametrize(("spec", "dtype", "how", "kernel", "sums"), KERNELS)
def test_the_graph_has_the_kernel_and_what_it_saves(spec, dtype, how, kernel, sums):
    """The logarithms of sums have the shape that each kernel gives them; flops are those of the products."""
    plan = planned(spec, dtype, **how)
    forward, backward = attention_ops(plan)
    assert forward.target.startswith(f"aten._scaled_dot_product_{kernel}_attention.")
    assert backward.target.startswith(f"aten._scaled_dot_product_{kernel}_attention_backward.")
    values = plan.details.graph.values
    made = [values[each] for each in forward.writes]
    assert (sums, "float32") in [(tuple(value.shape), value.dtype) for value in made]
    assert all(value.bytes % 512 == 0 for value in made)
    assert {each for each in forward.writes if values[each].dtype == "float32"} & set(backward.reads)
    size = -(-how.get("size", SIZE) // 8) * 8
    product = 2 * SAMPLES * HEADS * how.get("tokens", TOKENS) ** 2 * size
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert plan.predicted_peak <= plan.memory_limit


def test_dropout_inside_is_random_and_attention_without_it_is_not():
    forward, _ = attention_ops(planned("h100", torch.bfloat16, dropout=0.1))
    assert forward.random
    assert not any(op.random for op in attention_ops(planned("h100", torch.bfloat16)))


def test_what_no_kernel_takes_is_put_together_of_products():
    assert not attention_ops(planned("t4", torch.bfloat16))  # no bfloat16 before sm_80
    assert not attention_ops(planned("h100", torch.float64))


def test_attention_is_recomputed_within_a_tight_limit():
    model, x = nn.Sequential(*map(Held, range(2))).bfloat16(), torch.randn(2, 64, 32).bfloat16()
    plain = hybridremat.plan(Loss(model), (x,), memory_limit="100%", device_spec="a100-80g", **HERE)
    tight = hybridremat.plan(Loss(model), (x,), memory_limit=plain.least_peak, device_spec="a100-80g", **HERE)
    assert tight.predicted_peak <= tight.memory_limit < plain.predicted_peak
    forward = {op.id for op in attention_ops(tight) if op.phase == "forward"}
    assert any(tight.schedule.steps.count(op) > 1 for op in forward)


class Held(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.joined = nn.Linear(32, 96)

    def forward(self, x):
        parts = self.joined(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        return x + torch.sin(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Loss(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x).float().pow(2).mean()


def test_plans_of_one_cuda_device_port_to_another():
    """cuDNN's, flash and efficient kernels are of one kind; the CPU's flash attention is, too."""
    plans = [planned(spec, torch.float16) for spec in ("h100", "a100-80g", "t4")]
    x = torch.randn(SAMPLES, TOKENS, 32).half()
    plans.append(hybridremat.plan(Attention().half(), (x,), memory_limit="100%", cost_model="flops", **HERE))
    graphs = [plan.details.graph for plan in plans]
    assert len({tuple(op.target for op in graph.ops) for graph in graphs}) == 4
    assert {port_obstacle(one, other) for one in graphs for other in graphs} == {None}


def test_attention_on_real_numbers_is_as_ever_meanwhile_and_afterwards():
    q = torch.randn(2, 4, 24, 16, requires_grad=True)
    before = scaled_dot_product_attention(q, q, q, is_causal=True)
    with cuda_attention(90):
        inside = scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(before, inside)
    (before_grad,) = torch.autograd.grad(before.sum(), q)
    assert torch.equal(before_grad, torch.autograd.grad(inside.sum(), q)[0])
    x = torch.randn(SAMPLES, TOKENS, 32)
    planned("h100")
    here = hybridremat.plan(Attention(), (x,), memory_limit="100%", cost_model="flops", **HERE)
    assert all("for_cpu" in op.target for op in attention_ops(here))


def call(*heads, size=64, tokens=(32, 32), dtype=torch.bfloat16, **how):
    query, key = (torch.empty(2, n, t, size, dtype=dtype) for n, t in zip(heads, tokens, strict=True))
    return AttentionCall(query, key, key, **how)


RULES = [
    (call(4, 4), 90, "cudnn"),
    (call(4, 4), 89, "flash"),
    (call(4, 4, size=256), 90, "flash"),
    (call(4, 4, size=264), 90, "efficient"),
    (call(4, 4, dropout_p=0.125), 90, "cudnn"),
    (call(4, 4, tokens=(32, 1)), 90, "flash"),
    (call(4, 4, tokens=(32, 40), is_causal=True), 80, "efficient"),
    (call(4, 2, enable_gqa=True), 80, "flash"),
    (call(4, 2, dtype=torch.float32, enable_gqa=True), 80, "math"),
    (call(4, 4, size=30, dtype=torch.float32), 80, "math"),
    (call(4, 4, size=30, dtype=torch.float32), 70, "efficient"),
    (call(4, 4, attn_mask=torch.ones(32, 32, dtype=torch.bool)), 90, "cudnn"),
    (call(4, 4, attn_mask=torch.ones(4, 32, 32, dtype=torch.bool)), 90, "efficient"),
]


@pytest.mark.parametrize(("given", "capability", "kernel"), RULES)
def test_rules_of_pytorchs_sources(given, capability, kernel):
    assert kernel_of(given, capability) == kernel


def test_a_kernel_that_is_switched_off_is_not_taken():
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert kernel_of(call(4, 4), 90) == "efficient"
