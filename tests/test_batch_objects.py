"""Batches that are objects: their tensors are seen as those of a dict are."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BatchEncoding

import hybridremat
from hybridremat.compiler.sample_inputs import input_leaves, with_tensors
from hybridremat.planning.input_keys import input_key
from hybridremat.runtime.planned_call import planned_call
from support.training import allocated_peak
from support.wrapping import HOW

WIDTH = 32


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "a"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


class Store:
    def __init__(self, x, y):
        self.values = {"x": x, "y": [y]}


class Nested:
    """Attributes in a store, as in PyG; a cycle, and what is no batch."""

    def __init__(self, x, y):
        self.store, self.own, self.layer = Store(x, y), self, nn.Linear(2, 2)

    @property
    def x(self):
        return self.store.values["x"]

    @property
    def y(self):
        return self.store.values["y"][0]


class Named(UserDict):
    x = property(lambda self: self.data["x"])
    y = property(lambda self: self.data["y"])


KINDS = [Record, Frozen, Nested, lambda x, y: Named(x=x, y=y), lambda x, y: BatchEncoding({"x": x, "y": y})]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3))
        self.layers, self.head = nn.Sequential(*blocks), nn.Linear(WIDTH, 10)

    def forward(self, batch):
        return functional.cross_entropy(self.head(self.layers(batch.x)), batch.y)


class Breaking(Net):
    """Writes into its batch between two graphs."""

    def forward(self, batch):
        batch.x.mul_(2)
        torch._dynamo.graph_break()
        return super().forward(batch)


def tensors(rows):
    return torch.randn(rows, WIDTH), torch.randint(0, 10, (rows,))


@pytest.mark.parametrize("kind", KINDS)
def test_all_sizes_share_one_capture(kind):
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, (kind(*tensors(64)),), memory_limit="60%", **HOW)
    limit = hybridremat.get_plan(model).memory_limit
    for rows in (48, 40, 33, 24, 20, 12):
        batch = kind(*tensors(rows))
        model(batch).backward()
        plain(batch).backward()
        assert hybridremat.get_plan(model).memory_limit <= limit
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
    assert planned_call(model).sizes.counts()[0] == 1
    model.zero_grad()
    assert allocated_peak(lambda: model(batch).backward()) <= limit


@pytest.mark.parametrize("kind", KINDS)
def test_fit_counts_a_batch(kind):
    how = {"memory": "1MiB", "optimizer": "adamw", "cost_model": "flops", "progress": False}
    x, y = tensors(256)
    found = hybridremat.fit(Net(), args=(kind(x, y),), **how)
    assert found.batch == x.nbytes + y.nbytes


@pytest.mark.parametrize("kind", [Record, Nested])
@pytest.mark.filterwarnings("ignore", category=hybridremat.GraphBreakWarning)
def test_trial_runs_leave_a_batch_as_it_was(kind):
    torch.manual_seed(0)
    batch = kind(*tensors(64))
    before = batch.x.clone()
    model = Breaking()
    hybridremat.wrap(model, (batch,), memory_limit="100%", **HOW)
    assert torch.equal(batch.x, before)
    plain = copy.deepcopy(model)
    assert torch.equal(model(kind(before.clone(), batch.y)), plain(kind(before.clone(), batch.y)))


def test_objects_are_told_by_their_tensors():
    (x, y), layer = tensors(4), nn.Linear(2, 2)
    found = input_leaves((Record(x, y), 3, layer, Nested(x, y)))
    assert [*map(id, found)] == [*map(id, (x, y, 3, layer, x, y))]
    assert input_key((Record(x, y),), {}) != input_key((Record(x[:2], y[:2]),), {})
    assert input_key((Record(x, y, "a"),), {}) == input_key((Record(x, y, "b"),), {})
    given = Nested(x, y)
    other = with_tensors((given, layer), {id(x): y})
    assert other[0].x is y
    assert other[0].layer is given.layer
    assert other[1] is layer


def test_an_object_that_cannot_be_copied_is_taken_as_it_is():
    torch.manual_seed(0)
    model = Net()
    plain, batches = copy.deepcopy(model), [Record(*tensors(rows)) for rows in (32, 24, 16)]
    for each in batches:
        each.lock = threading.Lock()
    hybridremat.wrap(model, (batches[0],), memory_limit="90%", **HOW)
    for each in batches:
        model(each).backward()
        plain(each).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
