"""The torch.compile backend: what happens between Dynamo's graph and the two graphs that run.

Dynamo hands over a graph; AOTAutograd makes the joint graph of it and asks for a partition, which a
:class:`Partitioner` makes (``planning/pipeline.py``); its two graphs run op by op.

Which outputs take part in the loss is fixed when a step is planned. If an output is a scalar, the loss is
inside the model: the scalars carry gradients, and every other output is returned detached, so that no
gradient of its size is ever made for it. A gradient that arrives there all the same raises
:class:`~hybridremat.errors.PlanMismatchError`; nothing is silently dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from hybridremat.compiler.output_hooks import Arrivals, HeldOutputs
from hybridremat.errors import CaptureError, HybridRematError
from hybridremat.graph.costs.allocations import span
from hybridremat.graph.private_torch import (
    allow_second_backward,
    aot_autograd,
    boxed_nop,
    inductor_config,
)
from hybridremat.graph.tracing.alias_analysis import TraceError


class CaptureComplete(BaseException):
    """Raised instead of running a captured graph: nothing has run. Never leaves hybridremat."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Partition:
    """The two graphs that run in place of a joint graph; ``started`` is called when the forward starts."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    started: Callable[[], None] = _nothing


class Partitioner(Protocol):
    """Makes the graphs that run (``planning/pipeline.py``)."""

    def split(self, joint: fx.GraphModule, num_outputs: int, *, hold_outputs: bool) -> Partition:
        """The forward and backward of a joint graph with that many forward outputs."""
        ...

    def forward_only(self, graph: fx.GraphModule) -> Callable[[], None]:
        """Note a graph without a backward; what is returned is called when it starts."""
        ...


@dataclass(frozen=True)
class OutputRoles:
    """Which flat outputs of a graph carry gradients, and which are returned detached."""

    detached: tuple[int, ...]
    loss_inside: bool


def _example(node: object) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def assign_roles(module: fx.GraphModule, *, all_outputs: bool) -> OutputRoles:
    """Detach, in Dynamo's graph, the outputs that take no part in the loss."""
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(output.args[0])
    examples = [_example(node) for node in results]
    differentiable = [i for i, e in enumerate(examples) if e is not None and e.requires_grad]
    scalars = [i for i in differentiable if (e := examples[i]) is not None and e.dim() == 0]
    if all_outputs or not scalars:
        return OutputRoles((), loss_inside=False)
    detached = tuple(i for i in differentiable if i not in scalars)
    for index in detached:
        with module.graph.inserting_before(output):
            results[index] = module.graph.call_method("detach", (results[index],))
    output.args = (tuple(results),)
    module.recompile()
    return OutputRoles(detached, loss_inside=True)


class Backend:
    """Compiles steps for one wrapped model, or for one use of ``torch.compile``.

    Parameters
    ----------
    partitioner
        Makes the graphs that run.
    hold_outputs
        Whether the caller keeps outputs that carry no gradient through the backward.
    all_outputs
        Whether all outputs may carry gradients even if one is a scalar.
    several_graphs
        Whether a step may come in several graphs, forward-only ones among them.

    Attributes
    ----------
    armed
        Whether compiled graphs run. While False they raise :class:`CaptureComplete` before anything
        has run, which is how a step is planned without executing it.
    error
        What planning raised; Dynamo wraps it.
    captured
        Whether there was a graph with a backward.
    graphs
        How many graphs have come.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        *,
        hold_outputs: bool = False,
        all_outputs: bool = False,
        several_graphs: bool = False,
    ) -> None:
        self.partitioner = partitioner
        self.hold_outputs, self.all_outputs = hold_outputs, all_outputs
        self.several_graphs = several_graphs
        self.armed = True
        self.error: HybridRematError | None = None
        self.captured = False
        self.graphs = 0
        self._lock = threading.RLock()

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_: object
    ) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs.

        Raises
        ------
        CaptureError
            If the graph ends in a graph break.
        HybridRematError
            Whatever planning raised.
        """
        with self._lock:
            self.graphs += 1
            if not self.several_graphs:
                _refuse_graph_break(module)
            roles = assign_roles(module, all_outputs=self.all_outputs)
            hold_outputs = self.hold_outputs or not roles.loss_inside
            held, arrivals = HeldOutputs(expected=hold_outputs), Arrivals()
            graphs = _Graphs(self, held, arrivals, hold_outputs=hold_outputs)
            compile_graphs = aot_autograd(
                fw_compiler=graphs.compile_forward,
                bw_compiler=graphs.compile_backward,
                inference_compiler=graphs.compile_inference,
                partition_fn=graphs.partition,
                keep_inference_input_mutations=True,
            )
            with inductor_config.patch(fallback_random=True):  # keeps draws that nothing reads, as eager does
                compiled = compile_graphs(module, example_inputs)
            _forget_examples(module)

        def run(*args: object) -> Any:
            outputs = compiled(*args)
            arrivals.watch(outputs)
            return held.guard(outputs, roles.detached, args) if roles.loss_inside else outputs

        return run


