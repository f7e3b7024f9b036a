"""From AOTAutograd's joint graph to a :class:`~hybridremat.graph.joint.JointGraph`.

The joint graph is functional ATen: forward, explicit backward, and in-place writes to resident
buffers as ``copy_`` nodes. :func:`trace_joint` groups its nodes into ops (a kernel call with its
getitems and every view of its outputs) and values (storages), and says for each op in which phase it
belongs, whether it may run again, and whether it draws random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import torch
from torch import fx

from hybridremat.graph.joint import Delivery, JointGraph, Op, Phase
from hybridremat.graph.private_torch import (
    CheckpointPolicy,
    HigherOrderOperator,
    force_save_bw_mutation_src,
    force_save_effectful_ops,
    input_gradients,
    overwritten_inputs,
    step_inputs,
    with_effects,
)
from hybridremat.graph.tracing.alias_analysis import AliasAnalysis, TraceError
from hybridremat.graph.tracing.cse import merge_common_subexpressions
from hybridremat.graph.tracing.flops import node_flops
from hybridremat.graph.tracing.fusion import NO_FUSION, Fusion, FusionRules, find_fusion
from hybridremat.graph.tracing.fx_nodes import (
    ignored_statistics,
    is_check,
    is_collective,
    is_gather,
    is_mutation,
    is_random,
    is_scalar,
    joint_outputs,
    module_path,
    source_line,
    tensors,
    updated_statistics,
)
from hybridremat.graph.tracing.gradient_copies import copy_shared_gradients
from hybridremat.graph.tracing.layouts import RealResults, correct_layouts, lay_out_copies
from hybridremat.graph.tracing.signature import fingerprint, target_text

RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}


@dataclass(frozen=True)
class Originals:
    """A joint graph as it was before its losses were made by chunks, and before it was rewritten exactly."""

    whole: fx.GraphModule | None = None
    exact: fx.GraphModule | None = None


NOT_REWRITTEN: Final = Originals()
Rewriting = Callable[[fx.GraphModule, int], Originals]
"""Rewrites a joint graph in place, so many of whose outputs belong to the forward."""


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
    fusion
        What a compiler computes without memory, and in kernels of its own.
    originals
        The joint graph before it was rewritten.
    shared
        Values whose memory results of kernels have on this device, though they are not traced so: nothing may
        be written over them.
    """

    module: fx.GraphModule
    graph: JointGraph
    op_nodes: tuple[fx.Node, ...]
    node_values: Mapping[fx.Node, tuple[int, ...]]
    num_outputs: int
    fusion: Fusion = NO_FUSION
    originals: Originals = NOT_REWRITTEN
    shared: frozenset[int] = frozenset()

    @property
    def fused_ops(self) -> frozenset[int]:
        """The ops whose kernels a compiler generates, and may fuse with their neighbours."""
        if not self.fusion.kernels:
            return frozenset()
        return frozenset(op for op, node in enumerate(self.op_nodes) if node in self.fusion.kernels)

    @cached_property
    def deliveries(self) -> dict[int, Delivery]:
        """As :func:`deliveries_by_input`."""
        return deliveries_by_input(self.module, self.graph)

    @property
    def gathered_again(self) -> frozenset[fx.Node]:
        """The gathers that may run more than once."""
        pairs = zip(self.graph.ops, self.op_nodes, strict=True)
        return frozenset(node for op, node in pairs if op.recomputable and is_gather(node))

    @property
    def op_of(self) -> dict[fx.Node, int]:
        """Call node → op id."""
        return {node: op for op, node in enumerate(self.op_nodes)}


