"""Allocation records: what a piece of code allocates and frees, to the byte.

On CPU the records of ``torch.profiler`` see every tensor allocation, temporaries inside kernels
included. On CUDA the caching allocator's own counters are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hybridremat.errors import ProfilerActiveError
from hybridremat.graph.costs.open_recording import give_up_recording
from hybridremat.graph.costs.profiler_notices import without_profiler_notices
from hybridremat.graph.private_torch import ALLOCATION_EVENT, _profiler_enabled

_TAG = "##hybridremat:"


@dataclass(frozen=True)
class Trace:
    """Allocation events in time order, and named spans and marks.

    ``events`` are (nanoseconds, signed bytes); ``spans[name]`` is (start, end) in nanoseconds.
    """

    events: tuple[tuple[int, int], ...]
    spans: dict[str, tuple[int, int]]

    def peak(self, start: int, end: int) -> tuple[int, int]:
        """(highest, last) cumulated bytes between two times, counted from the first."""
        level = highest = 0
        for when, size in self.events:
            if start <= when <= end:
                level += size
                highest = max(highest, level)
        return highest, level


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a stretch of code, to be found in :attr:`Trace.spans`."""
    with record_function(_TAG + name):
        yield


def record_allocations(run: Callable[[], None]) -> Trace:
    """Run a function on CPU and return its allocation records. An open recording is given up for it.

    Raises
    ------
    ProfilerActiveError
        If a profiler is running: PyTorch has one at a time, and starting ours would end it.
    """
    give_up_recording()
    if _profiler_enabled():
        raise ProfilerActiveError(
            "memory has to be measured, which takes torch.profiler, and a session of it is running already. "
            "Plan and measure outside of it: hybridremat.prepare(model, kwargs=batch) plans an input shape "
            "ahead of the step that meets it."
        )
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with without_profiler_notices(), recording as profiler:
        run()
    events: list[tuple[int, int]] = []
    spans: dict[str, tuple[int, int]] = {}
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == ALLOCATION_EVENT:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
        elif event.name.startswith(_TAG):
            spans[event.name.removeprefix(_TAG)] = (event.start_time_ns, event.end_time_ns)
    events.sort(key=lambda record: record[0])
    return Trace(tuple(events), spans)


Prepared = Callable[[], Callable[[], object]]


def peaks_of(prepared: Sequence[Prepared], device: str) -> list[tuple[int, int]]:
    """For each call, (peak bytes while it ran, bytes alive when it returned), its result still held.

    Each element makes its inputs and returns the call to be measured, so that the inputs of one call
    are all that is alive at any time.
    """
    return _cuda_peaks(prepared) if device == "cuda" else _cpu_peaks(prepared)


def _cpu_peaks(prepared: Sequence[Prepared]) -> list[tuple[int, int]]:
    def run() -> None:
        for index, prepare in enumerate(prepared):
            call = prepare()
            with span(str(index)):
                result = call()
            del result, call

    trace = record_allocations(run)
    figures = []
    position = 0
    for index in range(len(prepared)):  # one pass: the spans follow one another
        start, end = trace.spans[str(index)]
        while position < len(trace.events) and trace.events[position][0] < start:
            position += 1
        level = highest = 0
        while position < len(trace.events) and trace.events[position][0] <= end:
            level += trace.events[position][1]
            highest = max(highest, level)
            position += 1
        figures.append((highest, level))
    return figures


def _cuda_peaks(prepared: Sequence[Prepared]) -> list[tuple[int, int]]:
    figures = []
    for prepare in prepared:
        call = prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        figures.append((torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before))
        del result, call
    return figures
