"""What the tracer says about small models whose graphs are known, the cost models, and the kernel store."""

from __future__ import annotations

import linecache
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.graph.joint import Phase
from support.training import small, traced, train

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


def ops_of(step, part):
    """Ops whose target contains ``part``."""
    return [op for op in step.graph.ops if part in op.target]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})

    def forward(self, x):
        return self.outer["second"](torch.relu(self.outer["first"](x)).view(2, 16).view(4, 8)).sum()


def test_forward_then_backward_and_every_value_has_its_producer():
    step = traced(Layers(), x=torch.randn(4, 8))
    phases = [op.phase for op in step.graph.ops]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.OPTIONAL, Phase.BACKWARD].index)
    for op in step.graph.ops:
        assert all(step.graph.values[v].producer == op.id for v in op.writes)
        assert all((p := step.graph.producer(v)) is None or p.id < op.id for v in op.reads)
        assert op.phase is Phase.BACKWARD or not any(
            (p := step.graph.producer(v)) is not None and p.phase is Phase.BACKWARD for v in op.reads
        )


def test_only_what_depends_on_a_tangent_is_backward():
    step = traced(Layers(), x=torch.randn(4, 8))
    tainted = {value.id for value in step.graph.values if value.tangent}
    for op in step.graph.ops:
        assert (op.phase is Phase.BACKWARD) == bool(tainted & set(op.reads))
        tainted |= set(op.writes) if tainted & set(op.reads) else set()


def test_views_are_no_ops_and_own_no_bytes():
    step = traced(Layers(), x=torch.randn(4, 8))
    assert not ops_of(step, "view") and not ops_of(step, "aten.t.")
    relu = ops_of(step, "relu")[0]
    second = next(op for op in ops_of(step, "addmm") if relu.writes[0] in op.reads)
    assert second.module == "outer.second"
    assert step.graph.values[relu.writes[0]].bytes == 4 * 8 * 4


def test_module_paths_and_source_lines():
    step = traced(Layers(), x=torch.randn(4, 8))
    first, second = [op for op in ops_of(step, "addmm") if op.phase is Phase.FORWARD]
    assert (first.module, second.module) == ("outer.first", "outer.second")
    name, _, line = ops_of(step, "relu")[0].source.rpartition(":")
    assert name.endswith("test_trace.py") and "torch.relu" in linecache.getline(name, int(line))


def test_several_outputs_of_one_call_are_one_op():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(x).sum()

    step = traced(Norm(), x=torch.randn(4, 8))
    (norm,) = [op for op in ops_of(step, "native_layer_norm") if op.phase is Phase.FORWARD]
    assert [step.graph.values[v].bytes for v in norm.writes] == [4 * 8 * 4, 16, 16]
    assert not ops_of(step, "getitem")


def test_a_mask_made_under_vmap_is_a_view():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            at = torch.arange(16)
            mask = torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))(at, at)
            scores = self.layer(x).masked_fill(~mask.expand(2, 16, 16), 0.0)
            return scores.softmax(-1).pow(2).sum()

    step = traced(Masked(), x=torch.randn(2, 16, 16))
    assert [step.graph.values[op.writes[0]].bytes for op in ops_of(step, ".ge.")] == [16 * 16]
    assert not ops_of(step, "expand") and not ops_of(step, "unsqueeze")


def test_optional_ops_are_read_by_the_backward_alone():
    step = traced(*[small("mlp")[0]], **small("mlp")[1])
    optional = step.graph.phase_ops(Phase.OPTIONAL)
    readers = step.graph.readers()
    for op in optional:
        wanted = {step.graph.ops[r].phase for v in step.graph.ops[op].writes for r in readers[v]}
        assert wanted <= {Phase.BACKWARD, Phase.OPTIONAL} and wanted


