"""A long timeline in few points: stretches of executions, each shown by the one that takes the most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Stretch:
    """Executions ``first`` … ``last`` (both included), shown by ``shown``, which takes the most of them."""

    first: int
    last: int
    shown: int


def thinned(totals: Sequence[int], num_forward: int, most: int) -> tuple[Stretch, ...]:
    """Stretches that cover all executions in turn; none reaches from the forward into the backward.

    The highest execution of all is shown: it is the highest of its stretch.

    Parameters
    ----------
    totals
        Bytes at every execution.
    num_forward
        How many of them are the forward's.
    most
        How many stretches there may be, at least 2; more executions than that are drawn together.
    """
    ends = [num_forward, len(totals)] if 0 < num_forward < len(totals) else [len(totals)]
    found: list[Stretch] = []
    start = 0
    for end in ends:
        count = min(end - start, max(1, most * (end - start) // max(1, len(totals))))
        edges = [start + (end - start) * i // count for i in range(count + 1)] if count else []
        for first, after in pairwise(edges):
            found.append(Stretch(first, after - 1, max(range(first, after), key=totals.__getitem__)))
        start = end
    return tuple(found)
