"""What values cost that come from memory in a step, and not where a kernel is timed alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.costs import copies, cost_models, kernel_benchmarks
from hybridremat.graph.costs.cache_misses import with_misses
from hybridremat.graph.costs.copies import MissPrice
from hybridremat.graph.costs.cost_models import MISS_PRICE, ProfileCost
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import distinct_kernels
from hybridremat.graph.joint import JointGraph, Phase, Schedule, plain_schedule
from hybridremat.graph.memory import step_memory
from support.nets import Net, chain, transformer
from support.training import small, traced, with_costs

MIB = 1 << 20


def alone(graph: JointGraph) -> list[int]:
    return [op.time for op in graph.ops]


def time_of(times: list[int], schedule: Schedule) -> int:
    return sum(times[op] for op in schedule.steps)


@given(layers=st.integers(1, 4), width=st.integers(1, 50_000), price=st.integers(0, 100_000))
def test_the_plain_step_takes_longer_by_what_it_saves(layers: int, width: int, price: int) -> None:
    """As the replay of the step counts it, which looks at no phase of a reader."""
    graph = transformer(layers, width=width)
    plain = plain_schedule(graph)
    extra = time_of(with_misses(graph, alone(graph), price), plain) - time_of(alone(graph), plain)
    saved = step_memory(graph, plain).saved
    assert -2 * len(graph.ops) <= extra - price * saved / MIB <= price / MIB  # rounded down; the loss is held


@given(price=st.integers(0, 10_000_000), time=st.integers(1, 1000))
def test_what_runs_again_takes_less_by_what_it_makes_and_never_less_than_half(price: int, time: int) -> None:
    graph = chain(6)
    graph = replace(graph, values=tuple(replace(v, bytes=1000 * v.bytes) for v in graph.values))
    times = with_misses(graph, [time] * len(graph.ops), price)
    read = {value for op in graph.ops if op.phase is Phase.BACKWARD for value in op.reads}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            made = sum(price * graph.values[value].bytes // MIB for value in op.writes if value in read)
            assert times[op.id] == max(time - made, time - time // 2)
        else:
            assert times[op.id] >= time


def test_readers_of_one_value_share_what_it_takes_so_that_equal_layers_stay_equal() -> None:
    graph = transformer(4, width=MIB)
    times = with_misses(graph, alone(graph), 30)
    (mask,) = (op.writes[0] for op in graph.ops if op.target == "mask")
    readers = [op for op in graph.ops if op.phase is Phase.BACKWARD and mask in op.reads]
    extra = {times[op.id] - op.time for op in readers}  # each layer has two such readers, alike
    assert len(readers) == 8 and len(extra) == 1
    assert extra.pop() > 30 * 3 // 2  # they share the attention's input as well


def test_what_must_not_run_again_takes_its_time_and_is_read_in_the_backward_by_optional_ops_too() -> None:
    net = Net()
    once = net.layer("once", [net.input()], 10 * MIB, recomputable=False)
    other = net.layer("other", [net.input()], 10 * MIB, saves=False)
    mask = net.optional([other], 10 * MIB)
    net.derive(net.layer("reader", [once, mask], 1))
    graph = net.joint()
    times = with_misses(graph, [1000] * len(graph.ops), 7)
    by_target = {op.target: time for op, time in zip(graph.ops, times, strict=True)}
    assert [by_target[each] for each in ("once", "other", "optional")] == [1000, 930, 1000 + 70 + 70]
    assert sum(times) == 1000 * len(graph.ops) + 2 * 70


class Copies:
    """A clock whose copies take some nanoseconds a MiB, by whether a cache holds them, and in turn."""

    def __init__(self, near: int, *far: int) -> None:
        self.near, self.far = near, list(far)

    def least(self, copy) -> int:
        size = copy.args[0].numel()
        each = self.near if size <= 32 * MIB else self.far[0] if len(self.far) == 1 else self.far.pop(0)
        return each * size // MIB


@pytest.mark.parametrize(("later", "settled"), [(50_000, True), (55_000, True), (70_000, False)])
def test_the_price_is_what_copies_take_longer_that_no_cache_holds(
    later: int, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Copies(20_000, *[50_000] * 3, *[later] * 3)
    monkeypatch.setattr(copies, "clock_for", lambda _: clock)
    assert copies.miss_price("cpu") == MissPrice(30_000, settled)
    assert copies.miss_price("cuda") == MissPrice(0, True)


def test_threads_share_the_price_and_it_is_found_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(copies, "clock_for", lambda _: seen.append(torch.get_num_threads()) or Copies(20, 50))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert copies.miss_price("cpu").nanoseconds == 10
        assert set(seen) == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("settled", [True, False])
def test_profiles_count_misses_and_keep_a_price_that_settled(
    settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        def least(self, _):
            return 10_000

    monkeypatch.setattr(kernel_benchmarks, "clock_for", lambda _: Clock())
    monkeypatch.setattr(cost_models, "miss_price", lambda _: MissPrice(50_000, settled))
    model, batch = small("mlp")
    step, store = traced(model, **batch), KernelStore()
    graph = with_costs(step, ProfileCost(), store).graph
    times = [10_000 if key else 1 for key in distinct_kernels(step).key_of]
    assert [op.time for op in graph.ops] == with_misses(graph, times, 50_000)
    assert len({op.time for op in graph.ops}) > 2
    monkeypatch.setattr(cost_models, "miss_price", lambda _: MissPrice(0, settled))
    again = with_costs(step, ProfileCost(), store).graph
    assert (again == graph) == settled and store.times.get(MISS_PRICE) == (50_000 if settled else None)
