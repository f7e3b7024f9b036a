"""A recording of allocations on CPU that starts in one place of the code and ends in another.

PyTorch has one profiler at a time. A recording that is open makes way when memory has to be measured for
something else (a plan for a new input shape): it is given up, and has no figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from hybridremat.errors import ProfilerActiveError
from hybridremat.graph.costs.profiler_notices import without_profiler_notices
from hybridremat.graph.private_torch import ALLOCATION_EVENT, _profiler_enabled

_open: list[OpenRecording] = []  # the profiler is one for the process; so is this


def give_up_recording() -> None:
    """End the recording that is open, if there is one; it will have no figures."""
    while _open:
        _open[-1].give_up()


class OpenRecording:
    """Records from its making until :meth:`peak` or :meth:`give_up`.

    Raises
    ------
    ProfilerActiveError
        If a profiler of the caller is running.
    """

    def __init__(self) -> None:
        give_up_recording()
        if _profiler_enabled():
            raise ProfilerActiveError("a profiler of the caller is running, so this step is not measured")
        recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        with without_profiler_notices():
            recording.start()
        self._recording: profile | None = recording
        _open.append(self)

    def give_up(self) -> None:
        """Stop, without figures. Does nothing if it has stopped already."""
        self._stopped()

    def pause(self) -> None:
        """What was there before does not count when it is freed: nothing to do."""

    def resume(self) -> None:
        """See :meth:`pause`."""

    def peak(self) -> int | None:
        """Stop; most bytes that were allocated since the start and alive at one time. None if given up.

        What is freed but was there before the start does not count: it is no part of what was measured.
        """
        stopped = self._stopped()
        if stopped is None:
            return None
        assert stopped.profiler is not None and stopped.profiler.kineto_results is not None
        records = []
        stack = list(stopped.profiler.kineto_results.experimental_event_tree())
        while stack:
            event = stack.pop()
            stack.extend(event.children)
            if event.tag == ALLOCATION_EVENT:
                fields: Any = event.extra_fields
                records.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        records.sort(key=lambda record: record[0])
        return peak_of_new((ptr, size) for _, ptr, size in records)

    def _stopped(self) -> profile | None:
        recording, self._recording = self._recording, None
        if recording is not None:
            _open.remove(self)
            with without_profiler_notices():
                recording.stop()
        return recording


def peak_of_new(records: Iterable[tuple[int, int]]) -> int:
    """Most bytes alive at one time, of (address, signed bytes) in time order; foreign frees are left out."""
    alive: dict[int, int] = {}
    level = highest = 0
    for address, size in records:
        if size > 0:
            alive[address] = size
            level += size
            highest = max(highest, level)
        else:
            level -= alive.pop(address, 0)
    return highest
