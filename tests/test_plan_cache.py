"""Plans kept on disk: found again, bounded, shared by processes, and never in the way."""

from __future__ import annotations

import copy
import gzip
import multiprocessing
import os
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat.blocks.pareto import block_structure, enumerate_options
from hybridremat.graph.costs.kernel_store import device_description
from hybridremat.planning import disk_cache, option_cache, pipeline, plan_cache, planner
from hybridremat.planning.disk_cache import DiskCache
from hybridremat.planning.plan_cache import PLANS, plan_key
from hybridremat.planning.settings import Settings
from support.quick_planning import LITTLE
from support.training import small, train, train_plain
from support.wrapping import HOW, least_limit, wrap


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of one test's own; blocks that are solved are counted in ``solved``."""
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("HYBRIDREMAT_CACHE_SIZE", "64MiB")
    return tmp_path / "plans"


@pytest.fixture
def solved(monkeypatch):
    """How often blocks have been solved; nothing that was solved is remembered."""
    calls = []

    class Forgetful(option_cache.OptionCache):
        def solve(self, problems, *_):
            calls.append(1)
            for problem in problems:
                self._by_structure.setdefault((block_structure(problem), "auto"), problem)
            solved_now = {problem: enumerate_options(problem, LITTLE) for problem in problems}
            # for shapes that come later in the same session
            self._known = {(problem, "auto"): options for problem, options in solved_now.items()}
            return solved_now

    monkeypatch.setattr(planner, "OPTIONS", Forgetful())
    return calls


def test_a_second_run_solves_nothing_and_trains_as_plain(cache, solved):
    model, batch = small("transformer")
    limit = least_limit(model, batch)
    wrap(copy.deepcopy(model), batch, limit)
    made = len(solved)
    plain = train_plain(model, batch)
    wrap(model, batch, limit)
    assert len(solved) == made and len(list(cache.iterdir())) == 1
    assert next(iter(hybridremat.get_plan(model).timings)) == "read the kept plan"
    trained = train(model, batch)
    assert plain.differences(trained) == [] and max(trained.peaks) <= limit


