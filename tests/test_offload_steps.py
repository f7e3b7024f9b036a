"""Steps whose values wait in a file: the numbers of plain training, in the memory that was promised."""

from __future__ import annotations

import copy
import errno
import gc
import os
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.compiler.offload import calls
from hybridremat.compiler.offload.file_store import FileStore
from hybridremat.compiler.offload.stores import Stores
from hybridremat.compiler.offload.targets import Target
from hybridremat.graph.costs.device_specs import DEVICE_SPECS
from hybridremat.graph.memory import step_memory
from hybridremat.reports.timeline import step_timeline
from hybridremat.sequence.offload.link import Link
from support.sized_steps import tokens
from support.training import Transformer, loss_in, small, train, train_plain
from support.wrapping import HOW, least_limit

NETS = ("mlp", "convnet", "transformer", "running")


@pytest.fixture(autouse=True)
def link(monkeypatch):
    """So fast that whatever may move does, rather than to be computed again."""
    monkeypatch.setattr("hybridremat.planning.moving.NOMINAL", Link(1e15, 1e15, latency=0))


@pytest.fixture
def away(tmp_path):
    """``offload=`` to a folder of this test."""
    return f"file:{tmp_path}"


def wrapped(model, batch, limit, away, **how):
    planned = hybridremat.wrap(model, kwargs=batch, memory_limit=limit, offload=away, **HOW, **how)
    return planned, hybridremat.get_plan(planned)


def least_peak(model, batch, **how):
    """The least limit that blocks and moves tell of, bytes."""
    return hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW, **how).least_peak


def test_what_comes_back_is_there_before_views_of_it_are_made(away):
    torch.manual_seed(0)
    model, batch = Transformer(1, 16), tokens(4, 30)
    plain = train_plain(model, batch)
    planned, plan = wrapped(model, batch, "75%", away)
    assert any(move.fetch == move.ready for move in plan.schedule.moves)
    trained = train(planned, batch)
    assert plain.differences(trained) == [] and {*trained.peaks} == {plan.predicted_peak}


