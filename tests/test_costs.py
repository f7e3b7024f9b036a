"""The cost models, the trials of single kernels, and the store that remembers them."""

from __future__ import annotations

import json
import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import fx

import hybridremat
from hybridremat.errors import CostModelError, UntriedKernelError
from hybridremat.files import cache_folder
from hybridremat.graph.costs import cuda_recorder, kernel_benchmarks
from hybridremat.graph.costs.cost_models import (
    MISS_PRICE,
    DeviceRates,
    ProfileCost,
    RooflineCost,
    cost_model,
)
from hybridremat.graph.costs.footprints import _footprints, _Trial
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import distinct_kernels
from hybridremat.graph.joint import Phase
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.tracing.fx_nodes import tensors
from support.cuda_stand_in import Allocator
from support.own_kernels import Picky
from support.training import small, traced, with_costs

HOW = {"cost_model": "flops", "workers": 1, "progress": False}


def test_kernels_are_tried_outside_of_what_the_caller_does():
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), outside_tracing():
        drawn = torch.rand(4, 4, requires_grad=True)
        assert (drawn @ drawn).dtype == torch.float32
        assert not (drawn @ drawn).requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def ops_of(step, part):
    """Ops whose target contains ``part``."""
    return [op for op in step.graph.ops if part in op.target]


def test_flops_costs_are_the_same_twice_and_positive():
    model, batch = small("transformer")
    first, second = (traced(model, **batch) for _ in range(2))
    assert first.graph == second.graph
    assert all(op.time >= 1 for op in first.graph.ops)


def test_roofline_takes_the_larger_term():
    model, batch = small("mlp")
    step = traced(model, **batch)
    slow = with_costs(step, RooflineCost(DeviceRates(flops=1e9, bytes=1e15)), KernelStore())
    assert [op.time for op in slow.graph.ops] == [max(1, op.flops) for op in step.graph.ops]
    rates = DeviceRates(flops=1e15, bytes=1e9, call_ns=7)
    wide = with_costs(step, RooflineCost(rates), KernelStore())
    assert [op.time for op in wide.graph.ops] == [op.io_bytes + 7 for op in step.graph.ops]


class SteadyClock:
    """Runs a kernel and gives nanoseconds by what comes out: a busy machine casts no doubt on them."""

    def least(self, kernel):
        return 1_000 + sum(tensor.numel() for tensor in tensors(kernel()))


def test_profile_times_each_distinct_kernel_once(monkeypatch):
    monkeypatch.setattr(kernel_benchmarks, "clock_for", lambda device: SteadyClock())
    model, batch = small("mlp")
    step = traced(model, **batch)
    store, calls = KernelStore(), []
    store.times.update({MISS_PRICE: 0})
    timed = with_costs(step, ProfileCost(), store, lambda done, total: calls.append(total))
    kernels = distinct_kernels(step)
    assert len(calls) == len(kernels.node_of) < len(step.graph.ops)
    assert [op.time for op in timed.graph.ops] == [store.times.get(key) for key in kernels.key_of]
    assert len({op.time for op in timed.graph.ops}) > 3
    again = with_costs(step, ProfileCost(), store, lambda done, total: calls.append(0))
    assert again.graph == timed.graph and 0 not in calls


def test_a_kernel_that_cannot_be_tried_is_an_error_or_guessed_told_and_not_remembered(caplog):
    net = Picky(1.5)
    told = r'picky.*own_kernels.py:\d+ \(picky takes 1.5 alone.*untried="allow"'
    with pytest.raises(UntriedKernelError, match=told):
        traced(net, torch.randn(16, 8))
    step, store = traced(net, torch.randn(16, 8), untried="allow"), KernelStore()
    store.times.update({MISS_PRICE: 0})
    with caplog.at_level(logging.WARNING, logger="hybridremat"):
        for count in (1, 2):
            caplog.clear()
            timed = with_costs(step, ProfileCost(), store, untried="allow")
            told = [r.getMessage() for r in caplog.records]
            assert any("while it runs is not counted" in line for line in told), count
            assert any("its time is guessed" in line for line in told), count
    assert len(timed.graph.untried) == 1
    guess = with_costs(step, RooflineCost(), KernelStore(), untried="allow")
    untried = [i for i, key in enumerate(distinct_kernels(step).key_of) if key and key not in store.times]
    assert untried and all(timed.graph.ops[i].time == guess.graph.ops[i].time > 1 for i in untried)
    assert all(store.temporaries.get(distinct_kernels(step).key_of[i]) is None for i in untried)


