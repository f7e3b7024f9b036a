"""How much slower or faster one frontier of a step is than another."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat import Frontier


@dataclass(frozen=True)
class Difference:
    """Points of time, in percent of the plain step's, by which ours takes more at a peak in bytes."""

    points: float
    peak: int


def differences(ours: Frontier, theirs: Frontier) -> list[Difference]:
    """At each peak of theirs that ours can be had for.

    By what our frontier holds; where that is slower, by the plan for this limit, which has more exchanges.
    """
    found = []
    for point in theirs.points:
        if point.peak < ours.least.peak:
            continue
        overhead = min(each.overhead for each in ours.points if each.peak <= point.peak)
        if overhead > point.overhead:
            overhead = ours.at(memory_limit=point.peak).overhead
        found.append(Difference(100 * (overhead - point.overhead), point.peak))
    return found
