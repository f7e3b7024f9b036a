"""Sizes that are planned without being traced: exact where they are trusted, traced where they are not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hybridremat
from hybridremat.compiler.in_symbols import in_symbols
from hybridremat.compiler.lifted import twin
from hybridremat.errors import PlanError
from hybridremat.graph.costs.workspace_fits import ENOUGH, WorkspaceFit
from hybridremat.graph.private_torch import shape_facts
from hybridremat.planning import step_template
from hybridremat.planning.trust import Trust
from support.examples import examples
from support.sized_steps import HOW, images, portfolio, require_exact, rows, seeded, tokens, wrapped
from support.training import ConvNet, Mlp, Running, Transformer


class Shifted(nn.Module):
    """Predicts tokens from those before, shifted in place as decoders do: a copy of all of their memory.

    What differs between neighbours has strides of which the captured ones are maxima.
    """

    def __init__(self):
        super().__init__()
        self.embedding, self.turn, self.head = nn.Embedding(50, 24), nn.Linear(24, 24), nn.Linear(24, 50)

    def forward(self, tokens):
        shifted = tokens.new_zeros(tokens.shape)
        shifted[:, 1:] = tokens[:, :-1].clone()
        hidden = torch.tanh(self.embedding(shifted))
        change = torch.sin(self.turn(hidden[:, 1:] - hidden[:, :-1])).mean()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten()) + change


def small():
    return Transformer(1, 16)


def few(batch):
    return rows(batch, 16)


def multilayer():
    return Mlp(32, 3)


NETS = {
    "attention": (small, tokens, "80%", (4, 40), [(3, 24), (2, 31)], [(4, 17), (2, 40), (3, 9)]),
    "convolutions": (ConvNet, images, "90%", (9,), [(7,), (4,)], [(3,), (8,), (5,)]),
    "buffers": (Running, few, "100%", (200,), [(32,), (9,)], [(150,), (3,), (64,)]),
    "shifted": (Shifted, tokens, "80%", (4, 40), [(3, 24), (2, 31)], [(4, 17), (2, 40), (3, 9)]),
    "multilayer": (multilayer, rows, "80%", (64,), [(48,), (20,)], [(63,), (2,), (40,)]),
}


# test_any_batch_and_length has attention too, whose capture is the dearest
SLOW = {"attention": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in NETS])
def test_at_trusted_sizes_nothing_is_traced_and_all_is_exact(name):
    make, draw, share, largest, first, then = NETS[name]
    plain, model = wrapped(make, draw, share, largest, *first)
    found = portfolio(model)
    for sizes in then:
        require_exact(model, plain, draw(*sizes), steps=2)
    assert not found._trust.lost
    assert found.traces < len(first) + len(then)
    assert len(found.numbers) == len(first) + len(then)


@pytest.fixture(scope="module")
def transformer():
    """With dropout; the limit holds up to batches of 4 and lengths of 40, and the step is trusted below."""
    return wrapped(small, tokens, "75%", (4, 40), (3, 33), (2, 24), (4, 17))


@examples(25)
@given(st.integers(2, 4), st.integers(2, 40))
def test_any_batch_and_length(transformer, batch, length):
    plain, model = transformer
    require_exact(model, plain, tokens(batch, length))
    found = portfolio(model)
    assert not found._trust.lost and found.traces <= 3 + len(found.members)


def test_schedules_that_are_let_go_are_proven_again(caplog):
    plain, model = wrapped(lambda: Mlp(32, 3), rows, "80%", (64,), (20,), (40,), kept=1)
    caplog.set_level("INFO", "hybridremat")
    found = portfolio(model)
    for batch in (64, 21, 60, 22):
        require_exact(model, plain, rows(batch))
        assert len(found.emitted) == 1 and found._trust._proofs.keys() <= found.emitted.keys()
    assert len(found.members) > 1 and "is emitted again" in caplog.text


def test_a_copy_into_a_part_is_the_same_with_symbols_and_without():
    torch.manual_seed(0)
    plans = [
        hybridremat.plan(Shifted(), kwargs=tokens(3, 20), memory_limit="100%", dynamic=dynamic, **HOW)
        for dynamic in (False, True)
    ]
    assert plans[0].fingerprint == plans[1].fingerprint


@torch.library.custom_op("hybridremat_tests::jump", mutates_args=())
def jump(x: torch.Tensor) -> torch.Tensor:
    """A sine with a workspace of sixteen times its size at some sizes in the middle."""
    if 20 <= len(x) < 40:
        torch.empty(16 * x.numel()).fill_(0)
    return x.sin()


@jump.register_fake
def _(x):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


jump.register_autograd(lambda ctx, grad: grad * jump(ctx.saved_tensors[0]), setup_context=_keep)


class Jumping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = jump(layer(x))
        return x.square().mean()


def test_a_workspace_that_jumps_between_the_traced_sizes_is_measured_at_each():
    plain, model = wrapped(Jumping, rows, "100%", (39,), (10,), (50,))
    found = portfolio(model)
    peaks = {batch: require_exact(model, plain, rows(batch)).predicted_peak for batch in (12, 25, 39, 45)}
    assert not found._trust.lost and found.traces == 2
    assert peaks[25] > 16 * 25 * 32 * 4 and peaks[39] > 16 * 39 * 32 * 4 > peaks[45]


class Slices(nn.Module):
    """Products of matrices that are laid out neither by rows nor by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x):
        every_other = self.first(x).exp()[:, :, ::2]
        return torch.bmm(every_other, every_other.transpose(1, 2)).mean()


