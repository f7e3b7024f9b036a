"""From decisions about blocks to a flat schedule of op executions, without dead ones.

The first forward of a block runs all its forward ops, and the optional ops whose results are kept
anyway. Re-runs leave out what is kept or must not happen twice.
"""

from __future__ import annotations

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

    def __call__(self, decisions: Sequence[Decision]) -> Schedule:
        """The schedule that carries out ``decisions`` (not empty), dead executions removed."""
        steps: list[int] = []
        seen: set[int] = set()
        num_forward: int | None = None
        for decision in decisions:
            backward = isinstance(decision, Backward | Solo)
            if backward and num_forward is None:
                num_forward = len(steps)
            key = (decision, not backward and decision.block not in seen)
            seen.add(decision.block)
            if key not in self._known:
                self._known[key] = self._executions(*key)
            steps.extend(self._known[key])
        return self._remove_dead(Schedule(tuple(steps), num_forward or 0))

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
