"""An extract of a step: one op of each kernel, with its fake tensors at any sizes.

A kernel here is a kernel at every size: the same call, on tensors whose layouts are the same expressions. A
model repeats its layers, so that the extract is many times smaller than the step. What is known of its ops at
some sizes, measured there by the kernels themselves, is known of the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from hybridremat.compiler.in_symbols import SymbolicStep
from hybridremat.graph.joint import JointGraph, Op, Phase, Value
from hybridremat.graph.private_torch import unwritten_module
from hybridremat.graph.sizes import Sizes
from hybridremat.graph.tracing.alias_analysis import TraceError
from hybridremat.graph.tracing.flops import FLOPS, node_flops
from hybridremat.graph.tracing.fx_nodes import storage_bytes, strided_parts, tensors
from hybridremat.graph.tracing.signature import distinct_arguments, target_text
from hybridremat.graph.tracing.size_expressions import size_of, storage_size
from hybridremat.graph.tracing.symbolic import FakeValues
from hybridremat.graph.tracing.symbolic_calls import Symbol, number_at
from hybridremat.graph.tracing.trace import TracedStep


@dataclass(frozen=True)
class Kernel:
    """One kernel of the extract.

    Attributes
    ----------
    op
        The first op of the step that is it.
    source
        The call of this op in the step with symbols.
    node
        The call in the extract.
    inputs
        For each of its inputs in the extract, the node with symbols that it stands for.
    layouts
        For each of these, how it is laid out at every size.
    held
        For each of these, the values of the step that it lives in.
    """

    op: Op
    source: fx.Node
    node: fx.Node
    inputs: Mapping[fx.Node, fx.Node]
    layouts: tuple[Hashable, ...]
    held: tuple[tuple[Value, ...], ...]


@dataclass
class Extract:
    """The distinct kernels of a step with symbols.

    Attributes
    ----------
    kernels
        All of them.
    kernel_of
        For each op of the step, which it is.
    graph
        The graph of their calls: its nodes have the fake tensors of the sizes that were asked for last.
    """

    kernels: list[Kernel] = field(default_factory=list)
    kernel_of: list[int] = field(default_factory=list)
    graph: fx.Graph = field(default_factory=fx.Graph)
    _root: fx.GraphModule | None = None

    @staticmethod
    def of(symbolic: SymbolicStep) -> Extract:
        """The extract of a step.

        Raises
        ------
        TraceError
            If some tensor of it is not known at other sizes.
        """
        step, made = symbolic.step, Extract(_root=symbolic.step.module)
        found: dict[Hashable, int] = {}
        for op, node in zip(step.graph.ops, step.op_nodes, strict=True):
            key = _key(step, op, node)
            if key not in found:
                found[key] = len(made.kernels)
                values = map(step.node_values.__getitem__, node.all_input_nodes)
                held = tuple(tuple(map(step.graph.values.__getitem__, each)) for each in values)
                made._add(op, node, held)
            made.kernel_of.append(found[key])
        return made

    def _add(self, op: Op, source: fx.Node, held: tuple[tuple[Value, ...], ...]) -> None:
        if FLOPS in source.meta:
            raise TraceError(f"the work of {source.name} is not known at other sizes")
        inputs: dict[fx.Node, fx.Node] = {}
        for number, each in enumerate(source.all_input_nodes):
            if each.op == "get_attr":
                inputs[each] = self.graph.node_copy(each)
            else:
                inputs[each] = self.graph.placeholder(f"{source.name}_input_{number}")
        args, kwargs = fx.map_arg((source.args, dict(source.kwargs)), inputs.__getitem__)
        node = self.graph.create_node("call_function", source.target, args, kwargs, source.name)
        own = {mine: each for each, mine in inputs.items()}
        self.kernels.append(Kernel(op, source, node, own, tuple(map(_described, inputs)), held))

    def at(self, sizes: Sizes) -> TracedStep:
        """The extract at some sizes, as a traced step: op ``i`` is kernel ``i``, and none reads another's."""
        known, values_at = dict[Hashable, Any](), FakeValues(sizes)
        for kernel in self.kernels:
            _place(kernel, values_at, known)
        assert self._root is not None
        values: list[Value] = []
        node_values: dict[fx.Node, tuple[int, ...]] = {}
        ops = tuple(
            _op(number, kernel, values, node_values) for number, kernel in enumerate(self.kernels)
        )
        graph, nodes = JointGraph(ops, tuple(values)), tuple(kernel.node for kernel in self.kernels)
        return TracedStep(unwritten_module(self._root, self.graph), graph, nodes, node_values, 0)


def _key(step: TracedStep, op: Op, node: fx.Node) -> Hashable:
    """What distinguishes kernels: the call with its symbols, and what of its inputs may be written over."""
    values = step.graph.values
    held = [tuple(map(op.reads.index, step.node_values[each])) for each in node.all_input_nodes]
    kinds = [(values[each].producer is None, values[each].tangent) for each in op.reads]
    call = target_text(node), _described(node.args), _described(dict(node.kwargs))
    own = (*distinct_arguments(node), *held, *kinds), op.random, op.recomputable, op.mutates, len(op.writes)
    return *call, own