def long_rows(batch, length):
    return {"x": torch.randn(batch, length, 32, generator=seeded(100 * batch + length))}


def test_products_that_are_copied_from_some_size_on_are_measured_at_each():
    plain, model = wrapped(Slices, long_rows, "100%", (6, 30), (5, 4), (7, 3))
    for sizes in [(2, 40), (4, 24), (6, 30), (3, 4)]:
        require_exact(model, plain, long_rows(*sizes))
    found = portfolio(model)
    assert not found._trust.lost and found.traces < 6


class Added(nn.Module):
    """Adds a transposed matrix to a product: PyTorch copies it from some 225 rows on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        h = torch.sin(self.layer(torch.tanh(self.layer(x))))
        return torch.addmm(h.t(), torch.ones(16, 16), h.detach().t()).sum(0).pow(2).mean()


def test_products_with_an_added_matrix_are_measured_at_each_size():
    plain, model = wrapped(Added, few, "100%", (320,), (30,), (50,))
    for batch in (77, 225, 300):
        require_exact(model, plain, few(batch))


def test_what_is_believed_of_a_kernel_is_seen_to_be_wrong_at_another_traced_size(monkeypatch):
    real = step_template.is_constant

    def believed(node, op):
        return "jump" in str(node.target) or real(node, op)

    monkeypatch.setattr(step_template, "is_constant", believed)
    plain, model = wrapped(Jumping, rows, "100%", (39,), (10,), (25,))
    found = portfolio(model)
    assert "jump" in found._trust.lost
    for batch in (30, 12):
        require_exact(model, plain, rows(batch))
    assert found.traces == 4


def test_a_limit_is_kept_at_thirty_sizes():
    plain, model = wrapped(multilayer, rows, "60%", (64,), (48,), (20,))
    found, drawn = portfolio(model), random.Random(0)
    for each in drawn.sample(range(2, 65), 30):
        require_exact(model, plain, rows(each))
    assert found.traces < len(found.numbers) / 2


def test_sizes_whose_batch_was_never_seen_to_change_are_traced():
    torch.manual_seed(0)
    model = Slices()
    hybridremat.wrap(model, kwargs=long_rows(4, 40), memory_limit="100%", dynamic=True, **HOW)
    found, traces = portfolio(model), []
    for sizes in ((4, 24), (4, 32), (3, 32), (2, 16)):
        hybridremat.prepare(model, kwargs=long_rows(*sizes))
        traces.append(found.traces)
    assert traces == [2, 2, 3, 3]


@pytest.fixture(scope="module")
def step(transformer):
    """A traced copy of the transformer's step, with symbols."""
    _, model = transformer
    steps = portfolio(model).steps
    sized = steps.at(dict(zip(steps.joint.inputs, (3, 24), strict=True)))
    return in_symbols(steps.joint, sized.instance, sized.traced)


