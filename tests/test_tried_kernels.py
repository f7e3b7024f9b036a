"""Kernels are tried on what they get in a step: none is left untried, and the limits that follow are kept."""

from __future__ import annotations

import copy
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat.errors import UntriedKernelError
from hybridremat.graph.costs.cost_models import with_footprints
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import distinct_kernels
from support.compat.harness import Expected
from support.op_classes import LINALG, LOSSES, NORMS, OTHERS, Bags, Net, Under
from support.own_kernels import Picky
from support.training import allocated_peak, traced, train

HOW = {"cost_model": "flops", "workers": 1, "progress": False}
GROUPS = {
    "norms": lambda: [make() for make in NORMS.values()],
    "linear algebra": lambda: list(map(Net, LINALG.values())),
    "losses": lambda: list(map(Net, LOSSES.values())),
    "others": lambda: list(map(Net, OTHERS.values())),
}


class Together(nn.Module):
    """The sum of what nets make of the same input."""

    def __init__(self, nets):
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x):
        return sum(net(x) for net in self.nets)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("autocast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_kernel_is_tried(group, autocast):
    net = Together(GROUPS[group]())
    step = traced(Under(net) if autocast else net, torch.randn(16, 16))
    store = KernelStore()
    with_footprints(step, store)
    kernels = distinct_kernels(step)
    assert len(kernels.node_of) > 40 and step.graph.untried == ()
    assert [key for key in kernels.node_of if store.temporaries.get(key) is None] == []


def trained_at_least_limit(net, batch, **how):
    """Assert that a net trains as without a plan, in the least memory that can be promised.

    Below autocast plain PyTorch casts a weight once for all its readers, and AOTAutograd for each: a cell
    that runs several times is held against the unplanned joint graph.
    """
    how = {**HOW, **how}
    least = hybridremat.plan(net, kwargs=batch, memory_limit="100%", **how).least_peak
    expected = Expected(net, batch)
    hybridremat.wrap(net, kwargs=batch, memory_limit=least, **how)
    trained = train(net, batch)
    expected.equal_to(trained)
    assert max(trained.peaks) <= least, (trained.peaks, least)
    return hybridremat.get_plan(net).predicted_peak, max(trained.peaks)


class Images(nn.Module):
    """Two convolutions with a norm each, and a residual."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(norm(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x, labels):
        h = self.norms[0](self.first(x)).relu()
        h = h + self.norms[1](self.second(h)).relu()
        return functional.cross_entropy(self.head(h.mean((2, 3))), labels)


def images(batch=4, side=12):
    return {"x": torch.randn(batch, 3, side, side), "labels": torch.arange(batch) % 5}


class Steps(nn.Module):
    """A recurrent cell, some steps of it."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return (state[0] if isinstance(state, tuple) else state).float().pow(2).mean()


class Pictures(nn.Module):
    """Puts rows of pictures where tokens stand for them, as language models that see do."""

    def __init__(self, put):
        super().__init__()
        self.words, self.sight, self.put = nn.Embedding(10, 16), nn.Linear(16, 16), put
        self.head = nn.Linear(16, 10)

    def forward(self, tokens, pictures):
        x = self.words(tokens).tanh()
        x = self.put(x, tokens == 2, self.sight(pictures))
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def columns_put(x, mask, seen):
    x = x.mT.clone()
    x[:, :, mask[0]] = seen[:4].T.detach()
    return x.mT


def pictures():
    tokens = torch.randint(3, 10, (2, 12))
    tokens[:, 1:5] = 2
    return {"tokens": tokens, "pictures": torch.randn(8, 16)}


SMALL = {
    "masked scatter": lambda: (
        Pictures(lambda x, mask, seen: x.masked_scatter(mask[..., None].expand_as(x), seen)),
        pictures(),
    ),
    "masked scatter by a mask that is broadcast": lambda: (
        Pictures(lambda x, mask, seen: x.masked_scatter(mask[..., None], seen)),
        pictures(),
    ),
    "rows put by a mask": lambda: (
        Pictures(lambda x, mask, seen: x.index_put((mask,), seen.detach())),
        pictures(),
    ),
    "columns put by a mask": lambda: (
        Pictures(columns_put),
        pictures(),
    ),
    "BatchNorm under autocast": lambda: (Under(Images(nn.BatchNorm2d)), images()),
    "slogdet": lambda: (Net(LINALG["slogdet"]), {"x": torch.randn(16, 16)}),
    "solve": lambda: (Net(LINALG["solve"]), {"x": torch.randn(16, 16)}),
}
MORE = {
    "GroupNorm under autocast": lambda: (Under(Images(lambda width: nn.GroupNorm(2, width))), images()),
    "InstanceNorm under autocast": lambda: (
        Under(Images(lambda width: nn.InstanceNorm2d(width, affine=True))),
        images(),
    ),
    "GRU cell under autocast": lambda: (Under(Steps(nn.GRUCell(16, 16))), {"x": torch.randn(4, 5, 16)}),
    "RNN cell under autocast": lambda: (Under(Steps(nn.RNNCell(16, 16))), {"x": torch.randn(4, 5, 16)}),
    "inverse": lambda: (Net(LINALG["inv"]), {"x": torch.randn(16, 16)}),
    "Cholesky": lambda: (Net(LINALG["cholesky"]), {"x": torch.randn(16, 16)}),
    "eigenvalues": lambda: (Net(LINALG["eigh"]), {"x": torch.randn(16, 16)}),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_the_least_limit_is_kept(name):
    torch.manual_seed(0)
    net, batch = {**SMALL, **MORE}[name]()
    predicted, measured = trained_at_least_limit(net, batch)
    assert predicted == measured


class Told(nn.Module):
    """A linear layer, and what ``use`` makes of its output and of whole numbers among the inputs."""

    def __init__(self, use):
        super().__init__()
        self.first, self.use = nn.Linear(16, 16), use

    def forward(self, x, numbers):
        return self.use(self.first(x).tanh(), numbers).sin().pow(2).mean()


def divided(by):
    return lambda x, numbers: x * by(torch.arange(16), numbers)


FIVES = torch.full((16,), 5)
TOLD = {
    "remainder": (divided(torch.remainder), FIVES),
    "remainder of a number": (lambda x, numbers: x * (7 % numbers), FIVES),
    "fmod": (divided(torch.fmod), torch.tensor(5).expand(16)),
    "narrow": (lambda x, start: torch.narrow(x, 1, start, 3), torch.tensor(2)),
    "floor_divide": (divided(torch.floor_divide), FIVES),
    "truncated": (divided(lambda one, other: torch.div(one, other, rounding_mode="trunc")), FIVES),
    "distinct": (lambda x, numbers: x * torch.isin(numbers, numbers[::3])[:16], torch.arange(4096) * 2**40),
    "gcd": (divided(torch.gcd), FIVES),
    "shifts": (divided(lambda one, other: one << other >> 1), FIVES),
    "repeats": (lambda x, n: x.repeat_interleave(n, 0, output_size=21), torch.tensor([0, 9, 2, 10])),
    "a number of the data": (lambda x, number: x[:, 3:] * number.item(), torch.tensor(2)),
    "distinct floats": (lambda x, numbers: x * torch.isin(numbers, numbers[1:])[:16], torch.arange(9e4)),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", TOLD)
def test_kernels_are_tried_on_whole_numbers_that_they_take_and_that_take_most(name):
    torch.manual_seed(0)
    use, numbers = TOLD[name]
    batch = {"x": torch.randn(4, 16), "numbers": numbers}
    predicted, measured = trained_at_least_limit(Told(use), batch, graph_breaks="error")
    assert predicted == measured


def test_a_number_of_the_data_may_be_another_in_each_step():
    torch.manual_seed(0)
    net = Told(TOLD["narrow"][0])
    plain = copy.deepcopy(net)
    x, starts = torch.randn(4, 16), [torch.tensor(start) for start in (2, 0, 13)]
    hybridremat.wrap(net, args=(x, starts[0]), memory_limit="100%", graph_breaks="error", **HOW)
    for start in starts:
        one, other = (torch.autograd.grad(each(x, start), each.first.weight) for each in (plain, net))
        assert torch.equal(*one, *other)


BAGS = [
    (nn.EmbeddingBag, {"mode": "sum"}),
    (nn.EmbeddingBag, {"mode": "mean"}),
    (nn.EmbeddingBag, {"mode": "sum", "padding_idx": 0}),
    (nn.Embedding, {}),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("kind", "how"), BAGS, ids=["sum", "mean", "padded", "embedding"])
def test_sparse_gradients_count_with_all_their_elements(kind, how):
    """The fake gradient of a bag has none; several of them are alive at the end of a step."""
    torch.manual_seed(0)
    net, x = Bags(kind, 3, **how), torch.randint(1, 100, (16, 8))
    x = x[:, 0] if kind is nn.Embedding else x
    least = hybridremat.plan(net, (x,), memory_limit="100%", **HOW).least_peak
    planned = hybridremat.wrap(net, (x,), memory_limit=least, **HOW)
    for _ in range(2):
        assert allocated_peak(lambda: planned(x).backward()) == least
        net.zero_grad()
    if "padding_idx" in how:  # an entry that is padding is none of the gradient's
        x[0, :2] = 0
        assert allocated_peak(lambda: planned(x).backward()) <= least


class Lists(nn.Module):
    """A bag of each list of indices, of which ``ends`` says where they begin, and the last one ends."""

    def __init__(self, width, **how):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, width, **how), nn.Linear(width, 10)

    def forward(self, x, ends):
        return self.head(self.bag(x, ends)).sin().square().mean()


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("width", [16, 256])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("mode", "sparse"), [("max", False), ("sum", False), ("mean", False), ("sum", True), ("mean", True)]
)
def test_bags_keep_the_limit_in_every_mode(mode, sparse, last, width):
    """Kernels are tried with something in each bag, and with bags that end where the indices do."""
    torch.manual_seed(0)
    net = Lists(width, mode=mode, sparse=sparse, include_last_offset=last)
    batch = {"x": torch.randint(0, 50, (72,)), "ends": torch.arange(0, 72 + last, 12)}
    net(**batch).backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    least = hybridremat.plan(net, kwargs=batch, memory_limit="100%", **HOW).least_peak
    hybridremat.wrap(net, kwargs=batch, memory_limit=least, **HOW)
    assert allocated_peak(lambda: net(**batch).backward()) == least
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad.to_dense(), gradient.to_dense())