def _described(item: object) -> Hashable:
    if isinstance(item, fx.Node):
        return _layout(item.meta.get("val")) if item.op != "get_attr" else ("attribute", item.target)
    if isinstance(item, (list, tuple)):
        return tuple(map(_described, item))
    if isinstance(item, dict):
        return tuple((name, _described(each)) for name, each in sorted(item.items()))
    return type(item).__name__, item if isinstance(item, Symbol) else repr(item)


def _layout(value: object) -> Hashable:
    """How tensors are laid out at every size."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_layout, value))
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, repr(value)
    if strided_parts(value) != [value]:
        raise TraceError("the step has sparse tensors")
    lazy, shape = (value.is_conj(), value.is_neg(), value.device.type), tuple(map(size_of, value.shape))
    strides, offset = tuple(map(size_of, value.stride())), size_of(value.storage_offset())
    return value.dtype, lazy, shape, strides, offset, storage_size(value)


def _place(kernel: Kernel, at: FakeValues, known: dict[Hashable, Any]) -> None:
    """Give the nodes of a kernel what they have at some sizes; ``known``: inputs by their layouts."""
    sizes = at.sizes
    for (own, source), layout in zip(kernel.inputs.items(), kernel.layouts, strict=True):
        if own.op == "get_attr":
            own.meta = dict(source.meta)
            continue
        if layout not in known:  # that inputs are views of each other, their values tell
            known[layout] = at.of(source.meta.get("val"))
        own.meta = {"val": known[layout]}

    def number(item: object) -> Any:
        if isinstance(item, (list, tuple)):
            return type(item)(map(number, item))
        return number_at(item, sizes) if isinstance(item, Symbol) else item

    owns = dict(zip(kernel.source.all_input_nodes, kernel.inputs, strict=True))
    node, source = kernel.node, kernel.source
    if _has_symbols((source.args, source.kwargs)):
        args, kwargs = fx.map_arg((source.args, dict(source.kwargs)), owns.__getitem__)
        node.args = number(args)
        node.kwargs = {name: number(each) for name, each in kwargs.items()}
    node.meta = {"val": FakeValues(sizes, at.numbers).of(source.meta.get("val"))}


def _has_symbols(item: object) -> bool:
    if isinstance(item, (list, tuple)):
        return any(map(_has_symbols, item))
    if isinstance(item, Mapping):
        return any(map(_has_symbols, item.values()))
    return isinstance(item, Symbol)


def _op(
    number: int, kernel: Kernel, values: list[Value], node_values: dict[fx.Node, tuple[int, ...]]
) -> Op:
    """An op of the extract; its values are added."""
    node, op = kernel.node, kernel.op
    reads = _read_values(kernel, values, node_values)
    made = list(_new_values(node, op))
    writes = tuple(range(len(values), len(values) + len(made)))
    pairs = zip(writes, made, strict=True)
    values += [replace(each, id=place, producer=number) for place, each in pairs]
    node_values[node] = writes
    used = [part for each in (node, *node.all_input_nodes) for part in tensors(each.meta.get("val"))]
    return replace(
        op,
        id=number,
        phase=Phase.FORWARD,
        reads=reads,
        writes=writes,
        flops=node_flops(node),
        io_bytes=0 if op.mutates else sum(part.numel() * part.element_size() for part in used),
        time=0,
        temp=0,
        overwrites=(),
        variants=(),
        variant=0,
    )


def _read_values(
    kernel: Kernel, values: list[Value], node_values: dict[fx.Node, tuple[int, ...]]
) -> tuple[int, ...]:
    """The values that the inputs of a kernel live in, those of its first op in order."""
    of: dict[int, int] = {}
    for own, held in zip(kernel.inputs, kernel.held, strict=True):
        for value, part in zip(held, tensors(own.meta.get("val")), strict=False):
            if value.id not in of:
                of[value.id] = len(values)
                made = None if value.producer is None else 0
                values.append(replace(value, id=len(values), bytes=storage_bytes(part), producer=made))
        node_values[own] = tuple(of[value.id] for value in held)
    return tuple(of.values())


def _new_values(node: fx.Node, op: Op) -> Iterator[Value]:
    """What a kernel makes: its storages."""
    parts = {part.untyped_storage()._cdata: part for part in reversed(tensors(node.meta.get("val")))}
    if len(parts) != len(op.writes) and op.writes:
        raise TraceError(f"{op.name} makes {len(parts)} tensors, and {len(op.writes)} were traced")
    for part in reversed(parts.values()) if op.writes else ():
        dtype = str(part.dtype).removeprefix("torch.")
        yield Value(0, storage_bytes(part), 0, node.name, tuple(part.shape), dtype)
