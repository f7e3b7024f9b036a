"""Joint graphs, exported by AOTAutograd's first stage and compiled by its second when they have been planned.

``torch._dynamo.backends.common.aot_autograd`` runs both stages in one go and asks for the partition in the
middle, far down its own stack. The stages are called one by one here, with the arguments that it gives them,
so the graphs are equal; in between nothing of PyTorch is on the stack, and no mode is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import preserve_rng_state
from torch._functorch._aot_autograd.graph_compile import aot_stage2_compile
from torch._functorch._aot_autograd.subclass_utils import compute_inner_mutated_inp_indices_from_subclass_meta
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor import config as inductor_config
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from hybridremat.errors import CaptureError

Compiled = Callable[[list[Any]], Any]
"""What runs a graph; it takes its arguments in a list, which it empties."""

CompileGraph = Callable[[GraphModule, Sequence[Any]], Compiled]


class PartitionFunction(Protocol):
    """What AOTAutograd asks for the two graphs of a joint one."""

    def __call__(
        self, joint: GraphModule, inputs: object, *, num_fwd_outputs: int, **_others: object
    ) -> tuple[GraphModule, GraphModule]:
        """The forward and the backward graph."""
        ...


class Tracing:
    """What Dynamo knows of a graph that it has just captured: to be made in its backend."""

    def __init__(self) -> None:
        self._tracing, self._compile = TracingContext.try_get(), CompileContext.try_get()
        self._gradients = torch.is_grad_enabled()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """As in the backend that Dynamo has called, for what compiles the graph; autocast is the caller's."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            stack.enter_context(tracing(self._tracing))
            if self._compile is not None:
                stack.enter_context(compile_context(self._compile))
            stack.enter_context(_use_lazy_graph_module(True))
            stack.enter_context(compiled_autograd._disable())
            yield


@contextmanager
def planning_state() -> Iterator[None]:
    """No gradients, no autocast, and random numbers as before afterwards; autograd stays in this thread."""
    no_autocast = torch._C._DisableAutocast if torch._C._is_any_autocast_enabled() else nullcontext
    with (
        torch.no_grad(),
        no_autocast(),
        preserve_rng_state(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


class ExportedGraph:
    """One of Dynamo's graphs as AOTAutograd traces it, on fake tensors.

    Attributes
    ----------
    graph
        The joint graph, or that of the forward alone.
    num_outputs
        How many of its outputs are the forward's.
    has_backward
        Whether it is a joint graph.
    """

    def __init__(
        self, module: GraphModule, inputs: Sequence[Any], tracing: Tracing | None = None
    ) -> None:
        """To be called in a backend of Dynamo, or as in one that ``tracing`` knows.

        As in eager mode, random draws that nothing reads stay.
        """
        self._tracing = tracing or Tracing()
        with ExitStack() as stack, inductor_config.patch(fallback_random=True):
            exported = aot_export_joint_with_descriptors(
                stack, module, tuple(inputs), keep_inference_input_mutations=True
            )
        self._inputs = tuple(exported._aot_state.flat_args)  # fake
        self._state, self._capture = exported._aot_state, exported._aot_graph_capture
        # else the backward is compiled from a copy, whose nodes are others
        self._state.aot_config = replace(self._state.aot_config, force_non_lazy_backward_lowering=False)
        self.graph: GraphModule = self._capture.graph_module
        self.has_backward = bool(self._state.needs_autograd)
        self.num_outputs = self._num_outputs()
        if self.has_backward:
            _return_own_objects(self.graph, self.num_outputs)

    def again(self, module: GraphModule) -> ExportedGraph:
        """Export Dynamo's graph once more: a graph is compiled once."""
        with self._tracing.resumed():
            return ExportedGraph(module, self._inputs, self._tracing)

    def _num_outputs(self) -> int:
        """As AOTAutograd counts them when it asks for a partition."""
        whole, parts = self._state.fw_metadata, self._capture.maybe_subclass_meta
        inner = whole if parts is None else parts.fw_metadata
        changed = compute_inner_mutated_inp_indices_from_subclass_meta(whole, inner)
        made = inner.num_outputs + inner.num_intermediate_bases + inner.num_outputs_rng_offset
        return len(changed) + len(whole.tokens) + int(made)

    def compiled(
        self,
        partition: tuple[GraphModule, GraphModule] | None,
        forward: CompileGraph,
        backward: CompileGraph,
    ) -> Compiled:
        """What runs the graph with autograd: ``partition``, unless it has no backward.

        Raises
        ------
        CaptureError
            If AOTAutograd asks for the partition of another graph than it has exported.
        """

        def split(
            joint: GraphModule, _: object, *, num_fwd_outputs: int, **_others: object
        ) -> tuple[GraphModule, GraphModule]:
            if joint is not self.graph or num_fwd_outputs != self.num_outputs or partition is None:
                raise CaptureError("PyTorch compiles another joint graph than the one that was planned")
            return partition

        with self._tracing.resumed(), self._state.fake_mode, inductor_config.patch(fallback_random=True):
            run, _ = aot_stage2_compile(self._state, self._capture, split, forward, backward, forward)
        compiled: Compiled = run
        return compiled


def _return_own_objects(graph: GraphModule, count: int) -> None:
    """Let the forward return the objects that it is given, the mesh of a ``DTensor``.

    PyTorch may trace an equal mesh of the outputs as that of their tangents, which a forward does not have.
    """
    places = graph.graph.find_nodes(op="placeholder")
    tangents = {node: _object(node) for node in places if node.name.startswith("tangents_")}
    given = [(_object(node), node) for node in places if node not in tangents]
    (output,) = graph.graph.find_nodes(op="output")
    results = list(output.args[0])
    for place, node in enumerate(results[:count]):
        if isinstance(node, Node) and (item := tangents.get(node)) is not None:
            results[place] = next((own for other, own in given if other is not None and other == item), node)
    output.args = (tuple(results),)


def _object(node: Node) -> object | None:
    """What a placeholder stands for that is no tensor and no number."""
    return getattr(node.meta.get("val"), "real_obj", None)
