"""A joint graph with symbols for sizes, and copies of it with numbers in their place.

Tracing, costs, blocks and searches know numbers alone, and run on copies as on any joint graph. A copy has a
node for each node of the symbolic graph but those that compute sizes; of each of its nodes it is known which
one it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.private_torch import ShapeFacts, fake_on_meta, shape_facts, unwritten_module
from hybridremat.graph.sizes import Domain, Size, Sizes, evaluated
from hybridremat.graph.tracing.alias_analysis import TraceError
from hybridremat.graph.tracing.fx_nodes import NUMBERS, Numbers, strided_parts
from hybridremat.graph.tracing.layouts import lay_out_copies
from hybridremat.graph.tracing.size_expressions import domain_of, has_symbols, size_inputs, size_of
from hybridremat.graph.tracing.symbolic_calls import drop_idle_slices, is_number, merge_sizes, number_of
from hybridremat.graph.tracing.trace import merge_calls

ORIGIN: Final = "hybridremat_origin"
"""A node's ``meta``: the node of the symbolic joint graph that it is a copy of; emitted ones have it too."""

JOINT: Final = "hybridremat_joint"
"""A node's ``meta``: its name in the copy of a symbolic graph; what is emitted from this has it too."""


@dataclass(frozen=True)
class SymbolicJoint:
    """AOTAutograd's joint graph of a step some of whose sizes are symbols.

    Attributes
    ----------
    module
        The joint graph. Calls that are equal at every size are one, and so are sizes that are computed.
    num_outputs
        How many of its outputs belong to the forward.
    inputs
        By the name of a symbol the input that it is.
    facts
        What PyTorch knew of the symbols when Dynamo had made its guards.
    domain
        The sizes that the graph is right for.
    """

    module: fx.GraphModule
    num_outputs: int
    inputs: Mapping[str, fx.Node]
    facts: ShapeFacts
    domain: Domain

    @property
    def sample(self) -> Sizes:
        """The sizes of the sample that was captured."""
        return {name: self.facts.sample[name] for name in self.inputs}

    def at(self, sizes: Sizes) -> Instance:
        """A copy of the graph at some sizes, which are in its domain.

        Raises
        ------
        TraceError
            If they are not, or the graph has a symbolic tensor that cannot be laid out anew (a sparse one).
        """
        if refused := self.domain.refused(sizes):
            raise TraceError(f"the step has to be captured anew for these sizes: {'; '.join(refused)}")
        return _Copy(self.module, sizes).instance()

    def require_guarded(self) -> None:
        """Refuse what has been done with the graph if it relies on more than Dynamo has guards for.

        Raises
        ------
        TraceError
        """
        now = shape_facts(self.module)
        assert now is not None
        if now.guards != self.facts.guards:
            added = ", ".join(map(str, set(now.guards) - set(self.facts.guards)))
            raise TraceError(f"planning relies on sizes that nothing guards: {added}")


@dataclass(frozen=True)
class Instance:
    """A symbolic joint graph at some sizes.

    Attributes
    ----------
    module
        The joint graph with numbers. Inputs that are sizes are still there, and nothing reads them.
    sizes
        Its sizes.
    origins
        For each of its nodes the one of the symbolic graph that it is a copy of.
    """

    module: fx.GraphModule
    sizes: Sizes
    origins: Mapping[fx.Node, fx.Node]

    def mark_origins(self) -> None:
        """Let what is emitted from it tell where it comes from; before that is emitted."""
        for node in self.module.graph.nodes:
            node.meta[JOINT] = node.name
            node.meta.pop(ORIGIN, None)  # rewrites copy what they replace
            if node in self.origins:
                node.meta[ORIGIN] = self.origins[node]
            made: Numbers | None = node.meta.get(NUMBERS)
            source = made.shape_of if made is not None else None
            if source is not None and source in self.origins:
                node.meta[NUMBERS] = Numbers(self.origins[source])


def symbolic_joint(module: fx.GraphModule, num_outputs: int) -> SymbolicJoint | None:
    """A copy of a joint graph, equal calls merged; None if none of its sizes is a symbol.

    Of a copy, since compiling writes fractions that are computed from sizes as tensors.

    Raises
    ------
    TraceError
        If a size depends on data, or is computed in a way that is not known.
    """
    facts = shape_facts(module)
    if facts is None:
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    module = fx.GraphModule(module, graph)
    merge_sizes(module)
    drop_idle_slices(module, num_outputs)
    merge_calls(module, num_outputs)
    lay_out_copies(graph)
    inputs = size_inputs(module.graph.find_nodes(op="placeholder"))
    return SymbolicJoint(module, num_outputs, inputs, facts, domain_of(facts, inputs))


@dataclass
class FakeValues:
    """Turns what a node of a symbolic graph has for a value into what it is at some sizes.

    Tensors that share a storage there share one here.
    """

    sizes: Sizes
    numbers: dict[Size, int] = field(default_factory=dict)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def number(self, size: int | torch.SymInt) -> int:
        """A size."""
        if isinstance(size, int):
            return size
        term = size_of(size)
        if term not in self.numbers:
            self.numbers[term] = evaluated(term, self.sizes)
        return self.numbers[term]

    def of(self, value: Any) -> Any:
        """The value; tensors are fake ones.

        Raises
        ------
        TraceError
            If a tensor cannot be laid out anew (a sparse one).
        """
        if isinstance(value, torch.SymInt):
            return self.number(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return type(value)(map(self.of, value)) if type(value) in (list, tuple) else value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if nothing of it is symbolic, else one of these sizes, in the same storage."""
        if strided_parts(tensor) != [tensor]:
            if any(isinstance(size, torch.SymInt) for size in tensor.shape):
                raise TraceError(f"a sparse tensor has the symbolic shape {tuple(tensor.shape)}")
            return tensor
        if not has_symbols(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if tensor.is_conj() or tensor.is_neg():
            raise TraceError(f"a tensor of the symbolic shape {tuple(tensor.shape)} is conjugated when read")
        if (whole := self.storages.get(storage._cdata)) is None:
            whole = torch.UntypedStorage(self.number(storage.nbytes()), device="meta")
            self.storages[storage._cdata] = whole
        shape, strides = (tuple(map(self.number, each)) for each in (tensor.shape, tensor.stride()))
        made = torch.empty(0, dtype=tensor.dtype, device="meta")
        made.set_(whole, self.number(tensor.storage_offset()), shape, strides)
        return fake_on_meta(made, like=tensor)


@dataclass
class _Copy:
    """Copies a symbolic graph node by node with numbers for its sizes."""

    module: fx.GraphModule
    sizes: Sizes
    copies: dict[fx.Node, Any] = field(default_factory=dict)

    def instance(self) -> Instance:
        """The copy."""
        graph, values = fx.Graph(), FakeValues(self.sizes)
        for node in self.module.graph.nodes:
            if is_number(node) and node.op != "placeholder":
                continue
            copy = graph.create_node(
                node.op, node.target, self._given(node.args), self._given(node.kwargs), node.name, node.type
            )
            copy.meta = dict(node.meta)
            if "val" in node.meta:
                copy.meta["val"] = values.of(node.meta["val"])
            self.copies[node] = copy
        origins = {copy: node for node, copy in self.copies.items()}
        return Instance(unwritten_module(self.module, graph), self.sizes, origins)

    def _given(self, arguments: Any) -> Any:
        def given(node: fx.Node) -> Any:
            return number_of(node, self.sizes) if is_number(node) else self.copies[node]

        return fx.map_arg(arguments, given)
