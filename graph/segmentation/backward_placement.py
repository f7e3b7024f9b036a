"""Which block each backward op runs in: where it may run, then successive minimum cuts in bytes.

A forward value is available from the block that makes it to the block of its last forward reader. Blocks
run in reverse order in the backward, so an op cannot sit in a later block than the ops that it reads
gradients from. Where a backward op needs values that no block sees together, or must run before a reader
that sits in a late block, the availability of the earlier values is extended to the block that needs them,
as if a forward op read them there.

Ops with a choice left (the add that accumulates a residual's gradient, the matrix product that makes a wide
gradient) are placed so that few bytes of gradients are handed from block to block. From the last block to
the first, one minimum cut decides what runs in that block ("early") and what runs below it ("late"). Only
ops that may do either are nodes of the cut, so each is a graph of a few dozen nodes however large the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import networkx as nx

from hybridremat.graph.joint import JointGraph
from hybridremat.graph.segmentation.minimum_cut import source_side

EARLY_GRADIENT_SHARE = 50
"""A parameter gradient made early costs its bytes divided by this: it lives to the end of the step."""

EARLY, LATE = "early", "late"


@dataclass(frozen=True)
class OpRoles:
    """The part that every op plays, each tuple in topological order.

    ``forward`` ops run in the forward of a block; ``optional`` ops are rebuilt in each block whose backward
    reads them; ``backward`` ops run once, in the backward of one block.
    """

    forward: tuple[int, ...]
    optional: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Availability:
    """First and last block in which each forward value can be read; −1 if the forward does not make it."""

    first: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True)
class BlockRanges:
    """Lowest and highest block that each optional and backward op may run in; −1 for the others."""

    lowest: tuple[int, ...]
    highest: tuple[int, ...]


def extend_availability(
    graph: JointGraph, roles: OpRoles, available: Availability, num_blocks: int
) -> tuple[Availability, BlockRanges]:
    """Extend availability until every op has a block; return it with the blocks that each op may use."""
    lowest = _lowest_blocks(graph, roles, available)
    last = list(available.last)
    rest = sorted(roles.optional + roles.backward)
    for op in rest:
        for value in _forward_reads(graph, op, available):
            last[value] = max(last[value], lowest[op])
    highest = [-1] * len(graph.ops)
    for op in rest:
        bounds = [last[value] for value in _forward_reads(graph, op, available)]
        bounds += [highest[made] for made in _other_producers(graph, op, available)]
        highest[op] = min(bounds, default=num_blocks - 1)
    return Availability(available.first, tuple(last)), BlockRanges(tuple(lowest), tuple(highest))


def _lowest_blocks(graph: JointGraph, roles: OpRoles, available: Availability) -> list[int]:
    """Earliest block of each op whose inputs exist there, and no earlier than any of its readers."""
    optional = frozenset(roles.optional)
    lowest = [-1] * len(graph.ops)
    rest = sorted(roles.optional + roles.backward)
    for op in rest:
        bounds = [available.first[value] for value in _forward_reads(graph, op, available)]
        bounds += [lowest[made] for made in _other_producers(graph, op, available) if made in optional]
        lowest[op] = max(bounds, default=0)
    for op in reversed(rest):
        for made in _other_producers(graph, op, available):
            lowest[made] = max(lowest[made], lowest[op])
    return lowest


def _forward_reads(graph: JointGraph, op: int, available: Availability) -> Iterator[int]:
    return (value for value in graph.ops[op].reads if available.first[value] >= 0)


def _other_producers(graph: JointGraph, op: int, available: Availability) -> Iterator[int]:
    """Optional and backward ops that make what ``op`` reads."""
    for value in graph.ops[op].reads:
        producer = graph.values[value].producer
        if producer is not None and available.first[value] < 0:
            yield producer


@dataclass
class _Placement:
    """State of the successive cuts: ``block`` maps the ops placed so far."""

    graph: JointGraph
    freedom: BlockRanges
    readers: dict[int, list[int]]
    block: dict[int, int] = field(default_factory=dict)


def place_backward(
    graph: JointGraph, backward: tuple[int, ...], freedom: BlockRanges, num_blocks: int
) -> dict[int, int]:
    """Block of every op in ``backward``, within ``freedom``.

    Of all minimum cuts the one with most ops on the early side is taken, which makes the answer unique.
    """
    state = _Placement(graph, freedom, _backward_readers(graph, backward))
    waiting = list(backward)
    for block in range(num_blocks - 1, 0, -1):
        for op in waiting:
            if freedom.lowest[op] >= block:
                state.block[op] = block
        free = [op for op in waiting if op not in state.block and freedom.highest[op] >= block]
        for op in _early_ops(state, free):
            state.block[op] = block
        waiting = [op for op in waiting if op not in state.block]
    state.block.update((op, 0) for op in waiting)
    return state.block


def _backward_readers(graph: JointGraph, backward: tuple[int, ...]) -> dict[int, list[int]]:
    """For each value that a backward op makes, its readers."""
    readers: dict[int, list[int]] = {value: [] for op in backward for value in graph.ops[op].writes}
    for op in backward:
        for value in graph.ops[op].reads:
            if value in readers:
                readers[value].append(op)
    return readers


def _early_ops(state: _Placement, free: list[int]) -> list[int]:
    """The free ops on the early side of the minimum cut."""
    network = _cut_network(state, free)
    if EARLY not in network and LATE not in network:
        return free
    network.add_nodes_from((EARLY, LATE))
    early = source_side(network, EARLY, LATE)
    return [op for op in free if op in early or op not in network]


def _cut_network(state: _Placement, free: list[int]) -> nx.DiGraph[Hashable]:
    """Cut edges are values read late but made early, and parameter gradients made early."""
    network: nx.DiGraph[Hashable] = nx.DiGraph()
    free_ops = set(free)
    charge = dict.fromkeys(free, 0)
    for op in free:
        for value in state.graph.ops[op].writes:
            size = state.graph.values[value].bytes
            if value in state.graph.gradients:
                charge[op] += size // EARLY_GRADIENT_SHARE
            elif any(reader not in free_ops for reader in state.readers[value]):
                charge[op] += size + 1
            else:
                _add_value(network, value, op, size + 1, state.readers[value])
            for reader in state.readers[value]:
                if reader in free_ops:
                    network.add_edge(reader, op)
        for value in state.graph.ops[op].reads:
            _add_incoming(network, state, value, free_ops)
    for op, cost in charge.items():
        if cost:
            network.add_edge(op, LATE, capacity=cost)
    return network


def _add_value(
    network: nx.DiGraph[Hashable], value: int, source: Hashable, cost: int, readers: list[int]
) -> None:
    """Pay ``cost`` once if ``source`` is early and any reader late."""
    if readers:
        network.add_edge(source, ("value", value), capacity=cost)
        network.add_edges_from((("value", value), reader) for reader in readers)


def _add_incoming(network: nx.DiGraph[Hashable], state: _Placement, value: int, free: set[int]) -> None:
    """A gradient that is early already crosses the cut unless all its waiting readers are early."""
    if state.graph.values[value].producer not in state.block or value in state.graph.gradients:
        return
    if ("value", value) in network:
        return
    waiting = [reader for reader in state.readers.get(value, ()) if reader not in state.block]
    if all(reader in free for reader in waiting):
        _add_value(network, value, EARLY, state.graph.values[value].bytes + 1, waiting)