class Drawing(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.dropout = nn.Linear(16, 48), dropout

    def forward(self, x):
        q, k, v = self.layer(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        return functional.dropout(attended, self.dropout, training=self.training).sum()


def test_attention_without_dropout_is_not_random_and_dropout_is():
    step = traced(Drawing(0.5), x=torch.randn(2, 8, 16))
    attention = [op for op in ops_of(step, "attention") if op.phase is Phase.FORWARD]
    assert len(attention) == 1 and not attention[0].random and attention[0].recomputable
    assert attention[0].flops == 2 * 2 * (2 * 2 * 8 * 8) * 8
    backward = [op for op in ops_of(step, "attention") if op.phase is Phase.BACKWARD]
    assert backward[0].flops == 5 * attention[0].flops // 2
    assert [op.phase for op in step.graph.ops if op.random] == [Phase.FORWARD]
    assert step.graph.rng_state_bytes == torch.get_rng_state().nbytes


def test_buffer_updates_are_mutations_in_the_forward():
    model, batch = small("convnet")
    step = traced(model, **batch)
    updates = [op for op in step.graph.ops if op.mutates]
    assert len(updates) == 3 * 3  # mean, variance and count of three norms
    assert all(op.phase is Phase.FORWARD and not op.recomputable and not op.writes for op in updates)


def test_what_reads_an_overwritten_buffer_runs_once_except_training_norms():
    model, batch = small("running")
    step = traced(model, **batch)
    norms = [op for op in ops_of(step, "batch_norm") if op.phase is Phase.FORWARD]
    assert len(norms) == 2 and all(op.recomputable for op in norms)
    once = Counter(op.target for op in step.graph.ops if not op.recomputable and not op.mutates)
    # x + ema (old), ema * 0.9 and the counter of the norm
    assert once["aten.add.Tensor"] == 2 and once["aten.mul.Tensor"] == 1


def test_a_norm_whose_updated_statistics_are_used_runs_once():
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            return (self.norm(self.layer(x)).tanh() * self.norm.running_mean.clone()).sum()

    step = traced(Watched(), x=torch.randn(4, 8))
    assert [op.recomputable for op in ops_of(step, "batch_norm") if op.phase is Phase.FORWARD] == [False]


def test_a_norm_in_eval_mode_that_is_not_updated_is_recomputable():
    model, batch = small("convnet")
    model.norms[2].eval()
    step = traced(model, **batch)
    norms = [op for op in ops_of(step, "batch_norm") if op.phase is Phase.FORWARD]
    assert all(op.recomputable for op in norms) and len([op for op in step.graph.ops if op.mutates]) == 6


def test_outputs_and_gradients():
    model, batch = small("convnet")
    step, held = traced(model, **batch), traced(model, **batch, hold_outputs=True)
    bytes_of = lambda values: sorted(step.graph.values[v].bytes for v in values)  # noqa: E731
    assert 4 in bytes_of(step.graph.held_outputs) and 4 * 5 * 4 in bytes_of(step.graph.released_outputs)
    assert not held.graph.released_outputs
    sizes = sorted(p.nbytes for p in model.parameters())
    assert bytes_of(step.graph.gradients) == sizes


def test_a_gradient_that_autograd_would_copy_is_copied_in_the_graph():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.broadcast, self.plain = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

        def forward(self, x):
            return self.broadcast.sum() + self.plain(x).pow(2).sum()

    step = traced(Sum(), x=torch.randn(4, 8))
    (copy,) = ops_of(step, "clone")
    assert step.graph.values[copy.writes[0]].bytes == 8 * 8 * 4
    assert set(copy.writes) < step.graph.gradients and len(step.graph.gradients) == 3


# Costs


def test_flops_are_those_of_the_products():
    step = traced(Layers(), x=torch.randn(4, 8))
    assert sum(op.flops for op in step.graph.ops if op.phase is Phase.FORWARD) == 2 * (2 * 4 * 8 * 8)
    # the first layer needs no gradient of its input
    assert sum(op.flops for op in step.graph.ops if op.phase is Phase.BACKWARD) == 3 * (2 * 4 * 8 * 8)


def test_grouped_products_count_every_row_once():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 16, 32, dtype=torch.bfloat16))

        def forward(self, x, ends):
            return functional.grouped_mm(x, self.weight, offs=ends).float().sum()

    x = torch.randn(24, 16, dtype=torch.bfloat16, requires_grad=True)
    step = traced(Experts(), x, torch.tensor([8, 8, 24], dtype=torch.int32))
    grouped = [op.flops for op in step.graph.ops if "grouped_mm" in op.target]
    assert grouped == 3 * [2 * 24 * 16 * 32]


@pytest.mark.slow
def test_temporaries_of_a_grouped_product_are_those_of_one_group_with_all_rows():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 32, 64, dtype=torch.bfloat16))

        def forward(self, x, ends):
            x = functional.grouped_mm(x, self.weight, offs=ends)
            return functional.grouped_mm(x.relu(), self.weight.mT, offs=ends).float().sum()

    x = torch.randn(256, 32, dtype=torch.bfloat16)
    for ends in ([64, 128, 192, 256], [256, 256, 256, 256]):
        model, batch = Experts(), {"x": x, "ends": torch.tensor(ends, dtype=torch.int32)}
        least = hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).least_peak
        hybridremat.wrap(model, kwargs=batch, memory_limit=least, **HOW)
        assert max(train(model, batch, steps=2).peaks) <= least
