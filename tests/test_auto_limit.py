"""memory_limit="auto": the reckoning, with a CUDA device that is made up (none is needed here)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.errors import LimitError, ModelError
from hybridremat.runtime import auto_limit as device_limit
from hybridremat.runtime.optimizer_state import state_to_come
from support.training import small
from support.wrapping import HOW, assert_untouched, state_of

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def device(monkeypatch):
    """Figures of a device that every model is taken to be on; a test may change them."""
    figures = {"free": 20 * GIB, "total": 24 * GIB, "reserved": 3 * GIB, "allocated": 2 * GIB}
    figures["fraction"] = 1.0
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(device_limit, "_one_cuda_device", lambda _: cuda)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (figures["free"], figures["total"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: figures["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: figures["allocated"])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: figures["fraction"])
    return figures


def net():
    model = nn.Sequential(nn.Linear(1000, 500), nn.Linear(500, 10))
    model[1].requires_grad_(False)
    return model


TRAINED = (1000 * 500 + 500) * 4


def test_the_reckoning(device):
    found = hybridremat.auto_limit(net())
    assert (found.free, found.cached, found.optimizer_state) == (20 * GIB, 1 * GIB, 2 * TRAINED)
    assert found.margin == 21 * GIB // 50  # 2 % is more than 256 MiB
    assert found.limit == 21 * GIB - 2 * TRAINED - found.margin
    text = str(found)
    for part in ("cuda:0", "free 20.0 GiB", "1.00 GiB held", "3.82 MiB of optimizer", "430.1 MiB margin"):
        assert part in text, text


def test_margins(device):
    device["free"] = 2 * GIB
    assert hybridremat.auto_limit(net()).margin == 256 * MIB
    assert hybridremat.auto_limit(net(), margin="64MiB").margin == 64 * MIB
    assert hybridremat.auto_limit(net(), margin=0).margin == 0
    with pytest.raises(LimitError, match="margin='5%' cannot be read"):
        hybridremat.auto_limit(net(), margin="5%")


def test_a_share_of_the_device_is_kept_to(device):
    device["fraction"] = 0.5
    assert hybridremat.auto_limit(net()).free == 12 * GIB - 3 * GIB
    device["reserved"] = 13 * GIB
    assert hybridremat.auto_limit(net()).free == 0


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (torch.optim.RMSprop, 1),
        (torch.optim.Adam, 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.AdamW([{"params": [q], "lr": 0.1} for q in p], lr=0.2, foreach=True), 2),
        (torch.optim.ASGD, 2),  # its step reads values: two slots are taken
    ],
)
def test_state_to_come_is_what_a_first_step_allocates(make, slots):
    model = net()
    optimizer = make(list(model.parameters()))
    before = copy.deepcopy(optimizer.state_dict())
    assert state_to_come(optimizer) == slots * TRAINED
    assert optimizer.state_dict() == before and all(p.grad is None for p in model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    if slots != 2 or isinstance(optimizer, torch.optim.Adam):
        kept = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        assert sum(t.numel() * 4 for t in kept if t.dim()) == slots * TRAINED
        assert state_to_come(optimizer) == 0


def test_the_optimizers_that_are_given_count(device):
    model = net()
    one, two = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[0].parameters(), 0.1, 0.9)
    assert hybridremat.auto_limit(model, one).optimizer_state == 0
    assert hybridremat.auto_limit(model, [one, two]).optimizer_state == TRAINED


def test_nothing_is_left(device):
    device.update(free=0, reserved=2 * GIB + 64 * MIB)
    with pytest.raises(LimitError, match="nothing is left for a step"):
        hybridremat.auto_limit(net())


def test_a_plan_shows_the_reckoning_and_later_shapes_keep_the_number(device):
    model, batch = small("mlp")
    device.update(free=200_000, total=GIB, reserved=0, allocated=0)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(device_limit, "LEAST_MARGIN", 0)
    try:
        expected = hybridremat.auto_limit(model)
        hybridremat.wrap(model, kwargs=batch, memory_limit="auto", **HOW)
        plan = hybridremat.get_plan(model)
        assert plan.memory_limit == plan.request.memory_limit == expected.limit
        assert plan.request.reckoning == str(expected)
        assert "limit auto" in str(plan) and "of optimizer state to come" in " ".join(str(plan).split())
        device["free"] = 100_000
        later = hybridremat.prepare(model, kwargs={"x": torch.randn(72, 32)})
        assert later.memory_limit == expected.limit
        loaded = hybridremat.unwrap(model)
        hybridremat.wrap(loaded, kwargs=batch, plan=plan, progress=False)
        assert hybridremat.get_plan(loaded).request == plan.request
    finally:
        monkey.undo()


def test_a_given_limit_has_no_reckoning():
    model, batch = small("mlp")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="90%", **HOW)
    assert plan.request.reckoning == "" and "limit auto" not in str(plan)


def test_without_a_cuda_device_it_is_refused_before_anything_changes():
    model, batch = small("mlp")
    before = state_of(model)
    for attempt in (
        lambda: hybridremat.wrap(model, kwargs=batch, memory_limit="auto", **HOW),
        lambda: hybridremat.plan(model, kwargs=batch, memory_limit="auto", **HOW),
        lambda: hybridremat.auto_limit(model),
    ):
        with pytest.raises(LimitError, match=r"one CUDA device, and this model is on cpu: give bytes"):
            attempt()
    assert_untouched(before, model)
    with pytest.raises(ModelError):
        hybridremat.plan(3, memory_limit="auto", **HOW)


def test_where_no_model_is_known_the_error_says_what_to_pass():
    with pytest.raises(LimitError, match=r"pass hybridremat.auto_limit\(model\).limit"):
        hybridremat.max_batch_size(lambda _: None, "auto")
    compiled = torch.compile(nn.Linear(4, 4), backend="hybridremat", options={"memory_limit": "auto"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="auto_limit"):
        compiled(torch.ones(2, 4))
