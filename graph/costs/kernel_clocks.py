"""Clocks for single kernels, one for each kind of device, that leave out what else the machine does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import inf
from typing import Protocol

import torch

BURST_NS = 4_000_000  # what is spent on the runs of one kernel in a pass, if they are short
MAX_RUNS, MAX_LAUNCHES = 6, 50
SHARED_NS = 20_000  # on one thread: what is shorter gains nothing from more
DISTURBED = 4  # a run on several threads that takes as many times one on a single thread


class KernelClock(Protocol):
    """Times one kernel; what it gives for one call can be too long, never too short."""

    def least(self, call: Callable[[], object]) -> int:
        """Nanoseconds of one run: the least of some."""
        ...


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Let PyTorch's kernels run on one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class CpuClock:
    """CPU time of the calling thread, which goes on only while that thread runs.

    A kernel on several threads shares its work among them. Where the calling thread does less than its share,
    the process's CPU time divided by the threads is more. Neither counts the wait for a core. But a thread
    that spins until another one gets a core does count: on a busy machine a kernel of microseconds takes
    8 ms. A run on one thread has no such wait, and is no faster than one on several on a quiet machine: it
    comes first, and what takes far longer than it is not run again in this pass.
    """

    threads: int = 1
    thread_ns: Callable[[], int] = time.thread_time_ns
    process_ns: Callable[[], int] = time.process_time_ns
    on_one_thread: Callable[[], AbstractContextManager[None]] = on_one_thread

    def least(self, call: Callable[[], object]) -> int:
        """See :class:`KernelClock`."""
        if self.threads == 1:
            return self._repeated(self._own, call)
        with self.on_one_thread():
            alone = self._own(call)
            if alone < SHARED_NS:
                return self._repeated(self._own, call)
        return min(alone, self._repeated(self._shared, call, most=DISTURBED * alone))

    def _repeated(
        self, measure: Callable[[Callable[[], object]], int], call: Callable[[], object], most: float = inf
    ) -> int:
        """The least of some runs, up to one that takes ``most`` nanoseconds."""
        elapsed = least = measure(call)
        runs = 1
        while runs * least < BURST_NS and runs < MAX_RUNS and elapsed < most:
            elapsed = measure(call)
            least, runs = min(least, elapsed), runs + 1
        return max(1, least)

    def _own(self, call: Callable[[], object]) -> int:
        start = self.thread_ns()
        result = call()
        elapsed = self.thread_ns() - start
        del result
        return elapsed

    def _shared(self, call: Callable[[], object]) -> int:
        start = self.process_ns()
        own = self._own(call)
        return max(own, (self.process_ns() - start) // self.threads)


@dataclass(frozen=True)
class CudaClock:
    """Time between two events on the device's stream, with many launches between them."""

    def least(self, call: Callable[[], object]) -> int:
        """See :class:`KernelClock`. What the first call loads or tunes is not the kernel's time."""
        _between_events(call, 1)
        single = _between_events(call, 1)
        launches = min(MAX_LAUNCHES, BURST_NS // single)
        return min(single, _between_events(call, launches)) if launches > 1 else single


def _between_events(call: Callable[[], object], launches: int) -> int:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return max(1, round(1e6 * milliseconds / launches))


def clock_for(device: str) -> KernelClock:
    """The clock of a kind of device. Where the CPU clock is coarse (Windows), wall time is taken."""
    if device == "cuda":
        return CudaClock()
    if time.get_clock_info("thread_time").resolution > 1e-6:
        return CpuClock(thread_ns=time.perf_counter_ns)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return CpuClock(min(torch.get_num_threads(), cores))
