"""From decisions about blocks to a flat schedule of op executions, without dead ones.

The first forward of a block runs all its forward ops, and the optional ops whose results are kept
anyway. Re-runs leave out what is kept or must not happen twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.graph.joint import Schedule
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.sequence.block_figures import never_rerun
from hybridremat.sequence.dead_code import DeadCodeElimination
from hybridremat.sequence.decisions import Backward, Decision, Forward, ForwardOption, Solo


class Flattener:
    """Turns decisions about one chain into schedules; what a block runs is worked out once."""

    def __init__(
        self, chain: Chain, bindings: Sequence[BlockBinding], option_sets: Sequence[OptionSet]
    ) -> None:
        self._chain = chain
        self._bindings = bindings
        self._option_sets = option_sets
        self._remove_dead = DeadCodeElimination(chain.graph, chain.rebuilt)
        self._known: dict[tuple[Decision, bool], tuple[int, ...]] = {}
        self._read_ahead = _optional_ops_that_read_ahead(chain)

    def __call__(self, decisions: Sequence[Decision]) -> Schedule:
        """The schedule that carries out ``decisions`` (not empty), dead executions removed."""
        pieces: list[tuple[int, ...]] = []
        seen: set[int] = set()
        split: int | None = None
        for decision in decisions:
            backward = isinstance(decision, Backward | Solo)
            if backward and split is None:
                split = len(pieces)
            key = (decision, not backward and decision.block not in seen)
            seen.add(decision.block)
            if key not in self._known:
                self._known[key] = self._executions(*key)
            pieces.append(self._known[key])
        forward, rest = pieces[: split or 0], pieces[split or 0 :]
        if self._read_ahead:
            steps = self._delayed([*itertools.chain.from_iterable(forward)])
            return self._remove_dead(Schedule((*steps, *itertools.chain.from_iterable(rest)), len(steps)))
        return self._remove_dead.of_pieces(forward, rest)

    def _delayed(self, forward: Sequence[int]) -> list[int]:
        """A forward in which optional ops that read ahead follow what they read."""
        graph, made, steps, waiting = self._chain.graph, set[int](), list[int](), list[int]()

        def ready(op: int) -> bool:
            producers = (graph.values[value].producer for value in graph.ops[op].reads)
            return all(producer is None or producer in made for producer in producers)

        for op in forward:
            now = [op]
            if op in self._read_ahead and not ready(op):
                waiting, now = [*waiting, op], []
            while now:
                steps += now
                made.update(now)
                now = [other for other in waiting if ready(other)][:1]
                waiting = [other for other in waiting if other not in now]
        return [*steps, *waiting]

    def _executions(self, decision: Decision, first: bool) -> tuple[int, ...]:
        match decision:
            case Forward(block):
                return self._forward(block, (), first)
            case ForwardOption(block, option):
                chosen = self._option_sets[block].options[option].optional_forward
                return self._forward(block, chosen, first)
            case Backward(block, option):
                return self._backward(block, self._option_sets[block].options[option].recompute)
            case Solo(block, option):
                return self._backward(block, self._option_sets[block].solo[option].recompute)

    def _forward(self, block: int, chosen: Sequence[int], first: bool) -> tuple[int, ...]:
        """Forward ops of a block with the optional ops ``chosen`` (local indexes) among them."""
        chain, binding = self._chain, self._bindings[block]
        ops = [op for op in chain.blocks[block].forward if first or not never_rerun(chain, op)]
        extra = {binding.ops[local] for local in chosen}
        if first:
            extra |= self._early(block)
        # the binding's order is the one whose peak was computed
        bound = {op: position for position, op in enumerate(binding.ops)}
        for op in sorted(extra, key=lambda o: (bound.get(o, -1), o)):
            before = set(binding.ops[: bound[op]]) if op in bound else set()
            ops.insert(self._place(ops, op, before), op)
        return tuple(ops)

    def _early(self, block: int) -> set[int]:
        """Optional ops whose results are kept anyway or are gradients, and the optional ops they need."""
        graph = self._chain.graph
        kept = self._chain.always | graph.gradients
        early: set[int] = set()
        needed: set[int] = set()
        for op in reversed(self._chain.blocks[block].optional):
            if any(value in kept or value in needed for value in graph.ops[op].writes):
                early.add(op)
                needed.update(graph.ops[op].reads)
        return early

    def _place(self, ops: list[int], op: int, before: set[int]) -> int:
        """First position of ``op`` in ``ops`` after what it reads and what precedes it in the binding."""
        graph = self._chain.graph
        needed = before | {graph.values[value].producer for value in graph.ops[op].reads}
        return max((index + 1 for index, other in enumerate(ops) if other in needed), default=0)

    def _backward(self, block: int, recompute: Sequence[Sequence[int]]) -> tuple[int, ...]:
        binding = self._bindings[block]
        steps: list[int] = []
        for locals_, ops in zip(recompute, binding.steps, strict=True):
            steps.extend(binding.ops[local] for local in locals_)
            steps.extend(ops)
        return tuple(steps)


def _optional_ops_that_read_ahead(chain: Chain) -> frozenset[int]:
    """Optional ops of a block that read, directly or not, an always-saved value of a later block's forward.

    All are there when the backward runs, so the block may make them; in its own forward they are not yet.
    """
    home = {op: index for index, block in enumerate(chain.blocks) for op in block.forward}
    ahead: set[int] = set()
    for index, block in enumerate(chain.blocks):
        for op in sorted(block.optional):
            producers = [chain.graph.values[value].producer for value in chain.graph.ops[op].reads]
            if any(home.get(made, -1) > index or made in ahead for made in producers if made is not None):
                ahead.add(op)
    return frozenset(ahead)