def test_sums_of_sparse_gradients_count_with_all_their_elements():
    """A bag that is read twice: what adds up its gradients is tried on gradients as they come."""

    class Twice(Bags):
        def forward(self, x):
            return super().forward(x) + super().forward(x.flip(0).contiguous())

    torch.manual_seed(0)
    net, x = Twice(nn.EmbeddingBag, 2, mode="sum"), torch.randint(0, 100, (16, 8))
    least = hybridremat.plan(net, (x,), memory_limit="100%", **HOW).least_peak
    planned = hybridremat.wrap(net, (x,), memory_limit=least, **HOW)
    assert allocated_peak(lambda: planned(x).backward()) <= least


def test_an_index_that_the_step_makes_is_not_overwritten_while_a_sparse_gradient_shares_it():
    class Shifted(Bags):
        def forward(self, x):
            places = x + 1
            return super().forward(places) + (places * 3).sum() * 0.0

    torch.manual_seed(0)
    net, x = Shifted(nn.EmbeddingBag, 3, mode="sum"), torch.randint(0, 99, (16, 8))
    plain = net(x)
    plain.backward()
    expected = [bag.weight.grad.clone() for bag in net.bags]
    net.zero_grad()
    least = hybridremat.plan(net, (x,), memory_limit="100%", **HOW).least_peak
    planned = hybridremat.wrap(net, (x,), memory_limit=least, **HOW)
    assert allocated_peak(lambda: planned(x).backward()) <= least
    for bag, gradient in zip(net.bags, expected, strict=True):
        assert torch.equal(bag.weight.grad.to_dense(), gradient.to_dense())


