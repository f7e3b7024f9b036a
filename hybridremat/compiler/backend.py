"""The torch.compile backend: what happens between Dynamo's graph and the two graphs that run.

Dynamo hands over a graph; AOTAutograd makes the joint graph of it and asks for a partition; a
:class:`StepPlanner` chooses the schedule; the emitted graphs are checked and run op by op.

Which outputs take part in the loss is fixed when a step is planned. If an output is a scalar, the loss is
inside the model: the scalars carry gradients, and every other output is returned detached, so that no
gradient of its size is ever made for it. A gradient that arrives there all the same raises
:class:`~hybridremat.errors.PlanMismatchError`; nothing is silently dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.output_hooks import Arrivals, HeldOutputs
from hybridremat.errors import CaptureError, HybridRematError
from hybridremat.graph.costs.allocations import span
from hybridremat.graph.joint import Schedule
from hybridremat.graph.private_torch import (
    allow_second_backward,
    aot_autograd,
    boxed_nop,
    inductor_config,
)
from hybridremat.graph.tracing.alias_analysis import TraceError
from hybridremat.graph.tracing.fx_nodes import joint_outputs
from hybridremat.graph.tracing.trace import TracedStep, trace_joint

logger = logging.getLogger(__name__)


class CaptureComplete(BaseException):
    """Raised instead of running a captured graph: nothing has run. Never leaves hybridremat."""


class StepPlanner(Protocol):
    """Chooses the schedule of a traced step."""

    def choose(self, step: TracedStep) -> tuple[TracedStep, Schedule, int | None]:
        """The step with costs, the schedule, and the bytes that the emitted graphs must stay under."""
        ...

    def emitted(self, step: TracedStep, memory: EmittedMemory) -> None:
        """Told the exact memory of the checked graphs."""
        ...

    def current(self) -> str | None:
        """A name for the step chosen last."""
        ...

    def running(self, key: str | None) -> None:
        """Told the name of the step that starts to run."""
        ...

    def begin(self) -> None:
        """Told that a training step begins, of one graph or several."""
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
    planner
        Chooses schedules.
    hold_outputs
        Whether the caller keeps outputs that carry no gradient through the backward.
    all_outputs
        Whether all outputs may carry gradients even if one is a scalar.
    armed
        Whether compiled graphs run. While False they raise :class:`CaptureComplete` before anything
        has run, which is how a step is planned without executing it.
    parted
        Whether a step may come in several graphs, each of them planned, forward-only ones as well.

    Attributes
    ----------
    captured
        Whether there was a graph with a backward.
    graphs
        How many graphs have come.
    """

    def __init__(
        self,
        planner: StepPlanner,
        *,
        hold_outputs: bool = False,
        all_outputs: bool = False,
        armed: bool = True,
        parted: bool = False,
    ) -> None:
        self.planner = planner
        self.hold_outputs, self.all_outputs = hold_outputs, all_outputs
        self.armed = armed
        self.parted = parted
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
            if not self.parted:
                _refuse_graph_break(module)
            roles = assign_roles(module, all_outputs=self.all_outputs)
            watch, arrivals = HeldOutputs(expected=self.hold_outputs or not roles.loss_inside), Arrivals()
            compile_graphs = aot_autograd(
                fw_compiler=self._compile_forward,
                bw_compiler=lambda graph, inputs: arrivals.keep_reached(
                    graph.graph, self._compile_backward(graph, inputs, watch)
                ),
                inference_compiler=self._compile_inference,
                partition_fn=lambda *args, **kwargs: self._partition(*args, roles=roles, **kwargs),
                keep_inference_input_mutations=True,
            )
            with inductor_config.patch(fallback_random=True):  # keeps draws that nothing reads, as eager does
                compiled = compile_graphs(module, example_inputs)
            _forget_examples(module)

        def run(*args: object) -> Any:
            outputs = compiled(*args)
            arrivals.watch(outputs)
            return watch.guard(outputs, roles.detached, args) if roles.loss_inside else outputs

        return run

    def _partition(
        self,
        joint: fx.GraphModule,
        _inputs: object,
        *,
        num_fwd_outputs: int,
        roles: OutputRoles,
        **_: object,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.captured = True
        try:
            held = self.hold_outputs or not roles.loss_inside
            step = trace_joint(joint, num_fwd_outputs, hold_outputs=held)
            step, schedule, limit = self.planner.choose(step)
            forward, backward = emit(step, schedule)
            memory = check(step, forward, backward, limit=limit)
            self.planner.emitted(step, memory)
            return forward, backward
        except TraceError as error:
            self.error = CaptureError(str(error))
            raise self.error from error
        except HybridRematError as error:
            self.error = error
            raise

    def _runnable(
        self, graph: fx.GraphModule, inputs: Sequence[Any], before: Callable[[], None], name: str
    ) -> Any:
        run = boxed_nop(graph, list(inputs))

        def call(args: list[Any]) -> Any:
            if not self.armed:
                raise CaptureComplete
            before()
            with span(name):
                return run(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _compile_forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        allow_second_backward()
        key = self.planner.current()
        return self._runnable(graph, inputs, lambda: self.planner.running(key), "forward")

    def _compile_inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """A graph without a backward: nothing to choose, but its memory is part of a parted step's."""
        if self.parted:
            self.planner.choose(trace_joint(graph, len(joint_outputs(graph)), hold_outputs=True))
        return self._compile_forward(graph, inputs)

    def _compile_backward(self, graph: fx.GraphModule, inputs: Sequence[Any], watch: HeldOutputs) -> Any:
        return self._runnable(graph, inputs, watch.warn_once, "backward")


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
