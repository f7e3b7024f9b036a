"""One joint graph with symbols for sizes, at numbers: what a capture of these numbers gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional

from hybridremat.compiler.dynamic_inputs import differing_dimensions, sample_with_symbols, ties
from hybridremat.errors import InputError
from hybridremat.graph.tracing.alias_analysis import TraceError
from hybridremat.graph.tracing.symbolic_calls import drop_idle_slices, is_size
from hybridremat.zoo.models import reference_model
from support.examples import examples
from support.symbolic import captured, shapes, traced_at
from support.training import Mlp, Transformer


def tokens(*shape):
    drawn = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(sum(shape)))
    return {"input_ids": drawn, "labels": drawn.clone()}


def images(pixels):
    def draw(batch):
        generator = torch.Generator().manual_seed(batch)
        drawn = torch.randn(batch, 3, pixels, pixels, generator=generator)
        return {"pixel_values": drawn, "labels": torch.randint(0, 10, (batch,), generator=generator)}

    return draw


def pictures(batch):
    drawn = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))
    return {"x": drawn, "labels": torch.zeros(batch, 32, 32, dtype=torch.int64)}


LENGTHS, BATCHES = [(3, 48), (2, 77), (7, 8)], [(3,), (15,)]
BY_LENGTH, BY_BATCH = {0: (0, 1), 1: (0, 1)}, {0: (0,), 1: (0,)}
MODELS = {
    "gpt2": (0.1, {"n_layer": 1}, tokens, (3, 64), LENGTHS, BY_LENGTH),
    "t5": (0.1, {"num_layers": 1, "num_decoder_layers": 1}, tokens, (3, 64), LENGTHS, BY_LENGTH),
    "vit": (0.1, {"num_hidden_layers": 1}, images(160), (4,), BATCHES, BY_BATCH),
    "resnet50": (0.0, {"pixels": 64}, images(64), (4,), BATCHES, BY_BATCH),
    "unet": (0.0, {"pixels": 32, "depth": 2, "base": 16}, pictures, (4,), BATCHES, BY_BATCH),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_at_other_sizes_are_traced_as_if_captured_there(name):
    dropout, changes, draw, sample, others, symbols = MODELS[name]
    model, _ = reference_model(name, dropout, changes)
    if name in ("vit", "resnet50"):
        model.config.problem_type = "single_label_classification"  # it is stored in the first call
    joint = captured(model, draw(*sample), symbols)
    symbolic = joint.symbolic()
    assert tuple(symbolic.sample.values()) == sample
    for sizes in (sample, *others):
        assert shapes(traced_at(joint, symbolic, *sizes)) == shapes(captured(model, draw(*sizes)).traced())


@pytest.fixture(scope="module")
def mlp():
    torch.manual_seed(0)
    model = Mlp(8)
    joint = captured(model, {"x": torch.randn(64, 8)}, {0: (0,)})
    return model, joint, joint.symbolic()


@examples(20)
@given(st.integers(2, 3000))
def test_any_batch_of_an_mlp(mlp, batch):
    model, joint, symbolic = mlp
    expected = captured(model, {"x": torch.zeros(batch, 8)}).traced()
    assert shapes(traced_at(joint, symbolic, batch)) == shapes(expected)


def test_attention_with_dropout_at_another_batch_and_length():
    torch.manual_seed(0)
    model, drawn = Transformer(1, 16), [{"tokens": tokens(*sizes)["labels"]} for sizes in ((2, 24), (3, 17))]
    joint = captured(model, drawn[0], {0: (0, 1)})
    expected = captured(model, drawn[1]).traced()
    assert shapes(traced_at(joint, joint.symbolic(), 3, 17)) == shapes(expected)


class Slices(nn.Module):
    """Slices of all that there is, of the rest, and a size that is computed from two."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.layer(x)[:, :length, :]
        shifted = functional.pad(y, (0, 0, 0, 1))[:, 1:, :]
        return (y * shifted).reshape(batch * length, 8).cos().sum()


