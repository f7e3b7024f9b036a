"""Times of kernels from clocks that stand in for a busy machine, and for a GPU."""

from __future__ import annotations

import itertools
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hybridremat.graph.costs import kernel_benchmarks, kernel_clocks
from hybridremat.graph.costs.cost_models import ProfileCost, with_times
from hybridremat.graph.costs.kernel_clocks import MAX_LAUNCHES, MAX_RUNS, CpuClock, CudaClock
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernel_times import Neighbours, measured_times
from hybridremat.graph.costs.kernels import distinct_kernels
from support.training import small, traced

SLICE = 8_000_000
TRUE = {f"{op} {size}": size * factor for op, factor in (("mm", 3), ("add", 2), ("sum", 1))
        for size in (10_000, 200_000, 4_000_000, 30_000_000)}  # fmt: skip
NEIGHBOURS = Neighbours({key: key.split()[0] for key in TRUE}, {key: int(key.split()[1]) for key in TRUE})


class BusyMachine:
    """Adds whole slices of the scheduler to most runs, the first of each kernel included, and percents."""

    def __init__(self, seed, hit=0.9, always=()):
        self.random, self.hit, self.always, self.seen = random.Random(seed), hit, always, set()

    def sample(self, key):
        return min(self.run(key) for _ in range(MAX_RUNS))

    def run(self, key):
        time = TRUE[key] * self.random.uniform(1, 1.03)
        first, _ = key not in self.seen, self.seen.add(key)
        if first or key in self.always or self.random.random() < self.hit:
            time += SLICE * self.random.randint(1, 40 if key in self.always else 4)
        return round(time)


@pytest.mark.parametrize("seed", range(20))
def test_times_of_a_busy_machine_are_those_of_a_quiet_one(seed):
    times = measured_times([*TRUE], BusyMachine(seed, hit=0.6).sample, NEIGHBOURS)
    assert len(times.kept) >= len(TRUE) - 2
    assert all(time <= 1.05 * TRUE[key] for key, time in times.kept.items())


@pytest.mark.parametrize("seed", range(20))
def test_where_most_samples_are_hit_no_time_that_is_kept_is_far_from_its_neighbours(seed):
    times = measured_times([*TRUE], BusyMachine(seed).sample, NEIGHBOURS)
    assert all(time <= 9 * TRUE[key] + 50_000 for key, time in times.kept.items())
    assert all(time < SLICE for key, time in times.kept.items() if TRUE[key] < 100_000)


def test_a_time_that_never_settles_is_guessed_from_its_neighbours_and_not_kept():
    key = "add 10000"
    times = measured_times([*TRUE], BusyMachine(1, hit=0, always={key}).sample, NEIGHBOURS)
    assert key not in times.kept and TRUE[key] / 2 <= times.doubtful[key] <= 1.1 * TRUE[key]
    assert times.kept.keys() == TRUE.keys() - {key}


def test_an_odd_time_that_every_pass_agrees_on_will_do_for_one_plan():
    odd = {**TRUE, "mm 10000": 900_000}
    times = measured_times([*TRUE], odd.__getitem__, NEIGHBOURS)
    assert times.doubtful == {"mm 10000": 900_000}


def test_kernels_are_timed_in_turn_and_only_doubtful_ones_again():
    machine, calls = BusyMachine(2, hit=0, always={"sum 10000"}), []
    measured_times([*TRUE], lambda key: calls.append(key) or machine.sample(key), NEIGHBOURS)
    assert calls == [*TRUE] * 3 + ["sum 10000"] * 3


def test_known_times_are_neighbours():
    """One kernel that is new is held against those that are on disk."""
    known = {key: time for key, time in TRUE.items() if key != "mm 10000"}
    neighbours = Neighbours(NEIGHBOURS.op_of, NEIGHBOURS.roofline, known)
    assert neighbours.implausible({"mm 10000": SLICE}) == {"mm 10000": 30_000}
    assert neighbours.implausible({"mm 10000": 60_000}) == {}


def test_a_kernel_without_neighbours_is_believed():
    alone = Neighbours({"svd": "svd"}, {"svd": 10})
    assert measured_times(["svd"], lambda key: SLICE, alone).kept == {"svd": SLICE}