def test_a_kernel_that_takes_no_made_up_numbers_is_tried_on_what_the_ops_before_it_make():
    step, store = traced(Picky(1.5, made=True), torch.randn(16, 8)), KernelStore()
    with_costs(step, ProfileCost(), store)
    (op,) = ops_of(step, "picky")
    assert op.temp == 16 * 8 * 4 and store.times.get(distinct_kernels(step).key_of[op.id]) is not None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 2 bytes"),
    ],
)
def test_no_memory_left_to_try_a_kernel_is_an_error_and_nothing_is_remembered(error, monkeypatch, tmp_path):
    def fail(*_):
        raise error

    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path))
    model, batch = small("mlp")
    with monkeypatch.context() as patch, pytest.raises(hybridremat.MeasurementError, match="smaller batch"):
        patch.setattr("hybridremat.graph.costs.footprints.prepared", lambda node, **_: partial(fail))
        hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW)
    assert not list(tmp_path.iterdir())
    hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW)


def test_temporaries_are_what_a_kernel_allocates_beyond_its_outputs():
    model, batch = small("transformer")
    step = traced(model, **batch)
    (dropout, *_) = [op for op in ops_of(step, "native_dropout") if op.phase is Phase.FORWARD]
    output, mask = (step.graph.values[v].bytes for v in dropout.writes)
    assert output == 4 * mask and dropout.temp >= output  # the mask is drawn as floats first
    assert all(op.temp == 0 for op in step.graph.ops if "aten.add.Tensor" in op.target)


def test_measuring_kernels_draws_nothing():
    model, batch = small("transformer")
    state = torch.get_rng_state()
    traced(model, **batch)
    assert torch.equal(torch.get_rng_state(), state)


def test_unknown_cost_model():
    with pytest.raises(CostModelError, match="cost_model='slow' is not known; use one of 'profile'"):
        cost_model("slow")


# The kernel store


def test_what_is_saved_is_read_again(tmp_path):
    path = tmp_path / "deep" / "kernels.json"
    store = KernelStore(path)
    store.times.update({"a": 3})
    store.temporaries.update({"b": 4})
    store.save()
    again = KernelStore(path)
    assert (again.times.get("a"), again.temporaries.get("b"), again.times.get("b")) == (3, 4, None)
    assert [p.name for p in path.parent.iterdir()] == ["kernels.json"]


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", '{"version": 11}', '{"version": 11, "times": {"a": null}, "temporaries": {}}',
     '{"version": 11, "times": {"a": Infinity}, "temporaries": {}}',
     '{"version": 11, "times": {"a": 1}, "temporaries": {}, "outputs": {"a": ["x"]}}', b"\xff\xfe\x00"],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_replaced(tmp_path, damage, caplog):
    path = tmp_path / "kernels.json"
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    store = KernelStore(path)
    assert store.times.get("a") is None and "cannot be read" in caplog.text
    store.times.update({"a": 5})
    store.save()
    assert KernelStore(path).times.get("a") == 5


def test_another_version_is_ignored(tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"version": 99, "times": {"a": 1}, "temporaries": {}}))
    assert KernelStore(path).times.get("a") is None


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch, caplog):
    path = tmp_path / "kernels.json"
    store = KernelStore(path)
    store.times.update({"a": 5})
    store.save()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    store.times.update({"a": 6})
    store.save()
    assert "disk full" in caplog.text
    assert KernelStore(path).times.get("a") == 5 and [p.name for p in tmp_path.iterdir()] == ["kernels.json"]


def test_a_folder_that_cannot_be_made_costs_only_time(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = KernelStore(tmp_path / "file" / "kernels.json")
    store.times.update({"a": 5})
    store.save()
    assert "could not be kept" in caplog.text and store.times.get("a") == 5


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    store = KernelStore.for_device("cpu")
    store.times.update({"a": 5})
    store.save()
    assert len(list(tmp_path.glob("kernels-*.json"))) == 1
    assert KernelStore.for_device("cpu").times.get("a") == 5


def test_what_a_library_keeps_from_its_first_call_on_is_no_workspace(monkeypatch):
    """As cuBLAS does on CUDA: 1000 bytes that stay, and 64 that are freed when the call returns."""
    allocator, kept = Allocator(), []
    monkeypatch.setattr(cuda_recorder, "torch", SimpleNamespace(cuda=allocator))

    def product():
        if not kept:
            kept.append(allocator.allocate(1000))
        allocator.allocate(64)
        allocator.allocate(-64)

    node = fx.Graph().placeholder("product")
    trials = [(name, _Trial(lambda: partial(product), node)) for name in ("first", "again")]
    found = _footprints(iter(trial for _, trial in trials), trials, "cuda").footprints
    assert {key: footprint.workspace for key, footprint in found.items()} == {"first": 64, "again": 64}