def test_graphs_are_proven_for_all_sizes_and_add_no_guard(transformer, step):
    found = portfolio(transformer[1])
    before = shape_facts(found.steps.joint.module)
    for number, member in enumerate(found.members):
        memory = step.proof(found.graphs(number).lifted).memory(member.graph)
        assert memory.peak > memory.saved > 0
    assert shape_facts(found.steps.joint.module) == before


def test_sizes_that_need_a_capture_of_their_own_are_not_trusted(transformer):
    found = portfolio(transformer[1])
    joint = found.steps.joint
    model = found.choose.context.settings.costs()
    for sizes, trusted in (((3, 24), True), ((1, 24), False), ((3, 1), False)):
        known = found._trust.at(dict(zip(joint.inputs, sizes, strict=True)), model)
        assert (known is not None) == trusted


def test_bytes_of_graphs_that_are_not_as_planned_end_trust(monkeypatch):
    plain, model = wrapped(multilayer, rows, "80%", (64,), (48,), (20,))
    found, proof = portfolio(model), Trust.proof

    class More:
        def __init__(self, proven):
            self.proven = proven

        def memory(self, graph):
            memory = self.proven.memory(graph)
            return replace(memory, backward_peak=memory.peak + 1)

    monkeypatch.setattr(Trust, "proof", lambda *given: More(proof(*given)))
    traces = found.traces
    require_exact(model, plain, rows(31))
    assert found._trust.lost and found.traces == traces + 1


def test_a_number_that_should_be_a_size_is_refused_for_all_sizes(transformer, step):
    lifted = portfolio(transformer[1]).graphs(0).lifted
    damaged = replace(lifted, forward=twin(lifted.forward))
    ones = next(n for n in damaged.forward.graph.nodes if str(n.target) == "aten.ones.default")
    ones.args = ([24, 24],)
    with pytest.raises(PlanError):
        step.proof(damaged)


def test_sizes_that_coincide_at_the_traced_sizes_are_two(transformer):
    lifted = portfolio(transformer[1]).graphs(0).lifted
    steps = portfolio(transformer[1]).steps
    sized = steps.at(dict(zip(steps.joint.inputs, (4, 4), strict=True)))
    square = in_symbols(steps.joint, sized.instance, sized.traced)
    square.proof(lifted)
    taken = lifted.forward.graph.find_nodes(op="placeholder")
    inputs = [node for node in taken if isinstance(node.meta["val"], torch.SymInt)]
    damaged = replace(lifted, forward=twin(lifted.forward))
    ones = next(n for n in damaged.forward.graph.nodes if str(n.target) == "aten.ones.default")
    names = {node.name: node for node in damaged.forward.graph.nodes}
    batch = next(each for node in inputs if (each := names[node.name]) not in ones.all_input_nodes)
    ones.args = ([batch, batch],)
    with pytest.raises(PlanError):
        square.proof(damaged)


def test_a_fit_is_used_once_it_has_been_right_and_never_after_it_was_wrong():
    fit = WorkspaceFit.of(4 * 2000 + 12, 2000)
    assert (fit.each, fit.fixed, fit.known) == (4, 12, False)
    for elements in range(3000, 3000 + ENOUGH):
        assert not fit.known
        fit.compare(4 * elements + 12, elements)
    assert fit.known and fit.at(10_000) == 40_012
    fit.compare(4 * 5000, 5000)
    assert not fit.known
    assert WorkspaceFit.of(100, 10) is None and WorkspaceFit.of(4 * 2000 + 1000, 2000) is None
