"""Where to cut the forward into blocks: a dynamic program over positions; and which block sizes to try.

A block is a run of *groups*; a group is one real op (it makes a value that is not always saved) with the
unreal ops behind it. The price of a block is the sum of

- what its end costs: boundary bytes, number of boundary values, and a fixed charge for one more block;
- the share of the forward's time that must be spent again to rebuild, from the block's input and
  output alone, what its backward reads. Without this term a cut after the attention instead of after the
  MLP forces a wide matrix product to be computed again.

Prices do not depend on the position, so repeated layers are cut alike wherever the forward allows it; see
:mod:`hybridremat.graph.segmentation.repeated_layers` for what makes them alike for certain.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np

from hybridremat.graph.joint import JointGraph, Phase, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.pins import NO_PINS, Pins
from hybridremat.graph.segmentation.always_saved import always_saved_values
from hybridremat.graph.segmentation.forward_order import (
    ForwardOrder,
    OpGroups,
    alive_after,
    forward_order,
    op_groups,
    rebuilt_producers,
)
from hybridremat.graph.segmentation.repeated_layers import Repetition, find_repetitions, group_kinds

BYTES_WEIGHT = 4.0
"""Price of a boundary of mean bytes."""

COUNT_WEIGHT = 0.2
"""Price of one more value in a boundary."""

BLOCK_WEIGHT = 1.0
"""Price of one more block."""

SMALL_BLOCK_WEIGHT = 0.5
"""Price of a block of at most :data:`SMALL_BLOCK` groups: it has nothing to trade."""

SMALL_BLOCK = 2

REBUILD_WEIGHT = 10.0
"""Price of rebuilding the whole forward once."""

KIND_WEIGHT = 1.0
"""Price of one more kind of block: equal blocks are solved once."""

REMADE_WEIGHT = 50.0
"""Price of a cut that a value crosses which has to be made again."""

OFFSETS = 4
"""Places in a layer that are tried for a repeated cut."""

TOLERANCE = 1e-9
"""Prices this close are equal."""

LARGEST_BLOCK = 24
"""Larger blocks take long to solve, and longer to prove."""

SMALLEST_BLOCK = 12
"""Much smaller blocks leave the solver little to trade."""

DISTINCT_SHARE = 0.75
"""A second size above this share of the largest would cut nearly alike."""

SLACK = 1.25
"""Room for the pieces of a split layer to be unequal: cheap cuts are seldom in the middle."""


def end_prices(
    graph: JointGraph, order: ForwardOrder, groups: OpGroups, remade: frozenset[int] = frozenset()
) -> list[float]:
    """Price of a cut before every group; its two ends cost nothing."""
    sizes = np.array([value.bytes for value in graph.values], dtype=np.int64)
    last_positions = np.array(groups.start[1:-1], dtype=np.int64) - 1
    alive_bytes = alive_after(order, sizes)
    mean = max(1.0, float(alive_bytes.mean())) if len(order.ops) else 1.0
    count = alive_after(order, np.ones(len(graph.values), dtype=np.int64))
    price = (
        BYTES_WEIGHT * alive_bytes[last_positions] / mean
        + COUNT_WEIGHT * count[last_positions]
        + BLOCK_WEIGHT
    )
    if remade:
        again = np.isin(np.arange(len(graph.values)), list(remade)).astype(np.int64)
        price += REMADE_WEIGHT * alive_after(order, again)[last_positions]
    return [0.0, *price.tolist(), 0.0]


def block_prices(graph: JointGraph, order: ForwardOrder, groups: OpGroups, max_ops: int) -> list[list[float]]:
    """``prices[q][n-1]``: price of the block of the n groups before the cut at group q, its end excluded."""
    backward_reads = _backward_reads(graph)
    total = max(1, sum(graph.ops[op].time for op in order.ops))
    prices: list[list[float]] = [[]]
    for end in range(1, len(groups) + 1):
        needed: set[int] = set()
        copies: set[int] = set()
        row: list[float] = []
        again = 0
        for size in range(1, min(max_ops, end) + 1):
            first, stop = groups.start[end - size], groups.start[end - size + 1]
            for position in range(stop - 1, first - 1, -1):
                op = graph.ops[order.ops[position]]
                copies.update(rebuilt_producers(graph, order, op))
                if _must_run_again(op.writes, needed, backward_reads, order, groups.start[end]):
                    again += op.time
                    needed.update(value for value in op.reads if order.produced_at[value] >= 0)
            if row and size + len(copies) > max_ops:
                break
            small = SMALL_BLOCK_WEIGHT if size <= SMALL_BLOCK else 0.0
            row.append(small + REBUILD_WEIGHT * again / total)
        prices.append(row)
    return prices


def _backward_reads(graph: JointGraph) -> frozenset[int]:
    """Values that backward or optional ops read."""
    return frozenset(value for op in graph.ops if op.phase is not Phase.FORWARD for value in op.reads)


def _must_run_again(
    writes: tuple[int, ...], needed: set[int], backward_reads: frozenset[int], order: ForwardOrder, end: int
) -> bool:
    """Whether an op of a block that ends before position ``end`` makes a value that must be rebuilt."""
    return any(
        value not in order.always
        and (value in needed or (value in backward_reads and order.last_read_at[value] < end))
        for value in writes
    )


def cheapest_cuts(
    prices: list[list[float]], ends: list[float], forced: frozenset[int] = frozenset()
) -> tuple[float, tuple[int, ...]]:
    """Cheapest way to cut groups 0…n into blocks: its price and the cuts (the last is n, 0 is left out).

    No block runs over a cut in ``forced``. Ties go to the larger block, then to the earlier cut.
    """
    best = [0.0] + [np.inf] * (len(prices) - 1)
    previous_cut = [0] * len(prices)
    for end in range(1, len(prices)):
        for size, price in enumerate(prices[end], start=1):
            total = best[end - size] + price + ends[end]
            if total <= best[end] + TOLERANCE:
                best[end], previous_cut[end] = min(total, best[end]), end - size
            if end - size in forced:
                break
    cuts = []
    at = len(prices) - 1
    while at > 0:
        cuts.append(at)
        at = previous_cut[at]
    return best[-1], tuple(reversed(cuts))


def choose_cuts(
    graph: JointGraph, order: ForwardOrder, max_ops: int, remade: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Positions where blocks end (exclusive), the last one being the number of forward ops.

    Cuts that a value in ``remade`` crosses are avoided.
    """
    groups = op_groups(order)
    kinds = group_kinds(graph, order.ops, groups)
    ends = end_prices(graph, order, groups, remade)
    prices = block_prices(graph, order, groups, max_ops)
    forced: frozenset[int] = frozenset()
    best_price, best = _priced(prices, ends, kinds, forced)
    for repetition in find_repetitions(kinds):
        chosen = forced
        for candidate in _repeated_cuts(repetition, ends, max_ops):
            price, cuts = _priced(prices, ends, kinds, forced | candidate)
            if price < best_price - TOLERANCE:
                best_price, best, chosen = price, cuts, forced | candidate
        forced = chosen
    return tuple(groups.start[cut] for cut in best)


