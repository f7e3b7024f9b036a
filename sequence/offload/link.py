"""The link between a device and host memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """How fast copies go.

    Attributes
    ----------
    out, back
        Bytes in a second to the host, and from it.
    latency
        Nanoseconds of each copy beside its bytes.
    duplex
        Whether both ways go at one time; else copies of both take turns in the order of the schedule.
    """

    out: float
    back: float
    latency: int = 10_000
    duplex: bool = True

    def out_ns(self, size: int) -> int:
        """Nanoseconds of a copy of so many bytes to the host."""
        return self.latency + round(size / self.out * 1e9)

    def back_ns(self, size: int) -> int:
        """Nanoseconds of a copy of so many bytes from the host."""
        return self.latency + round(size / self.back * 1e9)