def test_what_a_plan_depends_on_is_part_of_its_name(cache, solved):
    model, batch = small("mlp")
    half = {name: tensor[: len(tensor) // 2] for name, tensor in batch.items()}
    for inputs, changes in [
        (batch, {}),
        (half, {}),
        (batch, {"memory_limit": "95%"}),
        (batch, {"reserve": 64}),
        (batch, {"hold_outputs": True}),
        (batch, {"cost_model": "roofline"}),
        (batch, {"on_infeasible": "least"}),
    ]:
        before = len(solved)
        hybridremat.plan(model, kwargs=inputs, **{"memory_limit": "98%", **HOW, **changes})
        assert len(solved) == before + 1, changes
    threads = torch.get_num_threads()
    names = {plan_key("f", Settings(), "cpu", reused=reused) for reused in (False, True)}
    torch.set_num_threads(threads + 1)
    try:
        assert plan_key("f", Settings(), "cpu", reused=False) not in names and len(names) == 2
    finally:
        torch.set_num_threads(threads)


def test_plans_by_older_costs_are_not_found(monkeypatch):
    now = plan_key("f", Settings(), "cpu", reused=False)
    monkeypatch.setattr(plan_cache, "COSTS_VERSION", plan_cache.COSTS_VERSION - 1)
    assert plan_key("f", Settings(), "cpu", reused=False) != now


def test_plans_that_another_release_of_the_solver_made_are_not_found(cache, solved, monkeypatch):
    """Releases may find other schedules of equal cost."""
    model, batch = small("mlp")
    ask = {"kwargs": batch, "memory_limit": "98%", **HOW}
    hybridremat.plan(model, **ask)
    made = len(solved)
    hybridremat.plan(model, **ask)
    assert len(solved) == made
    monkeypatch.setattr(disk_cache, "solver_version", lambda: "9.16.0")
    hybridremat.plan(model, **ask)
    assert len(solved) == made + 1


@pytest.mark.parametrize("spec", [None, "h200"])
def test_another_release_of_torch_has_plans_of_its_own(spec, monkeypatch):
    settings = Settings(device_spec=spec)
    here = plan_key("f", settings, "cpu", reused=False)
    assert plan_key("f", settings, "cpu", reused=False) == here
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert plan_key("f", settings, "cpu", reused=False) != here


def test_later_shapes_are_found_too(cache, solved):
    model, batch = small("transformer")
    half = {name: tensor[: len(tensor) // 2] for name, tensor in batch.items()}

    def both():
        planned = wrap(copy.deepcopy(model), batch, "95%")
        return hybridremat.prepare(planned, kwargs=half)

    first = both()
    made = len(solved)
    second = both()
    assert len(solved) == made
    assert first == second


def test_a_plan_that_the_checker_refuses_is_not_kept(cache, monkeypatch):
    """It would be refused in every run to come."""

    def refuse(*_, **__):
        raise hybridremat.PlanError("refused")

    model, batch = small("mlp")
    monkeypatch.setattr(pipeline, "check", refuse)
    with pytest.raises(hybridremat.PlanError, match="refused"):
        hybridremat.plan(model, kwargs=batch, memory_limit="80%", **HOW)
    assert not list(cache.glob("*.gz"))
    monkeypatch.undo()


@pytest.mark.parametrize("damage", [b"", b"no gzip", gzip.compress(b"{}", mtime=0), None])
def test_a_damaged_entry_is_ignored_and_replaced(cache, solved, caplog, damage):
    model, batch = small("mlp")
    first = hybridremat.plan(model, kwargs=batch, memory_limit="98%", **HOW)
    (entry,) = cache.iterdir()
    good = entry.read_bytes()
    entry.write_bytes(good[: len(good) // 2] if damage is None else damage)
    again = hybridremat.plan(model, kwargs=batch, memory_limit="98%", **HOW)
    assert again == first and "cannot be read" in caplog.text
    assert DiskCache(PLANS, cache, 10**9).read(entry.name.partition(".")[0]) == first


def test_nothing_is_kept_unless_wanted(cache, monkeypatch):
    model, batch = small("mlp")
    hybridremat.plan(model, kwargs=batch, memory_limit="98%", cache=False, **HOW)
    monkeypatch.setenv("HYBRIDREMAT_CACHE_SIZE", "0")
    hybridremat.plan(model, kwargs=batch, memory_limit="98%", **HOW)
    assert not cache.exists()
    monkeypatch.setenv("HYBRIDREMAT_CACHE_SIZE", "much")
    with pytest.raises(hybridremat.LimitError, match="HYBRIDREMAT_CACHE_SIZE='much' cannot be read"):
        hybridremat.plan(model, kwargs=batch, memory_limit="98%", **HOW)


def test_without_the_cache_kernels_leave_no_file_either(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path))
    model, batch = small("mlp")
    hybridremat.plan(model, kwargs=batch, memory_limit="98%", cache=False, **HOW)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDREMAT_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("HYBRIDREMAT_CACHE_SIZE", "1MiB")
    model, batch = small("mlp")
    hybridremat.plan(model, kwargs=batch, memory_limit="98%", **HOW)
    assert "could not be kept" in caplog.text


def kept_plan() -> hybridremat.Plan:
    model, batch = small("mlp")
    return hybridremat.plan(model, kwargs=batch, memory_limit="98%", **HOW)


def test_the_least_recently_used_go_first(tmp_path):
    plan = kept_plan()
    DiskCache(PLANS, tmp_path, 10**9).write("a", plan)
    size = (tmp_path / "a.json.gz").stat().st_size
    cache = DiskCache(PLANS, tmp_path, 3 * size)
    for age, key in enumerate("cb"):
        cache.write(key, plan)
        os.utime(tmp_path / f"{key}.json.gz", ns=(age, age))  # c is the oldest, then b
    os.utime(tmp_path / "a.json.gz", ns=(9, 9))
    assert cache.read("c") == plan  # used: now b is the oldest
    cache.write("d", plan)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "c", "d"]
    DiskCache(PLANS, tmp_path, size - 1).write("e", plan)
    assert not (tmp_path / "e.json.gz").exists()


def hammer(folder, plan, seed, size):
    cache = DiskCache(PLANS, folder, size)
    for turn in range(30):
        key = "abcdef"[(seed + turn) % 6]
        cache.write(key, replace(plan, fingerprint=key))
        found = cache.read("abcdef"[(seed * turn) % 6])
        assert found is None or replace(found, fingerprint=plan.fingerprint) == plan


@pytest.mark.slow
def test_processes_share_a_folder(tmp_path):
    plan = kept_plan()
    DiskCache(PLANS, tmp_path, 10**9).write("a", plan)
    size = 3 * (tmp_path / "a.json.gz").stat().st_size
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=hammer, args=(tmp_path, plan, seed, size)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size
    assert all(path.name.endswith(".json.gz") for path in tmp_path.iterdir())


def test_other_kernels_are_measured_anew_and_keep_the_limit(cache):
    """Without oneDNN convolutions take other memory: neither plan nor figures are those with it."""
    model, batch = small("convnet")
    for enabled in (True, False):
        with torch.backends.mkldnn.flags(enabled=enabled):
            planned = wrap(copy.deepcopy(model), batch, "95%", on_infeasible="least")
            plan = hybridremat.get_plan(planned)
            assert max(train(planned, batch, steps=1).peaks) == plan.predicted_peak <= plan.memory_limit
            assert ("no oneDNN" in plan.origin.device_name) == (not enabled)
            plan.save(cache.parent / "plan.json")
    applied = hybridremat.wrap(model, kwargs=batch, plan=cache.parent / "plan.json", **HOW)
    assert max(train(applied, batch, steps=1).peaks) == hybridremat.get_plan(applied).predicted_peak


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_switches_that_choose_kernels_name_other_figures(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    usual = device_description(device)
    names = set()
    torch.use_deterministic_algorithms(True)
    try:
        names.add(device_description(device))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("medium")
    try:
        names.add(device_description(device))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert device_description(device) == usual and len(names | {usual}) == 3


def test_a_plan_of_a_run_before_speaks_of_the_model_at_hand(cache, solved, tmp_path):
    """Modules that are called otherwise, or lines that have moved, leave the graph the same."""
    batch = {"input": torch.randn(64, 32)}

    def net(*names: str) -> nn.Module:
        return nn.Sequential(OrderedDict((name, nn.Linear(32, 32)) for name in names))

    how = {"grad_outputs": "all", "memory_limit": "120%", **HOW}
    before = hybridremat.plan(net("a", "b"), kwargs=batch, **how)
    made = len(solved)
    before.save(tmp_path / "plan.json")
    kept = hybridremat.plan(net("c", "d"), kwargs=batch, **how)
    assert len(solved) == made and kept.schedule == before.schedule
    applied = hybridremat.wrap(net("c", "d"), kwargs=batch, plan=tmp_path / "plan.json", progress=False)
    for plan in (kept, hybridremat.get_plan(applied)):
        assert [name for block in plan.blocks for name in block.modules] == ["c", "d"]
        assert plan.explain("d").values and {op.module for op in plan.details.graph.ops} <= {"c", "d", ""}