def prepare_joint_graph(
    module: fx.GraphModule,
    num_outputs: int,
    rewriting: Rewriting | None,
    real: RealResults | None = None,
    *,
    merged: bool = False,
) -> Originals:
    """Drop dead code, merge common subexpressions, copy shared gradients, mark what PyTorch wants saved.

    ``real``, ``merged``: see :func:`trace_joint`.

    Returns the graph as it was before it was rewritten, if that was asked for and there was anything to do.

    Raises ModelError if it cannot be rewritten as asked for.
    """
    if not merged:
        merge_calls(module, num_outputs)
        lay_out_copies(module.graph)
    if real is not None:
        correct_layouts(module, real)
    copy_shared_gradients(module)
    force_save_effectful_ops(module)
    force_save_bw_mutation_src(module)
    originals = NOT_REWRITTEN if rewriting is None else rewriting(module, num_outputs)
    module.recompile()
    return originals


def merge_calls(module: fx.GraphModule, num_outputs: int) -> None:
    """Drop dead code and merge common subexpressions, in place."""
    module.graph.eliminate_dead_code()
    merge_common_subexpressions(module, num_outputs)


def _ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _mutated_values(groups: AliasAnalysis, module: fx.GraphModule) -> set[int]:
    """Values that some node overwrites in the forward, or PyTorch at its end."""
    writes = [*filter(is_mutation, groups.op_nodes), *overwritten_inputs(module)]
    return {v for n in writes for v in groups.node_values[n]}


def _runs_once(groups: AliasAnalysis, node: fx.Node, mutated: set[int], *, regather: bool) -> bool:
    """Whether a second run of the node would be wrong, or is forbidden."""
    if is_collective(node) and not (regather and is_gather(node)):
        return True
    if is_mutation(node) or is_check(node) or node.target is with_effects or node in groups.fusion.once:
        return True
    if isinstance(node.target, HigherOrderOperator):
        return True
    if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return True
    overwritten = {n for n in node.all_input_nodes if mutated.intersection(groups.node_values[n])}
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


def _refuse_branches(nodes: Iterable[fx.Node]) -> None:
    """A branch on data takes memory that nobody knows before it is taken."""
    for node in nodes:
        if node.target in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop):
            raise TraceError(
                f"{node.name} chooses by the data what it runs, so its memory is not known before. Compute "
                "both branches and choose with torch.where, or wrap the part of the model without such a "
                "branch."
            )


def _make_op(
    groups: AliasAnalysis, index: int, needed: set[fx.Node], runs_once: Callable[[fx.Node], bool]
) -> Op:
    node = groups.op_nodes[index]
    reads = groups.input_values(node)
    writes = () if is_mutation(node) else groups.node_values[node]
    once, random = runs_once(node), is_random(node)
    if groups.backward[node]:
        phase = Phase.BACKWARD
    elif node in needed or once or random:
        phase = Phase.FORWARD
    else:
        phase = Phase.OPTIONAL
    tensors_used = [t for n in (node, *groups.read_nodes(node)) for t in tensors(n.meta.get("val"))]
    return Op(
        id=index,
        name=node.name,
        phase=phase,
        reads=reads,
        writes=writes,
        target=target_text(node),
        flops=node_flops(node),
        io_bytes=0 if is_mutation(node) else sum(int(t.numel()) * t.element_size() for t in tensors_used),
        random=random,
        mutates=is_mutation(node),
        recomputable=not once,
        module=module_path(node),
        source=source_line(node),
    )


def _checkpointed(ops: Sequence[Op], nodes: Sequence[fx.Node]) -> frozenset[int]:
    """The ops of the forward that the model's own checkpointing marks to be run again."""
    marks = {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE}
    pairs = zip(ops, nodes, strict=True)
    return frozenset(
        op.id for op, node in pairs if op.phase is not Phase.BACKWARD and node.meta.get("recompute") in marks
    )


def _made(groups: AliasAnalysis, nodes: Iterable[fx.Node]) -> frozenset[int]:
    """The values of ``nodes`` that some op makes (an output may also be an input handed through)."""
    return frozenset(v for n in nodes for v in groups.node_values[n] if groups.values[v].producer is not None)


