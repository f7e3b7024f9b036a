"""From AOTAutograd's joint graph to a :class:`~hybridremat.graph.joint.JointGraph`.

The joint graph is functional ATen: forward, explicit backward, and in-place writes to resident
buffers as ``copy_`` nodes. :func:`trace_joint` groups its nodes into ops (a kernel call with its
getitems and every view of its outputs) and values (storages), and says for each op in which phase it
belongs, whether it may run again, and whether it draws random numbers.

Views are recognised by equal storages of their fake tensors, and by the schema where the fake storages
differ (masks made under vmap).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from hybridremat.graph.flops import node_flops
from hybridremat.graph.gradients import own_gradients
from hybridremat.graph.joint import JointGraph, Op, Phase, Value
from hybridremat.graph.nodes import (
    ignored_statistics,
    is_mutation,
    is_random,
    is_scalar,
    joint_outputs,
    storage_bytes,
    tensors,
    updated_statistics,
)
from hybridremat.graph.origin import module_path, source_line
from hybridremat.graph.private_torch import (
    CheckpointPolicy,
    HigherOrderOperator,
    OpOverload,
    force_save_bw_mutation_src,
    force_save_collectives,
    force_save_effectful_ops,
    fx_graph_cse,
    with_effects,
)

RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}


class TraceError(ValueError):
    """The joint graph holds something that cannot be planned; the text says what."""


@dataclass(frozen=True)
class TracedStep:
    """A joint GraphModule and what its nodes mean.

    Attributes
    ----------
    module
        The joint graph, common subexpressions merged.
    graph
        Its ops and values.
    op_nodes
        ``op_nodes[i]`` is the call node of op i.
    node_values
        For every node, the values (storages) that its tensors live in.
    num_outputs
        How many of the joint outputs belong to the forward.
    """

    module: fx.GraphModule
    graph: JointGraph
    op_nodes: tuple[fx.Node, ...]
    node_values: Mapping[fx.Node, tuple[int, ...]]
    num_outputs: int

    @property
    def op_of(self) -> dict[fx.Node, int]:
        """Call node → op id."""
        return {node: op for op, node in enumerate(self.op_nodes)}


def prepare(module: fx.GraphModule, num_outputs: int) -> None:
    """Drop dead code, merge common subexpressions, own the gradients, mark what PyTorch wants saved."""
    module.graph.eliminate_dead_code()
    module.graph = fx_graph_cse(module.graph)
    own_gradients(module, num_outputs)
    force_save_collectives(module)
    force_save_effectful_ops(module)
    force_save_bw_mutation_src(module)
    module.recompile()


@dataclass
class _Builder:
    """Walks the nodes once; ``finish`` makes the frozen result."""

    values: list[Value] = field(default_factory=list)
    storages: dict[int, int] = field(default_factory=dict)
    node_values: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    keep_alive: list[object] = field(default_factory=list)
    op_nodes: list[fx.Node] = field(default_factory=list)
    backward: dict[fx.Node, bool] = field(default_factory=dict)
    device: str = "cpu"

    def add(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        self.keep_alive.append(value)
        if node.op in ("placeholder", "get_attr"):
            self._add_input(node)
            return
        self.backward[node] = any(self.backward[source] for source in node.all_input_nodes)
        if is_mutation(node):
            self._add_op(node, ())
            self.node_values[node] = self.node_values[node.all_input_nodes[0]]
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
        inputs = self._input_values(node)
        if not outputs:
            return False
        known = [self.storages.get(self._key(tensor)) for tensor in outputs]
        if all(value is not None for value in known):
            return set(known) <= set(inputs)
        return len(inputs) == 1 and self._aliases_by_schema(node)

    def _aliased(self, node: fx.Node) -> tuple[int, ...]:
        inputs = self._input_values(node)
        ids = []
        for tensor in tensors(node.meta.get("val")):
            ids.append(self.storages.setdefault(self._key(tensor), inputs[0]))
        return tuple(dict.fromkeys(ids))

    def _new_values(self, node: fx.Node) -> Iterable[int]:
        for tensor in tensors(node.meta.get("val")):
            key = self._key(tensor)
            if self.storages.get(key) in self._input_values(node):
                raise TraceError(f"{node.format_node()} returns both a view of its input and a new tensor")
            if key not in self.storages:
                self.storages[key] = self._new_value(tensor, len(self.op_nodes), node)
                yield self.storages[key]

    def _add_op(self, node: fx.Node, writes: tuple[int, ...]) -> None:
        self.node_values[node] = writes
        self.op_nodes.append(node)

    def _new_value(
        self, tensor: torch.Tensor, producer: int | None, node: fx.Node, *, tangent: bool = False
    ) -> int:
        if any(not isinstance(size, int) for size in tensor.shape):
            raise TraceError(f"{node.name} has the symbolic shape {tuple(tensor.shape)}; compile with dynamic=False")
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = Value(
            len(self.values), storage_bytes(tensor), producer, node.name, tuple(tensor.shape), dtype, tangent
        )
        self.values.append(value)
        return value.id

    def _input_values(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(dict.fromkeys(v for source in node.all_input_nodes for v in self.node_values[source]))

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    @staticmethod
    def _aliases_by_schema(node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload):
            return False
        return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def _ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _mutated_values(builder: _Builder) -> set[int]:
    """Values that some node overwrites in the forward."""
    return {v for n in builder.op_nodes if is_mutation(n) for v in builder.node_values[n]}


def _runs_once(builder: _Builder, node: fx.Node, mutated: set[int]) -> bool:
    """Whether a second run of the node would be wrong, or is forbidden."""
    if is_mutation(node) or node.target is with_effects:
        return True
    if isinstance(node.target, HigherOrderOperator):
        return True
    if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return True
    overwritten = {n for n in node.all_input_nodes if mutated.intersection(builder.node_values[n])}
    if not overwritten:
        return False
    return not overwritten <= set(ignored_statistics(node)) or _statistics_matter(node)


def _statistics_matter(node: fx.Node) -> bool:
    """Whether anything but the update itself reads what a normalization makes of its running statistics."""
    return any(
        not is_mutation(user) and user.op != "output" and item not in ignored_statistics(user)
        for item in updated_statistics(node)
        for user in item.users
    )


def _make_op(builder: _Builder, index: int, needed: set[fx.Node], mutated: set[int]) -> Op:
    node = builder.op_nodes[index]
    reads = builder._input_values(node)
    writes = () if is_mutation(node) else builder.node_values[node]
    once, random = _runs_once(builder, node, mutated), is_random(node)
    if builder.backward[node]:
        phase = Phase.BACKWARD
    elif node in needed or once or random:
        phase = Phase.FORWARD
    else:
        phase = Phase.OPTIONAL
    touched = [t for n in (node, *node.all_input_nodes) for t in tensors(n.meta.get("val"))]
    return Op(
        id=index,
        name=node.name,
        phase=phase,
        reads=reads,
        writes=writes,
        target=str(node.target),
        flops=node_flops(node),
        io_bytes=0 if is_mutation(node) else sum(t.numel() * t.element_size() for t in touched),
        random=random,
        mutates=is_mutation(node),
        recomputable=not once,
        module=module_path(node),
        source=source_line(node),
    )


def trace_joint(module: fx.GraphModule, num_outputs: int, *, hold_outputs: bool) -> TracedStep:
    """Read a joint graph.

    Parameters
    ----------
    module
        AOTAutograd's joint graph; it is prepared in place (:func:`prepare`).
    num_outputs
        How many of its outputs belong to the forward.
    hold_outputs
        Whether the caller keeps all outputs to the end of the step. Otherwise only the scalar ones
        (losses) are kept, and the others are dropped once the forward has returned.

    Raises
    ------
    TraceError
        For symbolic shapes, and ops that return a view of their input together with a new tensor.
    """
    prepare(module, num_outputs)
    builder = _Builder()
    for node in module.graph.nodes:
        if node.op != "output":
            builder.add(node)
    outputs = [o if isinstance(o, fx.Node) else None for o in joint_outputs(module)]
    forward = [node for node in outputs[:num_outputs] if node is not None]
    gradients = [node for node in outputs[num_outputs:] if node is not None]
    mutations = [n for n in builder.op_nodes if is_mutation(n) and not builder.backward[n]]
    mutated = _mutated_values(builder)
    once = [
        n
        for n in builder.op_nodes
        if not builder.backward[n] and (is_random(n) or _runs_once(builder, n, mutated))
    ]
    needed = _ancestors([*forward, *mutations, *once])
    ops = tuple(_make_op(builder, index, needed, mutated) for index in range(len(builder.op_nodes)))
    held = [n for n in forward if hold_outputs or is_scalar(n)]
    written = lambda nodes: frozenset(  # noqa: E731
        v for n in nodes for v in builder.node_values[n] if builder.values[v].producer is not None
    )
    graph = JointGraph(
        ops=ops,
        values=tuple(builder.values),
        held_outputs=written(held),
        released_outputs=written(forward) - written(held),
        gradients=written(gradients),
        rng_state_bytes=RNG_STATE_BYTES.get(builder.device, RNG_STATE_BYTES["cpu"]),
    )
    return TracedStep(module, graph, tuple(builder.op_nodes), builder.node_values, num_outputs)
