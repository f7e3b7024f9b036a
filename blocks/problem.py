"""From block i of a chain to the canonical :class:`BlockProblem`, and the ids that tie it to its place.

What is alive anyway costs the block nothing: its inputs (``boundary[i]``), the chain's ``always`` values,
graph inputs and tangents. An op that makes nothing but such values runs once, in the forward, and is left
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridremat.blocks.types import BackwardStep, BlockBinding, BlockProblem, ForwardOp
from hybridremat.graph.joint import JointGraph, Phase
from hybridremat.graph.segmentation.chain import Block, Chain
from hybridremat.graph.segmentation.skip_values import SkipValue, skip_values


def bind_blocks(chain: Chain) -> tuple[BlockBinding, ...]:
    """Describe every block of ``chain``: :func:`bind_block`."""
    skips = skip_values(chain)
    return tuple(_bound(chain, index, skips) for index in range(len(chain.blocks)))


def bind_block(chain: Chain, index: int) -> BlockBinding:
    """Describe block ``index`` of ``chain`` without global ids.

    Returns
    -------
    BlockBinding
        Its problem (equal for identical blocks) and the global ids of its ops, values and backward ops.

    Raises
    ------
    ValueError
        If an op of the block reads a forward value that is neither made in the block, nor among its inputs,
        nor always alive.
    """
    return _bound(chain, index, skip_values(chain))


def _bound(chain: Chain, index: int, skips: Sequence[SkipValue]) -> BlockBinding:
    graph, block = chain.graph, chain.blocks[index]
    ops = _ordered_ops(chain, block)
    made = {v for op in ops for v in graph.ops[op].writes} - chain.always
    _check_reads(chain, index, ops, made)
    leaving = chain.boundary[index + 1] - chain.boundary[index]
    read = {v for op in (*ops, *block.backward) for v in graph.ops[op].reads}
    values = tuple(v for op in ops for v in graph.ops[op].writes if v in made and v in read | leaving)
    local = {v: d for d, v in enumerate(values)}
    side = _LiveGradients(chain, index)
    merged = _merge_steps(side.walk(), graph, local, side.gradient_in)
    released = graph.released_outputs & local.keys()
    problem = BlockProblem(
        value_bytes=tuple(graph.values[v].bytes for v in values),
        ops=tuple(_forward_op(graph, op, local, chain.always) for op in ops),
        steps=tuple(step.frozen() for step in merged),
        outputs=frozenset(local[v] for v in leaving & local.keys()),
        gradient_in=side.gradient_in,
        held_forward=frozenset(local[v] for v in released - leaving),
        skip_values=frozenset(local[f.value] for f in skips if f.producer == index),
        never_saved=frozenset(local[v] for v in chain.remade & local.keys()),
    )
    return BlockBinding(problem, ops, values, tuple(tuple(step.ops) for step in merged))


def _ordered_ops(chain: Chain, block: Block) -> tuple[int, ...]:
    """Forward ops in order, each optional op right after its last dependency inside the block."""
    graph = chain.graph

    def matters(op: int) -> bool:
        return any(v not in chain.always for v in graph.ops[op].writes)

    order = [op for op in block.forward if matters(op)]
    made = {v for op in (*block.forward, *block.optional) for v in graph.ops[op].writes}
    for op in filter(matters, block.optional):
        producers = {graph.values[v].producer for v in graph.ops[op].reads if v in made}
        after = max((place for place, other in enumerate(order) if other in producers), default=-1)
        order.insert(after + 1, op)
    return tuple(order)


def _check_reads(chain: Chain, index: int, ops: tuple[int, ...], made: set[int]) -> None:
    graph, backward = chain.graph, set(chain.blocks[index].backward)
    # an optional op may stand in the backward of one block, and hand down what it makes
    handed = chain.gradient_boundary[index + 1] | graph.gradients
    for op in (*ops, *chain.blocks[index].backward):
        for v in graph.ops[op].reads:
            producer = graph.producer(v)
            if producer is None or producer.phase is Phase.BACKWARD or producer.id in backward or v in handed:
                continue
            if v not in made and v not in chain.boundary[index] and v not in chain.always:
                raise ValueError(
                    f"block {index}: {graph.ops[op].name} reads {graph.values[v].name or v}, made by "
                    f"{producer.name}, which is neither made in this block nor kept for it"
                )


def _forward_op(graph: JointGraph, op_id: int, local: dict[int, int], always: frozenset[int]) -> ForwardOp:
    """Outputs that nobody reads die with the op: they count as its workspace."""
    op = graph.ops[op_id]
    unread = sum(graph.values[v].bytes for v in op.writes if v not in local and v not in always)
    return ForwardOp(
        reads=tuple(sorted({local[v] for v in op.reads if v in local})),
        writes=tuple(local[v] for v in op.writes if v in local),
        time=op.time,
        temp=op.temp + unread,
        optional=op.phase is Phase.OPTIONAL,
        recomputable=op.recomputable,
        overwrites=tuple(local[v] for v in op.overwrites if v in local),
    )


@dataclass
class _BackwardOp:
    """One backward op with the gradient bytes alive while it runs and after it."""

    op: int
    during: int
    after: int


class _LiveGradients:
    """Live gradient bytes of one block's backward. Values handed on and parameter gradients stay.

    What an op overwrites costs nothing while it runs: a gradient, or a value of the block's forward that no
    later backward op reads. That no recomputation reads it later is taken for granted, as the whole step is
    replayed. A parameter gradient that leaves early goes once no backward op reads it or its parameter; that
    forward ops which run again are done with the parameter by then is taken for granted too.
    """

    def __init__(self, chain: Chain, index: int) -> None:
        self.graph = chain.graph
        self.backward = chain.blocks[index].backward
        self.stay = chain.gradient_boundary[index] | chain.graph.gradients | chain.graph.held_outputs
        self.live = {v for v in chain.gradient_boundary[index + 1] if not chain.graph.values[v].tangent}
        self.gradient_in = self._bytes(self.live)
        made = {v for op in _ordered_ops(chain, chain.blocks[index]) for v in chain.graph.ops[op].writes}
        self.own = made - chain.boundary[index] - chain.boundary[index + 1] - chain.always - self.stay
        self.own -= chain.graph.released_outputs
        self.deliveries = {each.gradient: each for each in chain.graph.deliveries}

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(self.graph.values[v].bytes for v in values)

    def walk(self) -> list[_BackwardOp]:
        """Run the backward ops in their order; the bytes alive while and after each."""
        last = self._last_reads()
        seen = []
        for place, op_id in enumerate(self.backward):
            op = self.graph.ops[op_id]
            before = self.live | set(op.writes)
            self.live = {v for v in before if v in self.stay or last.get(v, -1) > place}
            dying = before - self.live - self.deliveries.keys()
            dying |= {v for v in self.own.intersection(op.reads) if last[v] == place}
            over = self._bytes([v for v in op.overwrites if v in dying][:1])
            after = self._bytes(self.live)
            during = self._bytes(before) + op.temp - over
            leaving = self.deliveries.keys() & (before - self.live)
            if leaving:
                taken = max(self.deliveries[v].workspace for v in leaving)
                during = max(during, after + self._bytes(leaving) + taken)
            seen.append(_BackwardOp(op_id, during, after))
        return seen

    def _last_reads(self) -> dict[int, int]:
        """The place of the last backward op that reads each value, or the parameter that it is for."""
        last = {v: place for place, op in enumerate(self.backward) for v in self.graph.ops[op].reads}
        for each in self.deliveries.values():
            last[each.gradient] = max(last.get(each.gradient, -1), last.get(each.parameter, -1))
        return last


@dataclass
class _MergedStep:
    """A backward step while it grows."""

    ops: list[int]
    reads: tuple[int, ...]
    during: int
    tail: int
    after: int

    def extend(self, op: _BackwardOp, reads: tuple[int, ...]) -> None:
        """Take one more op in, with the local values it reads."""
        self.ops.append(op.op)
        self.after = op.after
        if reads:
            # The values are needed up to this op, so what ran since the last need counts with them.
            self.during, self.tail = max(self.during, self.tail, op.during), 0
        else:
            self.tail = max(self.tail, op.during)

    def frozen(self) -> BackwardStep:
        """The step as it is now."""
        return BackwardStep(self.reads, self.during, self.tail, self.after)


def _merge_steps(
    walk: list[_BackwardOp], graph: JointGraph, local: dict[int, int], gradient_in: int
) -> list[_MergedStep]:
    """Join adjacent backward ops that need the same local values, or none."""
    merged: list[_MergedStep] = []
    for op in walk:
        reads = tuple(sorted({local[v] for v in graph.ops[op.op].reads if v in local}))
        if merged and (not reads or reads == merged[-1].reads):
            merged[-1].extend(op, reads)
        else:
            merged.append(_MergedStep([op.op], reads, op.during, 0, op.after))
    return merged or [_MergedStep([], (), gradient_in, 0, gradient_in)]