def test_only_plausible_times_reach_the_store(monkeypatch, tmp_path):
    model, batch = small("transformer")
    step = traced(model, **batch)
    kernels = distinct_kernels(step)
    bad = next(key for key in kernels.node_of if "aten.mm." in key)
    slices = itertools.count(1)

    class Clock:
        def least(self, key):
            return 1000 * SLICE * next(slices) if key == bad else 5_000

    keys = {node: key for key, node in kernels.node_of.items()}
    monkeypatch.setattr(kernel_benchmarks, "clock_for", lambda device: Clock())
    monkeypatch.setattr(kernel_benchmarks, "prepared", lambda node, **_: keys[node])
    store = KernelStore(tmp_path / "kernels.json")
    timed = with_times(step, ProfileCost(), store, lambda done, total: None)
    store.save()
    again = KernelStore(tmp_path / "kernels.json")
    assert {key: again.times.get(key) for key in kernels.node_of} == {
        key: None if key == bad else 5_000 for key in kernels.node_of
    }
    assert 0 < max(op.time for op in timed.graph.ops) < SLICE


class Threads:
    """CPU clocks of a kernel on some threads: its own time, and the spinning of each run."""

    def __init__(self, threads, work, spins):
        self.threads, self.work, self.spins = threads, work, iter(spins)
        self.thread = self.process = 0
        self.alone = False

    def run(self):
        share = self.work if self.alone else self.work // self.threads
        spin = 0 if self.alone else next(self.spins, 0)
        self.thread += share + spin
        self.process += self.work + spin

    @contextmanager
    def one_thread(self):
        self.alone = True
        yield
        self.alone = False

    def clock(self):
        return CpuClock(self.threads, lambda: self.thread, lambda: self.process, self.one_thread)


def test_threads_that_spin_make_a_kernel_no_longer_than_it_is_on_one_thread():
    quiet, busy = (Threads(2, 400_000, spins) for spins in ([], [SLICE] * 20))
    assert quiet.clock().least(quiet.run) == 200_000
    assert busy.clock().least(busy.run) == 400_000
    assert busy.process == 2 * 400_000 + SLICE  # one run each: other passes try again
    now_and_then = Threads(2, 400_000, [SLICE, 0])
    clock = now_and_then.clock()
    assert [clock.least(now_and_then.run) for _ in range(2)] == [400_000, 200_000]


def test_kernels_too_short_to_share_are_timed_on_one_thread():
    short = Threads(2, 10_000, [SLICE] * 20)
    assert short.clock().least(short.run) == 10_000
    assert short.process == (1 + MAX_RUNS) * 10_000


def test_on_one_thread_other_threads_of_the_process_do_not_count():
    machine = Threads(1, 30_000, [])
    clock = CpuClock(1, lambda: machine.thread, lambda: machine.process * 50)
    assert clock.least(machine.run) == 30_000


def test_the_number_of_threads_is_as_before():
    before = kernel_clocks.torch.get_num_threads()
    CpuClock(2).least(lambda: None)
    assert kernel_clocks.torch.get_num_threads() == before


class Gpu:
    """Stands in for torch.cuda: kernels of 20 µs behind one launch of 100 µs; counts waits.

    The first call takes ``cold`` nanoseconds more.
    """

    def __init__(self, cold=0):
        self.cold = cold
        self.now = self.waits = self.calls = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = gpu.now

            def synchronize(self):
                gpu.waits += 1

            def elapsed_time(self, end):
                return (end.at - self.at + 100_000) / 1e6

        self.Event = Event

    def run(self):
        self.now += 20_000 + self.cold * (not self.calls)
        self.calls += 1


def test_on_cuda_many_launches_stand_between_two_events(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(kernel_clocks, "torch", SimpleNamespace(cuda=gpu))
    assert CudaClock().least(gpu.run) == 20_000 + 100_000 // (gpu.calls - 2)
    assert 20 <= gpu.calls <= MAX_LAUNCHES + 2 and gpu.waits == 3


@pytest.mark.parametrize("cold", [3_000_000, 90_000_000])
def test_what_the_first_call_on_cuda_loads_is_not_the_kernels_time(cold, monkeypatch):
    warm, gpu = Gpu(), Gpu(cold)
    monkeypatch.setattr(kernel_clocks, "torch", SimpleNamespace(cuda=warm))
    expected = CudaClock().least(warm.run)
    monkeypatch.setattr(kernel_clocks, "torch", SimpleNamespace(cuda=gpu))
    assert CudaClock().least(gpu.run) == expected
