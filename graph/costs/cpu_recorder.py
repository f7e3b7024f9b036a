"""A memory recorder for CPU: the allocation records of ``torch.profiler``.

They see every tensor allocation, workspaces inside kernels included. PyTorch has one profiler at a time.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from hybridremat.errors import ProfilerActiveError
from hybridremat.graph.costs.recorder import Recording, Segment, peak_of_new
from hybridremat.graph.private_torch import ALLOCATION_EVENT, _profiler_enabled
from hybridremat.interrupts import interrupts_held

_MARK = "##hybridremat mark:"
_interruptible: list[CpuRecorder] = []  # the profiler is one for the process; so is this


class CpuRecorder:
    """See :class:`~hybridremat.graph.costs.recorder.MemoryRecorder`.

    Parameters
    ----------
    interruptible
        Whether the recording is given up when another one starts, as that of a step in the loop is when a
        plan for a new input shape has to be measured. Otherwise that other one is an error.
    """

    def __init__(self, *, interruptible: bool = False) -> None:
        self._interruptible = interruptible
        self._profiler: profile | None = None

    def start(self) -> None:
        """See the protocol.

        Raises
        ------
        ProfilerActiveError
            If a profiler is running: starting another would end it.
        """
        while _interruptible:
            _interruptible[-1].give_up()
        if _profiler_enabled():
            raise ProfilerActiveError(
                "memory has to be measured, which takes torch.profiler, and a session of it is running "
                "already. Plan and measure outside of it: hybridremat.prepare(model, kwargs=batch) plans an "
                "input shape ahead of the step that meets it."
            )
        # without acc_events it reads its events when they are asked for, which takes seconds for a model
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with interrupts_held(), _without_notices(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it keeps the events of one session alone
            profiler.start()
            self._profiler = profiler
        if self._interruptible:
            _interruptible.append(self)

    def mark(self, name: str) -> None:
        """See the protocol."""
        with record_function(_MARK + name):
            pass

    def stop(self) -> Recording | None:
        """See the protocol."""
        stopped = self._stopped()
        if stopped is None:
            return None
        assert stopped.profiler is not None and stopped.profiler.kineto_results is not None
        records, marks = _records(stopped.profiler.kineto_results.experimental_event_tree())
        return Recording(
            tuple(_segments(records, marks)),
            peak_of_new((r.address, r.size) for r in records),
            tuple(_segments(list(_of_new(records)), marks)),
            _moved(records, [when for when, _ in marks]),
        )

    def give_up(self) -> None:
        """See the protocol."""
        self._stopped()

    def _stopped(self) -> profile | None:
        with interrupts_held():
            profiler, self._profiler = self._profiler, None
            if profiler is not None:
                if self in _interruptible:
                    _interruptible.remove(self)
                with _without_notices():
                    profiler.stop()
        return profiler


@dataclass(frozen=True)
class _Record:
    """Signed bytes at an address, and when, in nanoseconds."""

    when: int
    address: int
    size: int


def _records(tree: Sequence[Any]) -> tuple[list[_Record], list[tuple[int, str]]]:
    """Allocation records, and the time and name of each mark, both in the order of time."""
    records: list[_Record] = []
    marks: list[tuple[int, str]] = []
    stack = list(tree)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == ALLOCATION_EVENT:
            fields = event.extra_fields
            records.append(_Record(event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name.startswith(_MARK):
            marks.append((event.start_time_ns, event.name.removeprefix(_MARK)))
    records.sort(key=lambda record: record.when)
    marks.sort(key=lambda mark: mark[0])
    return records, marks


def _segments(records: Sequence[_Record], marks: Sequence[tuple[int, str]]) -> Iterator[Segment]:
    level = position = 0
    names = ["", *(name for _, name in marks)]
    for name, end in zip(names, [*(when for when, _ in marks), float("inf")], strict=True):
        start = peak = level
        while position < len(records) and records[position].when < end:
            level += records[position].size
            peak = max(peak, level)
            position += 1
        yield Segment(name, start, peak, level)


def _of_new(records: Sequence[_Record]) -> Iterator[_Record]:
    """The records without those that free what was there before, which may be known or not."""
    alive: set[int] = set()
    for record in records:
        if record.size > 0:
            alive.add(record.address)
        elif record.address not in alive:
            continue
        else:
            alive.remove(record.address)
        yield record


def _moved(records: Sequence[_Record], marks: Sequence[int]) -> dict[tuple[int, int], int]:
    """Bytes by the segments in which they were allocated and freed, where these are two."""
    alive: dict[int, tuple[int, int]] = {}
    moved: Counter[tuple[int, int]] = Counter()
    for record in records:
        segment = bisect_right(marks, record.when)
        if record.size > 0:
            alive[record.address] = segment, record.size
        elif record.address in alive:
            since, size = alive.pop(record.address)
            if since != segment:
                moved[since, segment] += size
    return dict(moved)


@contextmanager
def _without_notices() -> Iterator[None]:
    """Keep Kineto's own start and stop notices off the terminal; anything else is passed on."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            caught.seek(0)
            rest = [line for line in caught.read().splitlines(keepends=True) if not line.startswith(b"USDT:")]
            if rest:
                sys.stderr.write(b"".join(rest).decode(errors="replace"))
