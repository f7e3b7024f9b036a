"""A step at any sizes, put together from its distinct kernels and what is known of these there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from hybridremat.compiler.in_symbols import SymbolicStep
from hybridremat.graph.costs.cost_models import CostModel, with_footprints, with_times
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.workspace_fits import WorkspaceFit
from hybridremat.graph.joint import JointGraph, Op, Value, Variant
from hybridremat.graph.private_torch import input_gradients, step_inputs
from hybridremat.graph.rewrites import with_rewrites
from hybridremat.graph.rewrites.in_place import overwritable, trial_name
from hybridremat.graph.rewrites.known_parts import KnownParts, known_parts, note_known
from hybridremat.graph.sizes import Sizes
from hybridremat.graph.tracing.alias_analysis import TraceError
from hybridremat.graph.tracing.fx_nodes import joint_outputs, storage_bytes, tensors
from hybridremat.graph.tracing.layouts import is_doubtful
from hybridremat.graph.tracing.signature import (
    REAL_VALUE,
    edges_text,
    fingerprint_of,
    kernel_signature,
    memory_signature,
)
from hybridremat.graph.tracing.size_expressions import has_symbols, size_of
from hybridremat.graph.tracing.symbolic import FakeValues
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.extract import Extract
from hybridremat.planning.kernel_kinds import elements_of, is_constant, workspace_fits


@dataclass(frozen=True)
class Template:
    """What a step is made of at every size.

    Attributes
    ----------
    symbolic
        The step with symbols.
    extract
        Its kernels.
    constant
        For each kernel whose workspace is known by its kind, its bytes.
    over
        For each kernel, which of the values that it reads it may write over.
    fits
        For each kernel that computes each element by itself, its workspace, by the elements of its result.
    parts
        For each kernel, by the name of a way by parts, what is known of it.
    sources
        For each value the kernel that makes it, and its place among what this makes; of inputs the node, or
        what it is at every size.
    edges
        For each op, what the fingerprint has of it beside its kernel.
    """

    symbolic: SymbolicStep
    extract: Extract
    constant: dict[int, int]
    over: tuple[frozenset[int], ...]
    fits: dict[int, WorkspaceFit]
    parts: dict[int, dict[str, KnownParts]]
    sources: tuple[tuple[int, int] | fx.Node | Value, ...]
    edges: tuple[str, ...]

    @staticmethod
    def of(symbolic: SymbolicStep, costed: TracedStep, sizes: Sizes, store: KernelStore) -> Template:
        """From a step with symbols, and the same step with its costs where it was traced.

        ``store``: what was found out there.
        """
        graph = costed.graph
        _require_gradients_as_inputs(symbolic.step.module)
        if costed.shared or any(REAL_VALUE in node.meta for node in costed.module.graph.nodes):
            raise TraceError("what a kernel returns is not as it was traced")
        extract = Extract.of(symbolic)
        extract.at(sizes)
        places = {value: (op.id, place) for op in graph.ops for place, value in enumerate(op.writes)}
        return Template(
            symbolic,
            extract,
            {
                number: graph.ops[kernel.op.id].temp
                for number, kernel in enumerate(extract.kernels)
                if is_constant(kernel.source, graph.ops[kernel.op.id])
            },
            tuple(
                frozenset(map(kernel.op.reads.index, graph.ops[kernel.op.id].overwrites))
                for kernel in extract.kernels
            ),
            dict(workspace_fits(extract, graph)),
            {extract.kernel_of[op]: known for op, known in known_parts(costed, store).items()},
            tuple(_sources(costed, places, extract, symbolic)),
            tuple(map(edges_text, graph.ops)),
        )

    def at(self, sizes: Sizes, model: CostModel, store: KernelStore) -> JointGraph:
        """The graph at some sizes, its kernels measured there if the store does not know them.

        The store gets what is known of them by their kind, and must not be kept. Raises as measuring, and
        TraceError.
        """
        extract = self.extract.at(sizes)
        self._note(extract, store)
        measured = _as_traced(with_footprints(extract, store), extract)
        for number, fit in self.fits.items():
            fit.compare(measured.graph.ops[number].temp, elements_of(measured.op_nodes[number]))
        note_known(measured, store, self.parts)
        measured = with_rewrites(measured, store)
        if model.name != "profile":
            measured = with_times(measured, model, KernelStore(), lambda *_: None)
        return self._put_together(measured, sizes)

    def _note(self, extract: TracedStep, store: KernelStore) -> None:
        """Note what is known of kernels by their kind."""
        for number, places in enumerate(self.over):
            node, op = extract.op_nodes[number], extract.graph.ops[number]
            if op.mutates:
                continue
            key, takes = kernel_signature(node), self._workspace(number, node)
            if takes is not None:
                store.temporaries[key] = takes
                store.outputs[key] = tuple(extract.graph.values[value].bytes for value in op.writes)
            known = takes is not None and number in self.constant
            for value, source in overwritable(extract, number):
                may = op.reads.index(value) in places
                if known or not may:  # without it no schedule is wrong
                    store.in_place[trial_name(key, node, source)] = may

    def _workspace(self, number: int, node: fx.Node) -> int | None:
        """What a kernel takes; None if that has to be measured, or what it returns has to be seen."""
        fit = self.fits.get(number)
        if is_doubtful(node):
            return None
        return fit.at(elements_of(node)) if fit is not None and fit.known else self.constant.get(number)

    def _put_together(self, extract: TracedStep, sizes: Sizes) -> JointGraph:
        known, of = self.symbolic.step.graph, self.extract.kernel_of
        kernels, values = extract.graph.ops, extract.graph.values
        ops = tuple(_op(op, kernels[of[op.id]]) for op in known.ops)
        made = []
        for value, source in zip(known.values, self.sources, strict=True):
            if isinstance(source, Value):
                made.append(source)
                continue
            if isinstance(source, fx.Node):
                like = _laid_out(value, FakeValues(sizes).of(source.meta["val"]))
            else:
                like = values[kernels[source[0]].writes[source[1]]]
            own = value.id, like.bytes, value.producer, value.name, like.shape, value.dtype, value.tangent
            made.append(Value(*own))
        graph = replace(known, ops=ops, values=tuple(made), untried=())
        texts = [memory_signature(node) for node in extract.op_nodes]
        fingerprint = fingerprint_of(graph, (texts[kernel] for kernel in of), self.edges)
        return replace(graph, fingerprint=fingerprint)


def _sources(
    costed: TracedStep, places: dict[int, tuple[int, int]], extract: Extract, symbolic: SymbolicStep
) -> Iterator[tuple[int, int] | fx.Node | Value]:
    nodes: dict[int, fx.Node] = {}
    for node in symbolic.step.module.graph.nodes:
        for number in symbolic.step.node_values.get(node, ()):
            nodes.setdefault(number, node)
    for value in costed.graph.values:
        if value.id in places:
            op, place = places[value.id]
            yield extract.kernel_of[op], place
            continue
        parts = tensors(nodes[value.id].meta.get("val"))
        if any(map(has_symbols, parts)):
            if len(parts) > 1:
                raise TraceError(f"the input {value.name} has several tensors")
            yield nodes[value.id]
        else:
            yield value


def _require_gradients_as_inputs(module: fx.GraphModule) -> None:
    """Refuse gradients that autograd might copy at some sizes: not laid out as their input at every size."""
    inputs, results = step_inputs(module), joint_outputs(module)
    for number, place in input_gradients(module).items():
        gradient, given = (
            each.meta.get("val") if isinstance(each, fx.Node) else None
            for each in (results[place], inputs[number])
        )
        if isinstance(gradient, torch.Tensor) and isinstance(given, torch.Tensor) and has_symbols(given):
            one, other = (tuple(map(size_of, each.stride())) for each in (gradient, given))
            if one != other:
                raise TraceError(f"the gradient of {inputs[number].name} may be copied at some sizes")


def _laid_out(value: Value, tensor: torch.Tensor) -> Value:
    return replace(value, bytes=storage_bytes(tensor), shape=tuple(tensor.shape))


def _as_traced(measured: TracedStep, extract: TracedStep) -> TracedStep:
    """The measured extract, if its kernels return what was traced."""
    other = any(REAL_VALUE in node.meta for node in extract.op_nodes)
    if other or measured.shared or measured.graph.untried or measured.graph.values != extract.graph.values:
        raise TraceError("a kernel does not return what was traced")
    return measured


def _op(op: Op, kernel: Op) -> Op:
    """An op of the step, as its kernel was measured."""
    of = dict(zip(kernel.reads, op.reads, strict=True))

    def over(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(of.__getitem__, values)) if values else ()

    ways = tuple(
        Variant(way.kernel, way.parts, way.time, way.temp, over(way.overwrites)) for way in kernel.variants
    )
    return Op(
        op.id,
        op.name,
        op.phase,
        op.reads,
        op.writes,
        op.target,
        kernel.flops,
        kernel.io_bytes,
        kernel.time,
        kernel.temp,
        over(kernel.overwrites),
        op.random,
        op.mutates,
        op.recomputable,
        op.module,
        op.source,
        ways,
    )
