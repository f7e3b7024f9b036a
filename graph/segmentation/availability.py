"""In which blocks a forward value can be read in the backward, and so where each backward op may run.

A forward value is available from the block that makes it to the block of its last forward reader. Blocks
run in reverse order in the backward, so an op cannot sit in a later block than the ops that it reads
gradients from. Where a backward op needs values that no block sees together, or must run before a reader
that sits in a late block, the earlier values *ride along*: their availability is extended to the block that
needs them, as if a forward op read them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridremat.graph.joint import JointGraph


@dataclass(frozen=True)
class Roles:
    """The part that every op plays, each tuple in topological order.

    ``line`` ops run in the forward of a block; ``optional`` ops are rebuilt in each block whose backward
    reads them; ``backward`` ops run once, in the backward of one block.
    """

    line: tuple[int, ...]
    optional: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Availability:
    """First and last block in which each forward value can be read; −1 for values off the line."""

    first: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True)
class Freedom:
    """Lowest and highest block that each optional and backward op may run in; −1 for the others."""

    lowest: tuple[int, ...]
    highest: tuple[int, ...]


def settle_availability(
    graph: JointGraph, roles: Roles, available: Availability, num_blocks: int
) -> tuple[Availability, Freedom]:
    """Extend availability until every op has a block; return it with the blocks that each op may use."""
    lowest = _lowest_blocks(graph, roles, available)
    last = list(available.last)
    rest = sorted(roles.optional + roles.backward)
    for op in rest:
        for value in _line_reads(graph, op, available):
            last[value] = max(last[value], lowest[op])
    highest = [-1] * len(graph.ops)
    for op in rest:
        bounds = [last[value] for value in _line_reads(graph, op, available)]
        bounds += [highest[made] for made in _other_producers(graph, op, available)]
        highest[op] = min(bounds, default=num_blocks - 1)
    return Availability(available.first, tuple(last)), Freedom(tuple(lowest), tuple(highest))


def _lowest_blocks(graph: JointGraph, roles: Roles, available: Availability) -> list[int]:
    """Least block of each op: where all that it is made of exists, and no earlier than any of its readers."""
    optional = frozenset(roles.optional)
    lowest = [-1] * len(graph.ops)
    rest = sorted(roles.optional + roles.backward)
    for op in rest:
        bounds = [available.first[value] for value in _line_reads(graph, op, available)]
        bounds += [lowest[made] for made in _other_producers(graph, op, available) if made in optional]
        lowest[op] = max(bounds, default=0)
    for op in reversed(rest):
        for made in _other_producers(graph, op, available):
            lowest[made] = max(lowest[made], lowest[op])
    return lowest


def _line_reads(graph: JointGraph, op: int, available: Availability) -> Iterator[int]:
    return (value for value in graph.ops[op].reads if available.first[value] >= 0)


def _other_producers(graph: JointGraph, op: int, available: Availability) -> Iterator[int]:
    """Optional and backward ops that make what ``op`` reads."""
    for value in graph.ops[op].reads:
        producer = graph.values[value].producer
        if producer is not None and available.first[value] < 0:
            yield producer