def test_slices_of_all_that_there_is_are_no_copies_and_no_tensor_is_read_for_its_size():
    model = Slices()
    joint = captured(model, {"x": torch.randn(5, 6, 8)}, {0: (0, 1)})
    symbolic = joint.symbolic()
    for sizes in ((5, 6), (2, 9)):
        expected = captured(model, {"x": torch.randn(*sizes, 8)}).traced()
        assert shapes(traced_at(joint, symbolic, *sizes)) == shapes(expected)
    computed = [n for n in symbolic.module.graph.nodes if is_size(n) and n.op != "placeholder"]
    assert any(map(reads_tensor, computed))  # the padded one
    numbers = symbolic.at(dict(zip(symbolic.inputs, (2, 9), strict=True))).module
    assert not any(str(node.target).startswith("aten.sym_size") for node in numbers.graph.nodes)


def reads_tensor(node):
    return not all(map(is_size, node.all_input_nodes))


def test_equal_calls_at_coinciding_sizes_stay_two():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, y):
            return (self.layer(x).sum(0) * torch.ones(len(x))[0] * torch.ones(len(y))[0]).sum()

    model = Twice()
    joint = captured(model, {"x": torch.randn(6, 4), "y": torch.randn(5, 4)}, {0: (0,), 1: (0,)})
    step = traced_at(joint, joint.symbolic(), 7, 7)
    ones = [op for op in step.graph.ops if op.target.startswith("aten.ones") and op.phase != "backward"]
    assert len(ones) == 2


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y.sin().sum() if len(x) <= 10 else y.cos().sum()


def test_what_the_model_asks_of_its_sizes_bounds_them():
    joint = captured(Branches(), {"x": torch.randn(6, 4)}, {0: (0,)})
    symbolic = joint.symbolic()
    (name,) = symbolic.inputs
    assert symbolic.domain.ranges[name] == (2, 10)
    assert not symbolic.domain.refused({name: 10})
    for outside in (1, 11):
        (reason,) = symbolic.domain.refused({name: outside})[:1]
        assert str(outside) in reason
        with pytest.raises(TraceError, match="captured anew"):
            symbolic.at({name: outside})


def test_a_static_capture_has_no_symbols():
    assert captured(Mlp(8), {"x": torch.randn(4, 8)}).symbolic() is None


def test_only_marked_dimensions_are_symbols_and_the_callers_tensors_stay_unmarked():
    given = torch.randn(6, 5, 8)
    _, marked = sample_with_symbols((), {"x": given}, {0: (1,)})
    assert marked["x"] is not given and vars(given) == {}
    joint = captured(Slices(), {"x": given}, {0: (1,)})
    assert list(joint.symbolic().sample.values()) == [5]


def test_dimensions_that_differ_between_two_calls():
    one = ((torch.zeros(2, 3), 5), {"mask": torch.zeros(2, 3, 4), "flag": True})
    other = ((torch.zeros(2, 9), 5), {"mask": torch.zeros(2, 9, 4), "flag": True})
    assert differing_dimensions(one, other) == {0: (1,), 2: (1,)}
    with pytest.raises(InputError):
        differing_dimensions(one, ((torch.zeros(2, 3),), one[1]))
    with pytest.raises(InputError):
        differing_dimensions(((torch.zeros(2),), {}), ((torch.zeros(2, 1),), {}))


def test_a_sample_whose_dimensions_are_equal_by_chance_ties_them():
    square, other = ((torch.zeros(4, 4),), {}), ((torch.zeros(3, 8),), {})
    symbols = differing_dimensions(square, other)
    assert ties(square, other, symbols) == {4}
    assert ties(other, square, symbols) == set()


@pytest.mark.parametrize(
    ("written", "dropped"),
    [
        (torch.ones(6, 4), True),
        (torch.ones(4, 6).t(), False),  # the result has the layout of what is written into
        (torch.ones(6, 4, dtype=torch.float64), False),
        (torch.ones(5, 4), False),
    ],
)
def test_a_write_of_all_that_there_is_is_what_is_written_where_that_looks_alike(written, dropped):
    graph = fx.Graph()
    whole, part = (graph.placeholder(name) for name in ("whole", "part"))
    made = graph.call_function(torch.ops.aten.slice_scatter.default, (whole, part, 0, 0, len(written)))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (made, 2))
    graph.output((doubled,))
    for node, value in ((whole, torch.zeros(6, 4)), (part, written), (made, torch.zeros(6, 4))):
        node.meta["val"] = value
    doubled.meta["val"] = torch.zeros(6, 4)
    drop_idle_slices(fx.GraphModule(nn.Module(), graph), 1)
    assert doubled.args[0] is (part if dropped else made)
