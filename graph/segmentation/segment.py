"""Cut a joint graph into a chain of complex blocks.

:func:`segment` walks the forward ops, chooses cuts with small boundaries
(:mod:`hybridremat.graph.segmentation.cuts`), and gives every backward op to a block
(:mod:`hybridremat.graph.segmentation.backward_placement`).
"""

from __future__ import annotations

from dataclasses import replace

from hybridremat.graph.joint import JointGraph, Phase, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.pins import NO_PINS, Pins
from hybridremat.graph.segmentation.always_saved import always_saved_values
from hybridremat.graph.segmentation.backward_placement import (
    Availability,
    OpRoles,
    extend_availability,
    place_backward,
)
from hybridremat.graph.segmentation.chain import Block, Chain
from hybridremat.graph.segmentation.cuts import block_sizes, choose_cuts
from hybridremat.graph.segmentation.forward_order import ForwardOrder, forward_order, rebuilt_producers

__all__ = ["block_sizes", "segment"]

DUPLICATE_SHARE = 0.001
"""An optional op read by several blocks is rebuilt in each if its time is below this share of the step's."""


def segment(graph: JointGraph, *, max_ops: int, pins: Pins = NO_PINS) -> Chain:
    """Cut ``graph`` into blocks of at most ``max_ops`` real forward ops.

    A real op makes a value that is not always saved; a block's copies of rebuilt ops count. An optional op
    stands in every block whose backward reads it, and each block makes its own copy; if it is expensive
    or its value is returned as a gradient, it is a backward op instead: it runs once, in one block, and
    its value is handed down.

    Parameters
    ----------
    graph
        Any joint graph with at least one forward op.
    max_ops
        Most real forward ops of a block, at least 1.
    pins
        What is always saved, and what the backward makes again: cuts where such a value would cross are
        avoided. One that crosses all the same is no longer in ``Chain.remade``, and so made again by nobody.

    Raises
    ------
    ValueError
        If ``max_ops`` is less than 1, or the graph has no forward op.
    """
    if max_ops < 1:
        raise ValueError(f"max_ops must be at least 1, got {max_ops}")
    plain_peak = step_memory(graph, plain_schedule(graph)).peak
    saved = always_saved_values(graph, plain_peak, pins)
    order = forward_order(graph, saved)
    if not order.ops:
        raise ValueError("the graph has no forward op, so there is nothing to cut")
    remade = pins.recomputed_values(graph) - order.always
    ends = choose_cuts(graph, order, max_ops, remade)
    handed_down = _with_optional_readers(graph, order, _returned_optional(graph))
    while True:
        chain = _assemble(graph, order, ends, handed_down)
        costly = _costly_duplicates(chain)
        if not costly:
            return replace(chain, remade=remade.difference(*chain.boundary))
        handed_down = _with_optional_readers(graph, order, handed_down | costly)


def _returned_optional(graph: JointGraph) -> frozenset[int]:
    """Optional ops that make a gradient: its one version must live to the end of the step."""
    return frozenset(
        op.id for op in graph.ops if op.phase is Phase.OPTIONAL and graph.gradients & set(op.writes)
    )


def _with_optional_readers(graph: JointGraph, order: ForwardOrder, ops: frozenset[int]) -> frozenset[int]:
    """``ops`` not in the forward, and the optional ops that read from them: no block can rebuild these."""
    chosen = set(ops) - set(order.ops)
    for op in graph.ops:
        if op.phase is Phase.OPTIONAL and any(graph.values[value].producer in chosen for value in op.reads):
            chosen.add(op.id)
    return frozenset(chosen)


def _costly_duplicates(chain: Chain) -> frozenset[int]:
    """Optional ops that stand in several blocks and cost too much for that."""
    limit = DUPLICATE_SHARE * sum(op.time for op in chain.graph.ops)
    seen: set[int] = set()
    costly: set[int] = set()
    for block in chain.blocks:
        costly.update(op for op in block.optional if op in seen and chain.graph.ops[op].time > limit)
        seen.update(block.optional)
    return frozenset(costly)


