"""The torch.compile backend: what happens between Dynamo's graph and the two graphs that run.

Dynamo hands over a graph; AOTAutograd makes the joint graph of it and asks for a partition, which a
:class:`Partitioner` makes (``planning/pipeline.py``); its two graphs run op by op.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx
from torch.profiler import record_function

from hybridremat.compiler.output_hooks import HeldOutputs, UndefinedGradients, assign_roles
from hybridremat.errors import CaptureError, HybridRematError
from hybridremat.graph.private_torch import (
    allow_second_backward,
    aot_autograd,
    boxed_nop,
    inductor_config,
)
from hybridremat.graph.tracing.alias_analysis import TraceError


class CaptureComplete(BaseException):
    """Raised instead of running a captured graph: nothing has run. Never leaves hybridremat."""


REMOVE_BREAK = (
    "Remove the break (often a print, a call of .item(), or a branch on a tensor's value), wrap the part of "
    'the model that has none, or wrap with graph_breaks="plan", which plans the graphs on both sides of it '
    "together."
)


@dataclass(frozen=True)
class Partition:
    """The two graphs that run in place of a joint graph; ``started`` is called when the forward starts."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    started: Callable[[], None]


class Partitioner(Protocol):
    """Makes the graphs that run (``planning/pipeline.py``)."""

    def split(self, joint: fx.GraphModule, num_outputs: int, *, hold_outputs: bool) -> Partition:
        """The forward and backward of a joint graph with ``num_outputs`` forward outputs."""
        ...

    def forward_only(self, graph: fx.GraphModule) -> Callable[[], None]:
        """Take a graph without a backward; returns what to call when it starts."""
        ...


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
        Whether a step may have several graphs, some without a backward. All outputs of each may carry
        gradients and are held.

    Attributes
    ----------
    armed
        Whether compiled graphs run. While False they raise :class:`CaptureComplete` instead, so that a step
        is planned without running.
    error
        What planning raised; Dynamo wraps it.
    captured
        Whether a graph with a backward has been compiled.
    graphs
        How many graphs have been compiled.
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
        self.hold_outputs, self.all_outputs = hold_outputs, all_outputs or several_graphs
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
            held, undefined = HeldOutputs(expected=hold_outputs), UndefinedGradients()
            graphs = _Graphs(self, held, undefined, hold_outputs=hold_outputs)
            compile_graphs = aot_autograd(
                fw_compiler=graphs.compile_forward,
                bw_compiler=graphs.compile_backward,
                inference_compiler=graphs.compile_inference,
                partition_fn=graphs.partition,
                keep_inference_input_mutations=True,
            )
            with inductor_config.patch(fallback_random=True):  # as in eager mode, unread draws stay
                compiled = compile_graphs(module, example_inputs)
            _forget_examples(module)

        def run(*args: object) -> Any:
            outputs = compiled(*args)
            undefined.register(outputs)
            return held.guard(outputs, roles.detached, args) if roles.loss_inside else outputs

        return run


class _Graphs:
    """AOTAutograd's callbacks for one of Dynamo's graphs: partition it, and compile what runs."""

    def __init__(
        self, backend: Backend, held: HeldOutputs, undefined: UndefinedGradients, *, hold_outputs: bool
    ) -> None:
        self._backend, self._held, self._undefined = backend, held, undefined
        self._hold_outputs = hold_outputs
        self._started: Callable[[], None] = lambda: None

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
        """The forward that runs."""
        allow_second_backward()
        return self._runnable(graph, inputs, self._started, "forward")

    def compile_inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """A graph without a backward, which is part of a step of several graphs."""
        if self._backend.several_graphs:
            self._started = self._backend.partitioner.forward_only(graph)
        return self.compile_forward(graph, inputs)

    def compile_backward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """The backward that runs."""
        run = self._runnable(graph, inputs, self._held.warn_once, "backward")
        return self._undefined.drop_unreached(graph.graph, run)

    def _runnable(
        self, graph: fx.GraphModule, inputs: Sequence[Any], before: Callable[[], None], name: str
    ) -> Any:
        backend, run = self._backend, boxed_nop(graph, list(inputs))

        def call(args: list[Any]) -> Any:
            if not backend.armed:
                raise CaptureComplete
            before()
            with record_function("##hybridremat:" + name):
                return run(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _forget_examples(module: fx.GraphModule) -> None:
    """Drop Dynamo's example values: their autograd graphs hold real scalars, which no plan counts."""
    for node in module.graph.nodes:
        node.meta.pop("example_value", None)


def break_after(module: fx.GraphModule) -> tuple[str, str] | None:
    """Place and reason of the graph break that ends one of Dynamo's graphs, if any."""
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
            f"planned. Nothing has been run. {REMOVE_BREAK}"
        )
