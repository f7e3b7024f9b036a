"""What copies take: the rate of a device's memory, and the price of values that go there and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import torch

from hybridremat.graph.costs.kernel_benchmarks import memory_errors
from hybridremat.graph.costs.kernel_clocks import clock_for, on_one_thread
from hybridremat.graph.costs.kernel_times import AGREEING, PASSES
from hybridremat.graph.outside import outside_tracing

_COPIED: Final = 64 << 20
"""Bytes: with the copy, beyond what caches hold (of large servers they hold more, and nothing is missed)."""

_CACHED: Final = 1 << 20
"""Bytes that they do hold."""


@cache
def copy_rate(device: str) -> float:
    """Bytes that the device moves in a second, read and written, measured once a process."""
    return 2e9 * _COPIED / min(_copy_times(device, _COPIED))


def _copy_times(device: str, *sizes: int) -> list[int]:
    """Nanoseconds that it takes to copy so many bytes, in turn, the least of some passes."""
    with outside_tracing(), memory_errors():
        pairs = [torch.ones(2, size, dtype=torch.uint8, device=device) for size in sizes]
        clock = clock_for(device)
        passes = [[clock.least(partial(one.copy_, other)) for one, other in pairs] for _ in range(PASSES)]
    return [min(times) for times in zip(*passes, strict=True)]


@dataclass(frozen=True)
class MissPrice:
    """Nanoseconds that a MiB takes to memory and back, and whether two measurements agree on them."""

    nanoseconds: int
    settled: bool


def miss_price(device: str) -> MissPrice:
    """What copies take longer that no cache holds; the lower of two measurements.

    Found on CPUs alone; 0 elsewhere. On one thread, and shared among those that there are: copies on several
    wait for one another on a busy machine.
    """
    if device != "cpu":
        return MissPrice(0, settled=True)
    threads = torch.get_num_threads()
    with on_one_thread():
        low, high = sorted(_copies_price(device) for _ in range(2))
    return MissPrice(low // threads, settled=0 < high <= AGREEING * low)


def _copies_price(device: str) -> int:
    sizes = _COPIED, _CACHED
    far, near = (t * 2**20 // size for t, size in zip(_copy_times(device, *sizes), sizes, strict=True))
    return max(0, far - near)
