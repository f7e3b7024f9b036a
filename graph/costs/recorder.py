"""What a memory recorder does, and what a recording holds; there is one recorder for each kind of device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

Mark = Callable[[str], None]

#: A segment of this name frees what was allocated before the recording: gradients that are set to None.
FREEING = "freeing"


@dataclass(frozen=True)
class Segment:
    """The time from one mark of a recording to the next.

    ``start``, ``peak`` and ``end`` are bytes above what was allocated when the recording started.
    """

    name: str
    start: int
    peak: int
    end: int

    @property
    def above_start(self) -> tuple[int, int]:
        """(peak bytes, bytes left at the end), above what was allocated when the segment started."""
        return self.peak - self.start, self.end - self.start


@dataclass(frozen=True)
class Recording:
    """Segments in the order of time, the first one named ``""``.

    ``new_peak`` is the most bytes that were allocated since the start and alive at one time. What was there
    before does not count when it is freed: on CPU wherever it is, on CUDA in segments named
    :data:`FREEING`.

    Where addresses are known, ``new_segments`` are the same without what was there before, and ``moved`` the
    bytes allocated in one segment and freed in another, by the numbers of both.
    """

    segments: tuple[Segment, ...]
    new_peak: int
    new_segments: tuple[Segment, ...] | None = None
    moved: Mapping[tuple[int, int], int] | None = None

    @property
    def peak(self) -> int:
        """Most bytes above the start."""
        return max(segment.peak for segment in self.segments)

    def named(self) -> dict[str, Segment]:
        """Segments by name, for marks that are used once."""
        return {segment.name: segment for segment in self.segments}


class MemoryRecorder(Protocol):
    """Records what is allocated and freed, from :meth:`start` to :meth:`stop`."""

    def start(self) -> None:
        """Start. Raises ProfilerActiveError where that takes a profiler and one is running."""

    def mark(self, name: str) -> None:
        """End the current segment, and start one of that name."""

    def stop(self) -> Recording | None:
        """Stop; None if the recording was given up."""

    def give_up(self) -> None:
        """Stop without figures. Does nothing if it has stopped already."""


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
