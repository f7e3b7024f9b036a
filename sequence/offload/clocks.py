"""The time of a schedule with moves: three clocks, of the executions and of each way of the link.

Copies of one way run one after the other, in the order of the schedule. Executions wait before a device copy
is dropped, until it is out, and before its first reader in the backward, until it is back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hybridremat.graph.joint import Move
from hybridremat.sequence.offload.link import Link


@dataclass(frozen=True)
class Timed:
    """Nanoseconds of a step with moves.

    Attributes
    ----------
    total
        Of all executions, with what they wait.
    waits_out, waits_back
        Of that, the waits for copies to the host and from it.
    out, back
        What the link is busy with each way.
    before_out, before_back
        The waits for copies to the host and from it, by the execution that they are before.
    """

    total: int
    waits_out: int = 0
    waits_back: int = 0
    out: int = 0
    back: int = 0
    before_out: dict[int, int] = field(default_factory=dict)
    before_back: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Copy:
    """When one copy starts and ends, in nanoseconds from the start of the step."""

    start: int
    end: int


def timed(
    times: Sequence[int], moves: Sequence[Move], sizes: Sequence[int], link: Link
) -> tuple[Timed, tuple[Copy, ...], tuple[Copy, ...]]:
    """The time of a step, and each move's copy to the host and back.

    Parameters
    ----------
    times
        Nanoseconds of each execution.
    moves, sizes
        What moves, and its bytes.
    link
        The link.
    """
    events: dict[int, _Events] = defaultdict(_Events)
    for number, move in enumerate(moves):
        events[move.birth + 1].born.append(number)
        events[move.free].freed.append(number)
        events[move.fetch].fetched.append(number)
        events[move.ready].ready.append(number)
    before = [0, *accumulate(times)]
    out, back = [Copy(0, 0)] * len(moves), [Copy(0, 0)] * len(moves)
    before_out, before_back = dict[int, int](), dict[int, int]()
    now = out_free = back_free = at = 0
    for place in sorted(events):
        now, at = now + before[place] - before[at], place
        here = events[place]
        for number in here.born:
            start = max(out_free, now)
            out_free = start + link.out_ns(sizes[number])
            out[number] = Copy(start, out_free)
            back_free = back_free if link.duplex else out_free
        for number in here.freed:
            if (late := out[number].end - now) > 0:
                before_out[place], now = before_out.get(place, 0) + late, out[number].end
        for number in sorted(here.fetched, key=lambda each: moves[each].ready):
            start = max(back_free, now, out[number].end)
            back_free = start + link.back_ns(sizes[number])
            back[number] = Copy(start, back_free)
            out_free = out_free if link.duplex else back_free
        for number in here.ready:
            if (late := back[number].end - now) > 0:
                before_back[place], now = before_back.get(place, 0) + late, back[number].end
    total = now + before[-1] - before[at]
    busy = [sum(copy.end - copy.start for copy in copies) for copies in (out, back)]
    waits = sum(before_out.values()), sum(before_back.values())
    return Timed(total, *waits, busy[0], busy[1], before_out, before_back), tuple(out), tuple(back)


class _Events:
    """The moves that something happens to before an execution, in this order."""

    def __init__(self) -> None:
        self.born: list[int] = []
        self.freed: list[int] = []
        self.fetched: list[int] = []
        self.ready: list[int] = []