def _deliveries(
    groups: AliasAnalysis,
    module: fx.GraphModule,
    outputs: Sequence[fx.Node | None],
    num_outputs: int,
    leaving: Mapping[int, int],
) -> tuple[Delivery, ...]:
    """The gradients that leave early: each dense, made by an op of the backward, in a storage of its own."""
    inputs, places, numbers = step_inputs(module), input_gradients(module), _numbers_without_sizes(module)
    gradients = [node for node in outputs[num_outputs:] if node is not None]
    uses = Counter(v for node in gradients for v in set(groups.node_values[node]))
    found = []
    for index in sorted(leaving):
        if index not in places:
            continue
        node, (parameter, *_) = outputs[places[index]], groups.node_values[inputs[index]]
        if node is None or len(groups.node_values[node]) != 1 or not groups.backward[node]:
            continue
        (value,) = groups.node_values[node]
        producer = groups.values[value].producer
        if uses[value] == 1 and producer is not None and groups.backward[groups.op_nodes[producer]]:
            found.append(Delivery(value, parameter, numbers[index], leaving[index]))
    return tuple(found)


def deliveries_by_input(module: fx.GraphModule, graph: JointGraph) -> dict[int, Delivery]:
    """The gradients that leave early, in order, by the number of their input among all, sizes too."""
    of = {number: index for index, number in _numbers_without_sizes(module).items()}
    return {of[each.index]: each for each in graph.deliveries}


def _numbers_without_sizes(module: fx.GraphModule) -> dict[int, int]:
    """By the number of each of the step's inputs, which it is if sizes are not counted.

    A capture with symbols for sizes has these among its inputs; the graph is to be the same without.
    """
    inputs = step_inputs(module)
    others = [i for i in sorted(inputs) if not isinstance(inputs[i].meta.get("val"), (int, torch.SymInt))]
    sizes = [index for index in inputs if index not in set(others)]
    return {index: index - sum(size < index for size in sizes) for index in others}


def gradient_bytes_at(step: TracedStep, places: Collection[int]) -> int:
    """Bytes of gradients that a step makes for some of its inputs, by number, and for no others."""
    return sum(step.graph.values[value].bytes for value in gradients_at(step, places))


def gradients_at(step: TracedStep, places: Collection[int]) -> frozenset[int]:
    """The gradients that a step makes for some of its inputs, by number, and for no others."""
    outputs = joint_outputs(step.module)
    made_for: dict[int, set[int]] = {}
    for index, place in input_gradients(step.module).items():
        node = outputs[place]
        for value in step.node_values[node] if isinstance(node, fx.Node) else ():
            made_for.setdefault(value, set()).add(index)
    made = step.graph.gradients & made_for.keys()
    return frozenset(value for value in made if made_for[value] <= set(places))


def trained_inputs(step: TracedStep) -> frozenset[int]:
    """The inputs of which a step makes gradients."""
    outputs, places = joint_outputs(step.module), input_gradients(step.module)
    return frozenset(index for index, place in places.items() if isinstance(outputs[place], fx.Node))


def values_of_outputs(step: TracedStep, places: Collection[int]) -> set[int]:
    """The values of some outputs of the forward that are not values of others."""
    outputs = joint_outputs(step.module)[: step.num_outputs]
    values = [step.node_values[each] if isinstance(each, fx.Node) else () for each in outputs]
    stay = {value for place, group in enumerate(values) if place not in places for value in group}
    return {value for place in places for value in values[place]} - stay


def values_by_input(step: TracedStep, places: Collection[int]) -> dict[int, tuple[int, ...]]:
    """The values of some inputs of the step, by number."""
    inputs = step_inputs(step.module)
    return {place: step.node_values[inputs[place]] for place in places}