class Lazy(nn.Module):
    """Saves views that are read as conjugates and as negatives of what is in memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 40, dtype=torch.complex64) / 7)

    def forward(self, x):
        h = x @ self.weight
        product = h * h.conj() @ self.weight
        part = (h * h.exp()).conj().imag
        return product.abs().mean() + (part * part.exp()).tanh().mean() + (part * x.real).square().mean()


@pytest.mark.parametrize("share", ["80%", "70%"])
def test_lazy_conjugates_and_negatives_come_back_as_such(share, away):
    torch.manual_seed(0)
    model, batch = Lazy(), {"x": torch.randn(200, 40, dtype=torch.complex64)}
    plain = train_plain(model, batch)
    planned, plan = wrapped(model, batch, share, away)
    assert plan.schedule.moves
    assert plain.differences(train(planned, batch)) == []


def test_nothing_is_held_once_a_model_is_unwrapped(away):
    gc.collect()
    before = len(calls._STORES)
    model, batch = small("mlp")
    planned, plan = wrapped(model, batch, "80%", away)
    loss_in(planned(**batch)).backward()
    assert plan.schedule.moves and len(calls._STORES) == before + 1
    hybridremat.unwrap(planned)
    gc.collect()
    assert len(calls._STORES) == before


def test_a_forked_process_has_stores_of_its_own(tmp_path):
    every = Stores(Target(str(tmp_path)), "cpu", 4096)
    every.give_back(mine := every.take(), [])
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, b"own" if inode(every.take()) != inode(mine) else b"not")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 3) == b"own" and every.take() is mine


def inode(store):
    return os.fstat(store._file.fileno()).st_ino


@pytest.mark.parametrize("share", ["80%", "least"])
@pytest.mark.parametrize("name", NETS)
def test_steps_are_those_of_plain_training(name, share, away):
    model, batch = small(name)
    plain = train_plain(model, batch)
    limit = share if share != "least" else least_peak(model, batch, offload=away)
    planned, plan = wrapped(model, batch, limit, away)
    trained = train(planned, batch)
    assert plain.differences(trained) == []
    assert {*trained.peaks} == {plan.predicted_peak}
    assert plan.schedule.moves and plan.predicted_peak <= plan.memory_limit
    assert plan.overhead <= 0.001


@pytest.mark.parametrize("name", ["transformer", "convnet"])
def test_what_fits_with_moves_is_less(name, away):
    model, batch = small(name)
    bare, least = least_limit(model, batch), least_limit(model, batch, offload=away)
    assert least < bare
    limit = (least + bare) // 2
    with pytest.raises(hybridremat.InfeasibleLimitError):
        hybridremat.plan(model, kwargs=batch, memory_limit=limit, **HOW)
    assert hybridremat.plan(model, kwargs=batch, memory_limit=limit, offload=away, **HOW).needed <= limit


TOGETHER = {
    "its outputs held": {"hold_outputs": True},
    "gradients of all outputs": {"grad_outputs": "all"},
    "ops as they are": {"rewrites": "none"},
    "the chain program alone": {"strategy": "rotor"},
    "every block": {"strategy": "every-block"},
    "pins": {"policy": {"*:gelu": "must_save"}},
    "room for the caller": {"reserve": 5000},
    "an overhead": {"max_overhead": 0.5},
}


@pytest.mark.parametrize("name", TOGETHER)
def test_with_other_settings(name, away):
    model, batch = small("transformer")
    plain = train_plain(model, batch)
    planned, plan = wrapped(model, batch, "75%", away, **TOGETHER[name])
    trained = train(planned, batch)
    assert plain.differences(trained) == []
    assert plan.schedule.moves
    assert max(trained.peaks) <= plan.predicted_peak <= plan.needed <= plan.memory_limit


def test_gradients_that_leave_in_the_backward(away):
    model, batch = small("transformer")
    plain = copy.deepcopy(model)
    bare = hybridremat.plan(model, kwargs=batch, memory_limit="70%", gradients="in_backward", **HOW)
    planned, plan = wrapped(model, batch, "50%", away, gradients="in_backward")
    assert plan.schedule.moves and plan.least_peak < bare.least_peak
    for net in (plain, planned):
        torch.manual_seed(3)
        net(**batch)["loss"].backward()
    assert all(map(torch.equal, grads(plain), grads(planned)))


def test_forwards_that_wait_together(away):
    """Each has a file of its own, and both come back."""
    model, batch = small("transformer")
    other = {"tokens": batch["tokens"].flip(0)}
    plain = copy.deepcopy(model)
    planned, plan = wrapped(model, batch, "110%", away, forwards=2)
    assert plan.schedule.moves
    for net in (plain, planned):
        torch.manual_seed(3)
        first, second = net(**batch)["loss"], net(**other)["loss"]
        first.backward()
        second.backward()
    assert all(map(torch.equal, grads(plain), grads(planned)))
    assert not calls._USES


def grads(model):
    return [parameter.grad for parameter in model.parameters()]


def test_a_graph_that_is_retained_and_one_that_is_dropped(away):
    model, batch = small("transformer")
    plain = copy.deepcopy(model)
    planned, _ = wrapped(model, batch, "70%", away)
    for net in (plain, planned):
        torch.manual_seed(3)
        net(**batch)  # without a backward
        loss = net(**batch)["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
        net.eval()
        with torch.no_grad():
            net(**batch)
        net.train()
    del loss
    assert all(map(torch.equal, grads(plain), grads(planned)))
    gc.collect()
    assert not calls._USES


def test_a_slow_link_changes_time_alone(away, monkeypatch):
    model, batch = small("convnet")
    plain = train_plain(model, batch)
    planned, plan = wrapped(model, batch, "70%", away)
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda *given: (time.sleep(0.02), write(*given))[1])
    monkeypatch.setattr(os, "preadv", lambda *given: (time.sleep(0.02), read(*given))[1])
    back = FileStore.back  # what was there before must not happen to be what comes
    monkeypatch.setattr(FileStore, "back", lambda store, tensor, *rest: back(store, tensor.fill_(255), *rest))
    trained = train(planned, batch)
    assert plain.differences(trained) == [] and {*trained.peaks} == {plan.predicted_peak}


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_copy_that_fails_is_said_and_the_next_step_is_right(call, away, monkeypatch):
    model, batch = small("transformer")
    plain = train_plain(copy.deepcopy(model), batch)
    planned, plan = wrapped(model, batch, "70%", away)
    before = copy.deepcopy(planned.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.EIO))
        if call == "preadv":
            patch.setattr("hybridremat.compiler.offload.file_store._read_into", failing(errno.EIO))
        with pytest.raises(hybridremat.OffloadError, match="this step is lost"):
            planned(**batch)["loss"].backward()
    assert all(torch.equal(value, before[name]) for name, value in planned.state_dict().items())
    assert all(gradient is None for gradient in grads(planned))
    gc.collect()
    assert not calls._USES
    torch.manual_seed(0)
    trained = train(planned, batch)
    assert plain.differences(trained) == [] and {*trained.peaks} == {plan.predicted_peak}


def test_a_full_disk_is_said_before_anything_runs(away, monkeypatch):
    model, batch = small("running")
    planned, _ = wrapped(model, batch, "70%", away)
    before, state = copy.deepcopy(planned.state_dict()), torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        with pytest.raises(hybridremat.OffloadError, match="nothing has run"):
            planned(**batch)
    assert all(torch.equal(value, before[name]) for name, value in planned.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    planned(**batch).backward()


def test_an_exception_in_the_backward_leaves_nothing_behind(away):
    model, batch = small("transformer")
    plain = train_plain(copy.deepcopy(model), batch)
    planned, _ = wrapped(model, batch, "70%", away)

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        output = planned(**batch)["loss"]
        output.register_hook(fail)
        output.backward()
    del output
    gc.collect()
    assert not calls._USES
    torch.manual_seed(0)
    assert plain.differences(train(planned, batch)) == []


def test_a_plan_file_brings_its_moves(away, tmp_path):
    model, batch = small("transformer")
    again, plain = copy.deepcopy(model), train_plain(model, batch)
    _, plan = wrapped(model, batch, "70%", away)
    plan.save(tmp_path / "plan.json")
    read = hybridremat.Plan.load(tmp_path / "plan.json")
    assert read == plan and read.schedule.moves and read.host_bytes == plan.host_bytes > 0
    for given in ({}, {"offload": away}):
        applied = hybridremat.wrap(
            copy.deepcopy(again), kwargs=batch, plan=tmp_path / "plan.json", progress=False, **given
        )
        trained = train(applied, batch)
        assert plain.differences(trained) == [] and {*trained.peaks} == {plan.predicted_peak}
    with pytest.raises(hybridremat.OffloadError, match="on the CPU"):
        hybridremat.wrap(again, kwargs=batch, plan=tmp_path / "plan.json", offload="host", progress=False)


def test_where_values_cannot_wait(tmp_path):
    model, batch = small("mlp")
    for given, told in {
        "host": "on the CPU",
        "disk": 'use "host" or "file:FOLDER"',
        "file:": 'use "host" or "file:FOLDER"',
        f"file:{tmp_path}/missing": "no folder that can be written to .No such file",
        "file:~nobody-of-this-name/x": "no folder that can be written to .Could not determine",
        "file:\0": "no folder that can be written to",
        tmp_path: 'is a path: pass offload="file:',
    }.items():
        with pytest.raises(hybridremat.OffloadError, match=told):
            hybridremat.wrap(model, kwargs=batch, memory_limit="80%", offload=given, **HOW)


def test_host_memory_is_bounded(away):
    model, batch = small("transformer")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="70%", offload=away, **HOW)
    pages = plan.host_bytes // 2 // 4096 * 4096
    less = hybridremat.plan(
        model, kwargs=batch, memory_limit="70%", offload=away, host_memory_limit=pages, **HOW
    )
    assert 0 < less.host_bytes <= pages < plan.host_bytes
    assert less.overhead > plan.overhead and less.needed <= less.memory_limit
    two = hybridremat.plan(
        model, kwargs=batch, memory_limit="95%", offload=away, host_memory_limit=2 * pages, forwards=2, **HOW
    )
    assert 0 < two.host_bytes <= pages  # each forward has as much
    none = hybridremat.plan(model, kwargs=batch, memory_limit="70%", offload=away, host_memory_limit=1, **HOW)
    assert not none.schedule.moves and none.overhead >= less.overhead


def test_it_is_certified_and_reported(away, tmp_path):
    model, batch = small("transformer")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="60%", offload=away, **HOW)
    certified = plan.certified(progress=False)
    assert 0 <= certified.optimality_gap < 1
    assert "wait" in str(plan) and "MOVE" in str(plan.explain("blocks.0"))
    assert all("waits elsewhere" in str(plan.inspect(block.index)) for block in plan.blocks if block.moved)
    profile = step_memory(plan.details.graph, plan.schedule).profile
    shown = step_timeline(plan.details.chain, plan.schedule).band_bytes(range(len(profile)))
    assert tuple(shown.sum(0).tolist()) == profile
    plan.to_html(tmp_path / "plan.html")
    plan.to_trace(tmp_path / "trace.json")
    plan.to_memory_viz(tmp_path / "memory.pickle")


def test_a_frontier_has_points_below_the_least_without(away):
    model, batch = small("transformer")
    bare = hybridremat.frontier(model, kwargs=batch, **HOW)
    curve = hybridremat.frontier(model, kwargs=batch, offload=away, **HOW)
    assert curve.least.peak < bare.least.peak
    for point in bare.points:
        assert curve.plan(memory_limit=point.peak).overhead <= point.overhead + 1e-9


def test_torch_compile_takes_it(away):
    model, batch = small("transformer")
    plain, plans = copy.deepcopy(model), []
    options = {"memory_limit": "70%", "offload": away, "on_plan": plans.append, "cost_model": "flops"}
    planned = torch.compile(model, backend="hybridremat", options=options)
    for net in (plain, planned):
        torch.manual_seed(3)
        net(**batch)["loss"].backward()
    assert plans[0].schedule.moves
    assert all(map(torch.equal, grads(plain), grads(model)))


def test_a_larger_batch_fits_with_moves_in_little_more_time(away):
    def make(size):
        images = torch.randn(size, 3, 12, 12)
        return small("convnet")[0], {"x": images, "labels": torch.randint(0, 5, (size,))}

    model, batch = make(4)
    limit = hybridremat.plan(model, kwargs=batch, memory_limit="90%", **HOW).memory_limit
    how = {"max_overhead": 0.01, **HOW}
    bare = hybridremat.max_batch_size(make, limit, **how)
    found = hybridremat.max_batch_size(make, limit, offload=away, **how)
    assert found.batch_size > bare.batch_size
    assert found.plan.schedule.moves and found.plan.needed <= limit


def test_for_another_device_values_wait_in_host_memory():
    model, batch = small("transformer")
    how = {"memory_limit": "70%", "device_spec": "h100", "progress": False}
    bare = hybridremat.plan(model, kwargs=batch, **how)
    slow = replace(DEVICE_SPECS["h100"], call_ns=1e6)  # copies take little beside its kernels
    plan = hybridremat.plan(model, kwargs=batch, **how | {"device_spec": slow}, offload="host")
    assert plan.schedule.moves and plan.needed <= plan.memory_limit and plan.overhead < bare.overhead


def test_no_forward_takes_more_host_memory_than_there_is(away):
    model, batch = small("mlp")
    plain = train_plain(model, batch)
    free = hybridremat.plan(model, kwargs=batch, memory_limit="80%", offload=away, **HOW)
    planned, plan = wrapped(model, batch, "80%", away, host_memory_limit=2 * free.host_bytes)
    assert plan.host_bytes == free.host_bytes > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hybridremat.OutstandingForwardWarning)
        waiting = [planned(**batch) for _ in range(2)]
        with pytest.raises(hybridremat.OffloadError, match="forwards that wait for their backward hold"):
            planned(**batch)
        del waiting
        gc.collect()
    planned.zero_grad()
    assert plain.differences(train(planned, batch)) == []


def test_a_plan_that_takes_more_host_memory_than_there_is_is_refused(away):
    model, batch = small("mlp")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="80%", offload=away, **HOW)
    assert plan.schedule.moves
    for limit in (0, plan.host_bytes - 1):
        with pytest.raises(hybridremat.OffloadError, match="of host memory, and host_memory_limit= is"):
            hybridremat.wrap(
                model, kwargs=batch, plan=plan, offload=away, host_memory_limit=limit, progress=False
            )
    hybridremat.wrap(model, kwargs=batch, plan=plan, host_memory_limit=plan.host_bytes, progress=False)


def test_a_folder_is_the_one_that_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    model, batch = small("mlp")
    planned, plan = wrapped(model, batch, "80%", "file:scratch")
    assert plan.request.offload == f"file:{tmp_path}/scratch"
    monkeypatch.chdir("/")
    loss_in(planned(**batch)).backward()


def test_copies_of_what_is_saved_are_refused_by_name(away):
    model, batch = small("mlp")
    planned, _ = wrapped(model, batch, "80%", away)
    copied = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().clone(), lambda tensor: tensor
    )
    with copied:
        loss = loss_in(planned(**batch))
    with pytest.raises(hybridremat.OffloadError, match="hooks on saved tensors"):
        loss.backward()
