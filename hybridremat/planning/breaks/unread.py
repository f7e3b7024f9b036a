"""Outputs of graphs that the model returns beside a loss: the step's backward has no gradient for them.

The logits of a head are one of its graph's outputs, and of a graph alone nobody knows that they take no part
in the loss but through it: its backward would be given zeros of their size, and add them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridremat.compiler.backend import CapturedGraph
from hybridremat.compiler.early_gradients import original
from hybridremat.compiler.output_hooks import OutputSettings, losses_among
from hybridremat.errors import PlanMismatchError
from hybridremat.graph.private_torch import node_number, tree_leaves
from hybridremat.graph.tracing.non_leaf import is_non_leaf_source

Output = tuple[CapturedGraph, int]
"""An output of a graph, by its place."""


@dataclass
class OutputUse:
    """Which outputs of graphs get gradients, as found while a forward runs without its graphs' gradients.

    Attributes
    ----------
    made
        By the number of its node in the autograd graph: each output that carries a gradient.
    read
        Those from which another graph, or the loss, is made.
    seen
        Numbers of the nodes that were looked at.
    leaves
        The identities of leaves that code between and after graphs reads itself, under autograd: graphs that
        use them too have a part of their gradient alone.
    """

    made: dict[int, Output] = field(default_factory=dict)
    read: set[Output] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    leaves: set[int] = field(default_factory=set)

    def enter(self, args: Iterable[object]) -> None:
        """A graph is given these."""
        self.read.update(self._behind(args))

    def leave(self, graph: CapturedGraph, outputs: Iterable[object]) -> None:
        """A graph has made these."""
        for place, tensor in enumerate(outputs):
            if (number := _source(tensor)) is not None:
                self.made[number] = graph, place

    def unread(self, returned: Any, settings: OutputSettings) -> dict[CapturedGraph, tuple[int, ...]]:
        """The outputs without a gradient, of those that the model returns beside a loss.

        Raises
        ------
        PlanMismatchError
            If an output that was planned so on another path has a gradient on this one.
        """
        losses = losses_among(returned, settings)
        self.read.update(self._behind(losses))
        for graph, place in self.read:
            if place in graph.unread:
                raise PlanMismatchError(
                    f"output {place} of a graph was planned to have no gradient, as the model returned it "
                    "beside a loss, and on these inputs the loss is made of it. Wrap with "
                    'grad_outputs="all", which plans gradients for all outputs.'
                )
        if not losses:  # gradients may flow from all
            deque(self._behind(tree_leaves(returned)), maxlen=0)  # for the leaves
        beside = tree_leaves(returned) if losses else []
        places: dict[CapturedGraph, set[int]] = {}
        for tensor in beside:
            found = self.made.get(_source(tensor) or 0)
            if found is not None and found not in self.read:
                places.setdefault(found[0], set()).add(found[1])
        return {graph: tuple(sorted(each)) for graph, each in places.items()}

    def _behind(self, values: Iterable[object]) -> Iterator[Output]:
        """The outputs of graphs that some tensors were made of."""
        stack = [each.grad_fn for each in values if isinstance(each, torch.Tensor)]
        while stack:
            node = stack.pop()
            if node is None:
                continue
            if (leaf := getattr(node, "variable", None)) is not None:
                self.leaves.add(id(original(leaf)))
                continue
            if (number := node_number(node)) in self.seen:
                continue
            if is_non_leaf_source(node):
                if number in self.made:
                    yield self.made[number]
                continue
            self.seen.add(number)
            stack += [after for after, _ in node.next_functions]


def _source(value: object) -> int | None:
    """The number of the node of an output of a graph; None for any other value."""
    node = value.grad_fn if isinstance(value, torch.Tensor) else None
    return node_number(node) if node is not None and is_non_leaf_source(node) else None