def test_what_kernels_really_return_is_kept_on_disk(tmp_path, monkeypatch):
    """A second planning, which runs no kernel, comes to the same figures."""
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("HYBRIDREMAT_CACHE_SIZE", "0")  # plans; figures of kernels are kept
    torch.manual_seed(0)
    net, x = Bags(nn.EmbeddingBag, 3), torch.randint(0, 100, (16, 8))
    first = hybridremat.plan(net, (x,), memory_limit="100%", **HOW)
    runs = count()
    monkeypatch.setattr("hybridremat.graph.costs.footprints.prepared", lambda *_, **__: next(runs))
    again = hybridremat.plan(net, (x,), memory_limit="100%", **HOW)
    assert (again.plain_peak, again.least_peak) == (first.plain_peak, first.least_peak) and next(runs) == 0


def test_a_kernel_that_cannot_be_tried_is_refused_and_can_be_allowed(tmp_path):
    net, x = Picky(1.5), torch.randn(16, 8)
    with pytest.raises(UntriedKernelError, match=r"picky.*own_kernels\.py:\d+ \(picky takes 1\.5 alone"):
        hybridremat.wrap(net, (x,), memory_limit="100%", **HOW)
    assert type(net) is Picky and "forward" not in vars(net)
    plan = hybridremat.plan(net, (x,), memory_limit="100%", untried="allow", **HOW)
    told = " ".join(str(plan).split())  # where a line is folded, depends on this file's folder
    assert len(plan.untried) == 1 and "not counted" in told and "picky takes 1.5 alone" in told
    plan.to_html(tmp_path / "plan.html")
    assert "picky takes 1.5 alone" in (tmp_path / "plan.html").read_text()
    with pytest.raises(UntriedKernelError):  # no plan from the cache
        hybridremat.wrap(net, (x,), memory_limit="100%", **HOW)
    hybridremat.wrap(net, (x,), memory_limit=plan.least_peak + 512, untried="allow", reserve=512, **HOW)
    net(x).backward()


@pytest.mark.parametrize("function", [hybridremat.frontier, hybridremat.plan])
def test_other_routes_refuse_it_too(function):
    how = {} if function is hybridremat.frontier else {"memory_limit": "100%", "graph_breaks": "plan"}
    with pytest.raises(UntriedKernelError):
        function(Picky(1.5), (torch.randn(16, 8),), **how, **HOW)
    with pytest.raises(hybridremat.LimitError, match="untried='maybe' is not known"):
        function(Picky(1.5), (torch.randn(16, 8),), **how, **HOW, untried="maybe")


def test_what_ops_have_that_show_outside_is_not_counted_and_said():
    """A print is never run to be measured."""

    class Telling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            torch._higher_order_ops.print("a step")
            return self.layer(x).pow(2).mean()

    plan = hybridremat.plan(Telling(), (torch.randn(4, 8),), memory_limit="100%", **HOW)
    assert any("it has effects" in text for text in plan.untried)