def _assemble(
    graph: JointGraph, order: ForwardOrder, ends: tuple[int, ...], handed_down: frozenset[int]
) -> Chain:
    """The chain for cuts at positions ``ends``."""
    num_blocks = len(ends)
    roles = _roles(graph, order, handed_down)
    block_of = [block for block, (start, end) in enumerate(_spans(ends)) for _ in range(start, end)]
    available, freedom = extend_availability(
        graph, roles, _own_availability(graph, order, block_of, num_blocks), num_blocks
    )
    placed = place_backward(graph, roles.backward, freedom, num_blocks)
    backward: list[list[int]] = [[] for _ in ends]
    for op in roles.backward:
        backward[placed[op]].append(op)
    optional = _optional_of_blocks(graph, roles, backward, freedom.lowest)
    blocks = tuple(
        Block(
            _with_rebuilt(graph, order, order.ops[start:end], (*optional[block], *backward[block])),
            tuple(optional[block]),
            tuple(backward[block]),
        )
        for block, (start, end) in enumerate(_spans(ends))
    )
    boundary = _boundaries(order, available, num_blocks)
    return Chain(
        graph,
        blocks,
        boundary,
        _gradient_boundaries(graph, placed, num_blocks),
        order.always,
        frozenset(order.rebuilt),
    )


def _with_rebuilt(
    graph: JointGraph, order: ForwardOrder, forward: tuple[int, ...], rest: tuple[int, ...]
) -> tuple[int, ...]:
    """A block's forward with the rebuilt ops it needs: ahead of their first reader, else behind all."""
    result: dict[int, None] = {}
    for op in forward:
        result.update(dict.fromkeys(rebuilt_producers(graph, order, graph.ops[op])))
        result[op] = None
    for op in rest:
        result.update(dict.fromkeys(rebuilt_producers(graph, order, graph.ops[op])))
    return tuple(result)


def _spans(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *ends[:-1]), ends, strict=True))


def _roles(graph: JointGraph, order: ForwardOrder, handed_down: frozenset[int]) -> OpRoles:
    in_forward = frozenset(order.ops).union(order.rebuilt)
    rest = [op for op in graph.ops if op.id not in in_forward]
    late = {op.id for op in rest if op.phase is Phase.BACKWARD} | handed_down
    return OpRoles(
        order.ops,
        tuple(op.id for op in rest if op.id not in late),
        tuple(op.id for op in rest if op.id in late),
    )


def _own_availability(
    graph: JointGraph, order: ForwardOrder, block_of: list[int], num_blocks: int
) -> Availability:
    """From the block that makes a value to that of its last forward reader; everywhere if always saved."""
    first, last = [], []
    for value, (made_at, read_at) in enumerate(zip(order.produced_at, order.last_read_at, strict=True)):
        kept = value in order.always
        first.append(-1 if made_at < 0 else 0 if kept else block_of[made_at])
        last.append(-1 if made_at < 0 else num_blocks - 1 if kept else block_of[read_at])
    for op, position in order.rebuilt.items():
        for value in graph.ops[op].writes:
            first[value] = block_of[min(position, len(block_of) - 1)]
            last[value] = num_blocks - 1
    return Availability(tuple(first), tuple(last))


def _optional_of_blocks(
    graph: JointGraph, roles: OpRoles, backward: list[list[int]], lowest: tuple[int, ...]
) -> list[list[int]]:
    """In each block the optional ops that its backward needs; unread ones in their lowest block."""
    optional = frozenset(roles.optional)
    needed = [_optional_ancestors(graph, optional, ops) for ops in backward]
    used = frozenset().union(*needed)
    for op in roles.optional:
        if op not in used:
            needed[lowest[op]] |= {op} | _optional_ancestors(graph, optional, [op])
    return [sorted(ops) for ops in needed]


def _optional_ancestors(graph: JointGraph, optional: frozenset[int], ops: list[int]) -> set[int]:
    """Optional ops that ``ops`` are made of."""
    found: set[int] = set()
    pending = list(ops)
    while pending:
        for value in graph.ops[pending.pop()].reads:
            producer = graph.values[value].producer
            if producer in optional and producer not in found:
                found.add(producer)
                pending.append(producer)
    return found


def _boundaries(order: ForwardOrder, available: Availability, num_blocks: int) -> tuple[frozenset[int], ...]:
    sets: list[set[int]] = [set() for _ in range(num_blocks + 1)]
    for value, (first, last) in enumerate(zip(available.first, available.last, strict=True)):
        if order.produced_at[value] >= 0 and value not in order.always:
            for block in range(first + 1, last + 1):
                sets[block].add(value)
    return tuple(map(frozenset, sets))


def _gradient_boundaries(
    graph: JointGraph, placed: dict[int, int], num_blocks: int
) -> tuple[frozenset[int], ...]:
    sets: list[set[int]] = [set() for _ in range(num_blocks + 1)]
    for op, block in placed.items():
        for value in graph.ops[op].reads:
            producer = graph.values[value].producer
            if producer in placed and value not in graph.gradients:
                for crossed in range(block + 1, placed[producer] + 1):
                    sets[crossed].add(value)
    return tuple(map(frozenset, sets))