def _priced(
    prices: list[list[float]], ends: list[float], kinds: tuple[int, ...], forced: frozenset[int]
) -> tuple[float, tuple[int, ...]]:
    """The cheapest cuts under ``forced``, with the charge for every kind of block."""
    price, cuts = cheapest_cuts(prices, ends, forced)
    distinct = {kinds[start:end] for start, end in zip((0, *cuts), cuts, strict=False)}
    return price + KIND_WEIGHT * len(distinct), cuts


def _repeated_cuts(repetition: Repetition, ends: list[float], max_ops: int) -> Iterator[frozenset[int]]:
    """Ways to cut repeated layers at the same cheap places: each, or every few that fit a block."""
    start, stop, period = repetition.start, repetition.stop, repetition.period
    inner = start + (stop - start) // period // 2 * period
    places = sorted(range(period), key=lambda offset: (ends[min(inner + offset, stop)], offset))
    for layers in range(1, max(1, max_ops // period) + 1):
        step = layers * period
        for offset in places[:OFFSETS]:
            yield frozenset(range(start + offset, stop + 1, step))


def block_sizes(graph: JointGraph, pins: Pins = NO_PINS) -> tuple[int, ...]:
    """Values of ``max_ops`` worth trying, in ascending order; the frontiers of all are merged.

    The largest size that solves quickly always; beside it, where the net repeats, about a layer, or the
    piece of one that a layer longer than that must be split into; otherwise the half and the middle.
    """
    saved = always_saved_values(graph, step_memory(graph, plain_schedule(graph)).peak, pins)
    order = forward_order(graph, saved)
    groups = op_groups(order)
    if len(groups) <= SMALLEST_BLOCK:
        return (max(1, len(groups)),)
    repetitions = find_repetitions(group_kinds(graph, order.ops, groups))
    if not repetitions:
        return (SMALLEST_BLOCK, (SMALLEST_BLOCK + LARGEST_BLOCK) // 2, LARGEST_BLOCK)
    layer = repetitions[0].period
    layer_ops = order.ops[groups.start[repetitions[0].start] : groups.start[repetitions[0].start + layer]]
    layer += len({made for op in layer_ops for made in rebuilt_producers(graph, order, graph.ops[op])})
    pieces = ceil(layer / LARGEST_BLOCK)
    piece = layer if pieces == 1 else ceil(SLACK * layer / pieces)
    if not SMALLEST_BLOCK <= piece <= DISTINCT_SHARE * LARGEST_BLOCK:
        piece = SMALLEST_BLOCK
    return (piece, LARGEST_BLOCK)
