"""How fast values leave a device and come back, measured once and kept beside the times of kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from hybridremat.compiler.offload.stores import Stores
from hybridremat.compiler.offload.targets import Target
from hybridremat.graph.costs.kernel_store import KernelStore

COPIED: Final = 64 << 20
"""Bytes of the copies that are timed."""

SMALL: Final = 1 << 20
"""Bytes of those that tell what each copy takes beside its bytes."""

PASSES: Final = 5
TOGETHER: Final = 1.5
"""Copies both ways at once that take less than so many times the longer of them go at one time."""


@dataclass(frozen=True)
class Rates:
    """Bytes in a second each way, nanoseconds that a copy takes beside, and whether both ways go at once."""

    out: float
    back: float
    latency: int
    duplex: bool


def measured_rates(target: Target, device: str, store: KernelStore) -> Rates:
    """The rates of a link, from the store or measured.

    Raises
    ------
    OffloadError
        If there is no room for the copies, or one fails.
    """
    names = [f"{what} {target}" for what in ("64 MiB to", "64 MiB from", "64 MiB both ways of", "1 MiB to")]
    if any(name not in store.times for name in names):
        store.times.update(zip(names, _times(target, device), strict=True))
        store.save()
    out, back, both, small = (store.times[name] for name in names)
    latency = max(0, small - out * SMALL // COPIED)
    return Rates(COPIED / out * 1e9, COPIED / back * 1e9, latency, both < TOGETHER * max(out, back))


def _times(target: Target, device: str) -> list[int]:
    """Nanoseconds of 64 MiB out, back and both at once, and of 1 MiB out: the least of some passes."""
    held = Stores(target, device, 2 * COPIED).take()
    one, other = (torch.zeros(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    little = torch.zeros(SMALL, dtype=torch.uint8, device=device)
    there = held.out(other, COPIED)
    held.wait(there)

    def out() -> None:
        held.wait(held.out(one, 0))

    def back() -> None:
        held.wait(held.back(other, COPIED, there))

    def both() -> None:
        leaving, coming = held.out(one, 0), held.back(other, COPIED, there)
        held.wait(leaving)
        held.wait(coming)

    def small() -> None:
        held.wait(held.out(little, 0))

    out()  # pages are there
    passes = [[_timed(each, device) for each in (out, back, both, small)] for _ in range(PASSES)]
    return [min(times) for times in zip(*passes, strict=True)]


def _timed(copy: Callable[[], None], device: str) -> int:
    if device != "cpu":
        torch.accelerator.synchronize()
    started = time.perf_counter_ns()
    copy()
    if device != "cpu":
        torch.accelerator.synchronize()
    return max(1, time.perf_counter_ns() - started)
