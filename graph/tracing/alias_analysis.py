"""Group the nodes of a joint graph into calls, the views that belong to them, and storages.

Views are recognised by equal storages of their fake tensors, and by the schema where the fake storages
differ (masks made under vmap).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import fx

from hybridremat.graph.joint import Value
from hybridremat.graph.private_torch import OpOverload, free_symbols, free_unbacked_symbols
from hybridremat.graph.tracing.fusion import NO_FUSION, Fusion
from hybridremat.graph.tracing.fx_nodes import is_mutation, is_wait, source_line, storage_bytes, tensors

OF_GRADIENT: Final = (
    "No graph breaks within a gradient: make that call in a function of its own, below "
    "@torch.compiler.disable, and it runs between two graphs"
)


class TraceError(ValueError):
    """The joint graph holds something that cannot be planned; the text says what."""


@dataclass
class AliasAnalysis:
    """Filled by :meth:`add`, called once for each node in order.

    ``op_nodes`` are the calls, ``node_values[n]`` the storages that node n's tensors live in, ``backward[n]``
    whether it depends on a tangent. Nodes that ``fusion`` inlines have no storage: they live in what they are
    computed from, as views do.
    """

    fusion: Fusion = NO_FUSION
    values: list[Value] = field(default_factory=list)
    storages: dict[int, int] = field(default_factory=dict)
    node_values: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    _keep_alive: list[object] = field(default_factory=list)
    op_nodes: list[fx.Node] = field(default_factory=list)
    backward: dict[fx.Node, bool] = field(default_factory=dict)
    device: str = "cpu"

    def add(self, node: fx.Node) -> None:
        """Sort one node in: input, view, or call.

        Raises
        ------
        TraceError
            For symbolic shapes, and calls that return a view of what the step itself has made together
            with a new tensor.
        """
        value = node.meta.get("val")
        self._keep_alive.append(value)
        if node.op in ("placeholder", "get_attr"):
            self._add_input(node)
            return
        self.backward[node] = any(self.backward[source] for source in node.all_input_nodes)
        if is_mutation(node):
            self._add_op(node, ())
            self.node_values[node] = self.node_values[node.all_input_nodes[0]]
        elif node in self.fusion.inlined:
            self.node_values[node] = self.input_values(node)
        elif node.target is operator.getitem or self._is_view(node):
            self.node_values[node] = self._aliased(node)
        else:
            self._add_op(node, tuple(self._new_values(node)))

    def _add_input(self, node: fx.Node) -> None:
        tangent = node.op == "placeholder" and node.name.startswith("tangents_")
        self.backward[node] = tangent
        ids = []
        for tensor in tensors(node.meta.get("val")):
            key = self._key(tensor)
            if key not in self.storages:
                self.storages[key] = self._new_value(tensor, None, node, tangent=tangent)
                self.device = tensor.device.type
            ids.append(self.storages[key])
        self.node_values[node] = tuple(ids)

    def _is_view(self, node: fx.Node) -> bool:
        outputs = tensors(node.meta.get("val"))
        inputs = self.input_values(node)
        if not outputs:
            return False
        if is_wait(node):  # as its schema does not say
            return True
        known = [self.storages.get(self._key(tensor)) for tensor in outputs]
        if all(value is not None for value in known):
            return set(known) <= set(inputs)
        return len(inputs) == 1 and self._aliases_by_schema(node)

    def _aliased(self, node: fx.Node) -> tuple[int, ...]:
        inputs = self.input_values(node)
        ids = []
        for tensor in tensors(node.meta.get("val")):
            ids.append(self.storages.setdefault(self._key(tensor), inputs[0]))
        return tuple(dict.fromkeys(ids))

    def _new_values(self, node: fx.Node) -> Iterable[int]:
        for tensor in tensors(node.meta.get("val")):
            key = self._key(tensor)
            known = self.storages.get(key, -1)
            # what is resident needs no planning, whoever refers to it
            if known in self.input_values(node) and not self._is_resident(known):
                raise TraceError(f"{node.format_node()} returns both a view of its input and a new tensor")
            if key not in self.storages:
                self.storages[key] = self._new_value(tensor, len(self.op_nodes), node)
                yield self.storages[key]

    def _is_resident(self, value: int) -> bool:
        return self.values[value].producer is None and not self.values[value].tangent

    def _add_op(self, node: fx.Node, writes: tuple[int, ...]) -> None:
        self.node_values[node] = writes
        self.op_nodes.append(node)

    def _new_value(
        self, tensor: torch.Tensor, producer: int | None, node: fx.Node, *, tangent: bool = False
    ) -> int:
        if any(not isinstance(size, int) for size in tensor.shape):
            raise _symbolic_shape(node, tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = Value(
            len(self.values), storage_bytes(tensor), producer, node.name, tuple(tensor.shape), dtype, tangent
        )
        self.values.append(value)
        return value.id

    def read_nodes(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes that the node reads from memory: its inputs, or what inlined ones are computed from."""
        found: dict[fx.Node, None] = {}
        stack = list(node.all_input_nodes)
        while stack:
            source = stack.pop()
            if source in self.fusion.inlined:
                stack.extend(source.all_input_nodes)
            else:
                found[source] = None
        return tuple(found)

    def input_values(self, node: fx.Node) -> tuple[int, ...]:
        """The storages that the node reads."""
        return tuple(dict.fromkeys(v for source in node.all_input_nodes for v in self.node_values[source]))

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    @staticmethod
    def _aliases_by_schema(node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload):
            return False
        return any(
            r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns
        )


def _symbolic_shape(node: fx.Node, tensor: torch.Tensor) -> TraceError:
    place = source_line(node)
    shape = ", ".join(map(str, tensor.shape))
    where = f" at {place}" if place else ""
    of_data = free_unbacked_symbols(tensor) or not free_symbols(tensor)  # which another tensor has made known
    if of_data and (calls := node.meta.get("fwd_source_fn_stack")):
        return TraceError(
            f"the shape ({shape}) of {node.name}{where} depends on the data, in the gradient of "
            f"{calls[-1][0]}, and memory is planned to the byte before the data are known. {OF_GRADIENT}"
        )
    if of_data:
        return TraceError(
            f"the shape ({shape}) of {node.name}{where} depends on the data (nonzero, x[mask], unique), and "
            "memory is planned to the byte before the data are known. Give it a shape that does not "
            '(torch.where, x * mask, padding), or wrap with graph_breaks="plan", which breaks the graph there'
        )
    return TraceError(
        f"{node.name}{where} has the symbolic shape ({shape}), and memory is planned to the byte: compile "
        "with dynamic=False, and pass clones of inputs that torch.compile has marked as dynamic"
    )
