"""What a stage of several layers takes under a limit, estimated from what each layer takes by itself.

A layer runs in one of several ways, which save more or recompute more. A stage begins with the fastest way of
each, and gives up first what costs the least time for each byte that is saved no more: the greedy solution of
a multiple-choice knapsack on the convex hulls of the layers, exact but for its last step (Sinha, Zoltners
1979). It decides where cuts are tried; what a stage really takes is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class LayerWay:
    """One way to run a layer, or a stage of layers.

    Attributes
    ----------
    held
        Bytes that wait between its forward and its backward, its outputs among them.
    above
        Bytes at its peak beside those.
    time
        Nanoseconds of forward and backward.
    """

    held: int
    above: int
    time: int


def on_hull(ways: Iterable[LayerWay]) -> tuple[LayerWay, ...]:
    """The ways on the lower convex hull of bytes held and time, the fastest first."""
    hull: list[LayerWay] = []
    for way in sorted(ways, key=lambda each: (each.held, each.time, each.above)):
        if hull and way.time >= hull[-1].time:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], way):
            hull.pop()
        hull.append(way)
    return tuple(reversed(hull))


def _is_above(low: LayerWay, middle: LayerWay, high: LayerWay) -> bool:
    left = (low.time - middle.time) * (high.held - low.held)
    return left <= (low.time - high.time) * (middle.held - low.held)


def stage_ways(layers: Sequence[Sequence[LayerWay]]) -> tuple[LayerWay, ...]:
    """Ways to run layers one after the other, the fastest first; each layer's are on its hull."""
    steps = sorted(
        ((after.time - before.time) / max(1, before.held - after.held), layer, number)
        for layer, ways in enumerate(layers)
        for number, (before, after) in enumerate(pairwise(ways))
    )
    chosen = [ways[0] for ways in layers]
    made = [_together(chosen)]
    for _, layer, number in steps:
        chosen[layer] = layers[layer][number + 1]
        made.append(_together(chosen))
    return tuple(made)


def _together(chosen: Sequence[LayerWay]) -> LayerWay:
    """Peaks come one after the other, on top of what all layers hold."""
    held, time = sum(each.held for each in chosen), sum(each.time for each in chosen)
    return LayerWay(held, max(each.above for each in chosen), time)


def needed(way: LayerWay, copies: int, gradients: int) -> int:
    """Bytes for so many forwards in flight: at the start of a backward, or at its end."""
    return max(copies * way.held + way.above, (copies - 1) * way.held + gradients)


def least_time(ways: Sequence[LayerWay], copies: int, gradients: int, limit: int) -> int | None:
    """Nanoseconds of the fastest way that so many bytes have room for; None if there is none."""
    fits = (way.time for way in ways if needed(way, copies, gradients) <= limit)
    return min(fits, default=None)


def least_needed(ways: Sequence[LayerWay], copies: int, gradients: int) -> int:
    """The fewest bytes that one of the ways needs."""
    return min(needed(way, copies, gradients) for way in ways)