class _Graphs:
    """The graphs that AOTAutograd makes of one of Dynamo's, from the partition to what runs."""

    def __init__(
        self, backend: Backend, held: HeldOutputs, arrivals: Arrivals, *, hold_outputs: bool
    ) -> None:
        self._backend, self._held, self._arrivals = backend, held, arrivals
        self._hold_outputs = hold_outputs
        self._started: Callable[[], None] = _nothing

    def partition(
        self, joint: fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and backward graph of a joint graph."""
        backend = self._backend
        backend.captured = True
        try:
            made = backend.partitioner.split(joint, num_fwd_outputs, hold_outputs=self._hold_outputs)
        except TraceError as error:
            backend.error = CaptureError(str(error))
            raise backend.error from error
        except HybridRematError as error:
            backend.error = error
            raise
        self._started = made.started
        return made.forward, made.backward

    def compile_forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """The forward as it runs."""
        allow_second_backward()
        return self._runnable(graph, inputs, self._started, "forward")

    def compile_inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """A graph without a backward: nothing to choose, but its memory is part of the step's."""
        if self._backend.several_graphs:
            self._started = self._backend.partitioner.forward_only(graph)
        return self.compile_forward(graph, inputs)

    def compile_backward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """The backward as it runs."""
        run = self._runnable(graph, inputs, self._held.warn_once, "backward")
        return self._arrivals.keep_reached(graph.graph, run)

    def _runnable(
        self, graph: fx.GraphModule, inputs: Sequence[Any], before: Callable[[], None], name: str
    ) -> Any:
        backend, run = self._backend, boxed_nop(graph, list(inputs))

        def call(args: list[Any]) -> Any:
            if not backend.armed:
                raise CaptureComplete
            before()
            with span(name):
                return run(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _forget_examples(module: fx.GraphModule) -> None:
    """Drop Dynamo's example values, which hold autograd graphs, and those real scalars, as long as the step.

    A step that is captured in the middle of training would take these bytes beyond its plan.
    """
    for node in module.graph.nodes:
        node.meta.pop("example_value", None)


def break_after(module: fx.GraphModule) -> tuple[str, str] | None:
    """Place and reason of the graph break that ends one of Dynamo's graphs, if one does."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    place = reason.user_stack[-1] if reason.user_stack else None
    return (f"{place.filename}:{place.lineno}" if place is not None else "", str(reason.reason))


def _refuse_graph_break(module: fx.GraphModule) -> None:
    found = break_after(module)
    if found is not None:
        place, reason = found
        where = f" at {place}" if place else ""
        raise CaptureError(
            f"the model's graph breaks{where} ({reason}), so the memory of the whole step cannot be "
            "planned. Nothing has been run. Remove the break (often a print, a call of .item(), or a branch "
            "on a tensor's value), wrap the part of the model that has none, or wrap with "
            'graph_breaks="plan", which plans the graphs on both sides of it together.'
        )
