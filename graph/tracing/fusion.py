"""Which nodes of a joint graph a compiler computes inside the kernels that read them.

A compiler such as Inductor computes elementwise ops where they are read, so that their results never take
memory and a recomputation of them costs next to nothing. What remains are results that kernels of libraries
make or read, sums and other reductions, the outputs, and those elementwise results that are smaller to keep
than the inputs they would be computed from.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from torch import fx

from hybridremat.graph.tracing.fx_nodes import is_mutation, is_random, joint_outputs, storages, tensors

MOST_READS: Final = 8
"""Inputs of one kernel beyond which Inductor stores a result (``realize_acc_reads_threshold``)."""


@dataclass(frozen=True)
class Fusion:
    """Nodes without memory of their own (``inlined``), and those with a generated kernel (``kernels``).

    ``once`` are random nodes: a compiler cannot replay the generator's state.
    """

    inlined: frozenset[fx.Node] = frozenset()
    kernels: frozenset[fx.Node] = frozenset()
    once: frozenset[fx.Node] = frozenset()


NO_FUSION: Final = Fusion()


class FusionRules(Protocol):
    """What a compiler says of one node."""

    def is_fusible(self, node: fx.Node) -> bool:
        """Whether the compiler computes the node in a kernel that it generates, beside others."""
        ...

    def is_view(self, node: fx.Node) -> bool:
        """Whether the compiler only reads the node's input in another way."""
        ...


def find_fusion(module: fx.GraphModule, rules: FusionRules) -> Fusion:
    """The fusion of a prepared joint graph."""
    return _Finder(module, rules).find()


class _Finder:
    """One pass in graph order.

    ``sources`` maps a node to the nodes with memory that it is computed from: itself, if it has memory.
    """

    def __init__(self, module: fx.GraphModule, rules: FusionRules) -> None:
        self.nodes = [node for node in module.graph.nodes if node.op != "output"]
        self.outputs = {node for node in joint_outputs(module) if isinstance(node, fx.Node)}
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self.backward: dict[fx.Node, bool] = {}
        calls = [node for node in self.nodes if node.op == "call_function" and not is_mutation(node)]
        writes = (node for node in self.nodes if node.op == "call_function" and is_mutation(node))
        self.overwritten = {source for node in writes for source in node.all_input_nodes[:1]}
        self.views = {node for node in calls if _is_view(node) or rules.is_view(node)}
        others = [node for node in calls if node not in self.views and not is_random(node)]
        self.generated = {node for node in others if rules.is_fusible(node)}

    def find(self) -> Fusion:
        """Sort every node in."""
        inlined: set[fx.Node] = set()
        for node in self.nodes:
            above = any(self.backward[source] for source in node.all_input_nodes)
            self.backward[node] = above or node.name.startswith("tangents_")
        for node in self.nodes:
            below = frozenset[fx.Node]().union(*(self.sources[source] for source in node.all_input_nodes))
            if node in self.views or self._has_no_memory(node, below):
                self.sources[node] = below
                if node not in self.views or any(source in inlined for source in node.all_input_nodes):
                    inlined.add(node)
            else:
                self.sources[node] = frozenset([node])
        once = frozenset(filter(is_random, self.nodes))
        return Fusion(frozenset(inlined), frozenset(self.generated - inlined), once)

    def _has_no_memory(self, node: fx.Node, below: frozenset[fx.Node]) -> bool:
        if node not in self.generated or _reduces(node) or not self.overwritten.isdisjoint(below):
            return False
        readers = set(self._readers(node))
        if not readers or not readers <= self.generated or self._is_returned(node):
            return False
        made = [source for source in below if source.op == "call_function" or self.backward[source]]
        crosses = self._crosses(node)
        if len(readers) == 1 and not crosses:
            return len(made) <= MOST_READS
        if crosses and len(made) <= MOST_READS:  # what the backward reads in any case costs nothing more
            made = [source for source in made if self.backward[source] or not self._crosses(source)]
        return _bytes(made) <= _bytes([node])

    def _crosses(self, node: fx.Node) -> bool:
        """Whether the backward reads a node of the forward."""
        return not self.backward[node] and any(self.backward[reader] for reader in self._readers(node))

    def _readers(self, node: fx.Node) -> Iterable[fx.Node]:
        """The nodes that compute with a node's result, through views."""
        for user in node.users:
            if user in self.views:
                yield from self._readers(user)
            elif user.op != "output":
                yield user

    def _is_returned(self, node: fx.Node) -> bool:
        """Whether the node or a view of it is an output."""
        views = (user for user in node.users if user in self.views)
        return node in self.outputs or any(self._is_returned(view) for view in views)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    given = set().union(*(storages(source) for source in node.all_input_nodes))
    return bool(storages(node)) and storages(node) <= given


def _reduces(node: fx.Node) -> bool:
    """Whether the result has fewer elements than an input, and no cheaper way to make it than to read all."""
    own = sum(part.numel() for part in tensors(node.meta.get("val")))
    read = [part.numel() for source in node.all_input_nodes for part in tensors(source.meta.get("val"))]
    return own < max(read, default=0)


def _bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(part.numel() * part.element_size() for node in nodes for part in tensors(node.meta.get("val")))