def releasing(step: TracedStep, places: Collection[int]) -> TracedStep:
    """The step, some outputs of whose forward nobody holds any more when its backward runs."""
    gone = values_of_outputs(step, places) & step.graph.held_outputs
    graph = replace(
        step.graph,
        held_outputs=step.graph.held_outputs - gone,
        released_outputs=step.graph.released_outputs | gone,
    )
    return replace(step, graph=graph)


def trace_joint(
    module: fx.GraphModule,
    num_outputs: int,
    *,
    hold_outputs: bool,
    rules: FusionRules | None = None,
    leaving: Mapping[int, int] | None = None,
    rewriting: Rewriting | None = None,
    real: RealResults | None = None,
    merged: bool = False,
    regather: bool = False,
) -> TracedStep:
    """Read a joint graph.

    Parameters
    ----------
    module
        AOTAutograd's joint graph; it is prepared in place (:func:`prepare_joint_graph`).
    num_outputs
        How many of its outputs belong to the forward.
    hold_outputs
        Whether the caller keeps all outputs to the end of the step. Otherwise only the scalar ones
        (losses) are kept, and the others are dropped once the forward has returned.
    rules
        What the compiler that runs it fuses; None if it runs op by op. A compiled random op is never
        repeated.
    leaving
        The inputs whose gradients are to leave in the backward, by index, each with the bytes of workspace of
        whoever takes it. Where autograd makes none there, it is returned as the others are.
    rewriting
        Rewrites the graph; None if it may not be.
    real
        Runs kernels whose strides may have been traced wrong; None: they are taken as traced.
    merged
        Whether its common subexpressions have been merged, and no others may be: at these sizes calls can be
        equal that are not at others.
    regather
        Whether what ranks hold parts of may be gathered again in the backward, by all of them. Other
        collectives run once.

    Raises
    ------
    ModelError
        If the graph cannot be rewritten as asked for.
    TraceError
        For symbolic shapes, branches on data, and ops that return a view of what the step has made
        together with a new tensor.
    """
    originals = prepare_joint_graph(module, num_outputs, rewriting, real, merged=merged)
    fusion = NO_FUSION if rules is None else find_fusion(module, rules)
    groups = AliasAnalysis(fusion)
    for node in module.graph.nodes:
        if node.op != "output":
            groups.add(node)
    _refuse_branches(groups.op_nodes)
    outputs = [o if isinstance(o, fx.Node) else None for o in joint_outputs(module)]
    forward = [node for node in outputs[:num_outputs] if node is not None]
    gradients = [node for node in outputs[num_outputs:] if node is not None]
    mutations = [n for n in groups.op_nodes if is_mutation(n) and not groups.backward[n]]
    mutated = _mutated_values(groups, module)
    runs_once = partial(_runs_once, groups, mutated=mutated, regather=regather)
    once = [n for n in groups.op_nodes if not groups.backward[n] and (is_random(n) or runs_once(n))]
    needed = _ancestors([*forward, *mutations, *once])
    ops = tuple(_make_op(groups, index, needed, runs_once) for index in range(len(groups.op_nodes)))
    held = [n for n in forward if hold_outputs or is_scalar(n)]
    deliveries = _deliveries(groups, module, outputs, num_outputs, leaving or {})
    leave = {each.gradient for each in deliveries}
    graph = JointGraph(
        ops=ops,
        values=tuple(groups.values),
        held_outputs=_made(groups, held),
        released_outputs=_made(groups, forward) - _made(groups, held),
        gradients=_made(groups, gradients) - leave,
        deliveries=deliveries,
        rng_state_bytes=RNG_STATE_BYTES.get(groups.device, RNG_STATE_BYTES["cpu"]),
        checkpointed=_checkpointed(ops, groups.op_nodes),
    )
    graph = replace(graph, fingerprint=fingerprint(graph, groups.op_nodes))
    nodes, values = tuple(groups.op_nodes), groups.node_values
    return TracedStep(module, graph, nodes, values, num_outputs, fusion, originals)
