"""What kernels take in a step beside what they take alone, with their inputs in the caches.

A value that the forward saves goes to memory, and comes back when the backward reads it; one that has just
been made again is in the caches. So backward ops take longer than alone by what their inputs take to come
back, and an op that makes such an input takes less by that when it runs again. Both are put into the times
of the ops, where whatever plans with them finds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hybridremat.graph.joint import JointGraph, Op, Phase


def with_misses(graph: JointGraph, times: Sequence[int], price: int) -> list[int]:
    """Nanoseconds per op from those that its kernel takes alone.

    ``price`` is what a MiB takes to memory and back (nanoseconds). The plain step takes ``price`` longer for
    each MiB of forward values that its backward reads; readers of one value share that. No op takes less than
    half of its time alone, however large its outputs.
    """
    readers = _readers(graph)
    found = list(times)
    for op in graph.ops:
        misses = _misses(graph, op, readers, price)
        total = sum(misses.values())
        gained = min(total, times[op.id] // 2) if op.recomputable else 0
        found[op.id] -= gained
        for value, miss in misses.items():
            for reader in readers[value]:
                found[reader] += (miss + gained * miss // total) // len(readers[value])
    return found


def _readers(graph: JointGraph) -> dict[int, list[int]]:
    """By value, the ops that read it in the backward of the plain step."""
    readers: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            for value in op.reads:
                readers[value].append(op.id)
    return readers


def _misses(graph: JointGraph, op: Op, readers: dict[int, list[int]], price: int) -> dict[int, int]:
    """Nanoseconds that what a forward op makes takes to memory and back, by value."""
    if op.phase is not Phase.FORWARD:
        return {}
    read = (value for value in op.writes if value in readers)
    misses = {value: price * graph.values[value].bytes >> 20 for value in read}
    return {value: miss for value, miss in misses.items() if miss}
