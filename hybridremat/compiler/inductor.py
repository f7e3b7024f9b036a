"""The inner compiler Inductor: our partition of the joint graph, Inductor's kernels, and their memory.

The memory of a schedule is that of the code that Inductor generates for it: emit, lower both graphs, replay.
To be imported only where it is asked for, as ``private_inductor``, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from hybridremat.compiler import compiled_deliveries, compiled_losses
from hybridremat.compiler.check import check
from hybridremat.compiler.deliveries import is_delivery
from hybridremat.compiler.emit import emit
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.inner import Callbacks, Captured, forget_examples
from hybridremat.compiler.lowered_memory import LoweredStep, replay
from hybridremat.graph.costs.footprints import workspace_of
from hybridremat.graph.garbage import collector_off
from hybridremat.graph.generated_code import OP, BufferEvent, LoweredCode, Result
from hybridremat.graph.joint import Schedule
from hybridremat.graph.private_inductor import InductorFusion, compile_step, lower_backward, lower_forward
from hybridremat.graph.private_joint import Tracing
from hybridremat.graph.rewrites.row_rules import LOSSES
from hybridremat.graph.tracing.fusion import FusionRules
from hybridremat.graph.tracing.fx_nodes import allocated_bytes, joint_outputs, storages, tensors
from hybridremat.graph.tracing.trace import TracedStep


@dataclass(frozen=True)
class Inductor:
    """See :class:`~hybridremat.compiler.inner.InnerCompiler`.

    ``identity`` names what the partition depends on; it is part of the keys of Inductor's caches.
    ``whole_losses``: losses over classes are not decomposed, so that they can be made by chunks.
    """

    identity: str
    whole_losses: bool = False
    rules: ClassVar[FusionRules] = InductorFusion()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Captured:
        """Capture one of Dynamo's graphs."""
        return _CapturedForInductor(module, inputs, self)

    def lowered(
        self, step: TracedStep, schedule: Schedule, *, lean: bool = False, plain: bool = False
    ) -> LoweredStep:
        """A schedule of a step with Inductor's fusion, from its own lowering; nothing is built.

        ``lean``: whether Inductor keeps the order of the schedule and frees every buffer at once. ``plain``:
        whether it lays out what is saved as in a step without a plan.

        Raises
        ------
        PlanError
            If the emitted graphs do not compute the joint graph.
        """
        with collector_off():  # it would go through the whole traced model again and again
            return _lowered(step, schedule, lean=lean, plain=plain)

    def code_memory(
        self, step: TracedStep, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> Callable[[object, object], EmittedMemory]:
        """A function from the code of two emitted graphs, which are not compiled yet, to its memory.

        Gradients that leave do so by an op from now on.
        """
        between = StepBuffers(step, forward, backward)
        _as_ops(step, forward, backward)

        def of(forward_code: object, backward_code: object) -> EmittedMemory:
            assert isinstance(forward_code, LoweredCode)
            assert isinstance(backward_code, LoweredCode)
            return between.memory(forward_code, backward_code)

        return of


class _CapturedForInductor:
    """A graph of Dynamo's: Inductor takes no joint graph, and makes its own when it compiles."""

    joint = None

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], inductor: Inductor) -> None:
        self._module, self._inputs, self._inductor = module, inputs, inductor
        self._tracing = Tracing()

    def again(self) -> _CapturedForInductor:
        """See :class:`~hybridremat.compiler.inner.Captured`."""
        return self

    def compiled(self, callbacks: Callbacks) -> Callable[..., Any]:
        """See :class:`~hybridremat.compiler.inner.Captured`."""
        with self._tracing.resumed():
            run = compile_step(
                self._module,
                self._inputs,
                callbacks,
                identity=self._inductor.identity,
                whole=LOSSES if self._inductor.whole_losses else (),
            )
        forget_examples(self._module)  # Inductor's own passes read them
        return run


class StepBuffers:
    """What joins the two graphs of a step: tensors that the forward hands to the caller and the backward.

    ``workspaces`` are those of their kernels.
    """

    def __init__(self, step: TracedStep, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """For two emitted graphs that have not been lowered yet."""
        self._count = step.num_outputs
        self._inputs = [node.name for node in backward.graph.find_nodes(op="placeholder")]
        outputs = joint_outputs(step.module)[: self._count]
        self._held = [isinstance(node, fx.Node) and _is_held(step, node) for node in outputs]
        self._tangents = sum(value.bytes for value in step.graph.values if value.tangent)
        self.workspaces = Workspaces(step, forward, backward)
        devices = {t.device.type for node in step.op_nodes for t in tensors(node.meta.get("val"))}
        self._device = "cuda" if "cuda" in devices else "cpu"

    def memory(self, forward: LoweredCode, backward: LoweredCode) -> EmittedMemory:
        """The memory of the step with the code of both graphs."""
        forward, backward = (as_allocated(code, self._device) for code in (forward, backward))
        outputs, saved = forward.results[: self._count], forward.results[self._count :]
        sizes = {result.buffer: result.size for result in saved}
        held = {r.buffer: r.size for r, stays in zip(outputs, self._held, strict=True) if stays}
        always = self._tangents + sum(size for buffer, size in held.items() if buffer not in sizes)
        given = {name: (r.buffer, r.size) for name, r in zip(self._inputs, saved, strict=False) if r.size}
        return EmittedMemory(
            forward_peak=replay(forward.events, {}, self.workspaces),
            backward_peak=replay(backward.events, given, self.workspaces, always, held),
            saved=sum({**sizes, **{result.buffer: result.size for result in outputs}}.values()),
        )


def as_allocated(code: LoweredCode, device: str) -> LoweredCode:
    """The code with sizes as a kind of device allocates them; Inductor's are those that it asks for."""
    return LoweredCode(
        tuple(replace(event, size=allocated_bytes(event.size, device)) for event in code.events),
        tuple(replace(result, size=allocated_bytes(result.size, device)) for result in code.results),
    )


def _is_held(step: TracedStep, node: fx.Node) -> bool:
    """Whether the caller holds an output to the end of the step."""
    return not step.graph.held_outputs.isdisjoint(step.node_values[node])


class Workspaces:
    """Bytes that kernels of libraries allocate while they run, on tensors as Inductor lays them out.

    For a gradient that leaves, those of whoever takes it.

    ``measured`` are those found so far by op, the most of each.
    """

    def __init__(self, step: TracedStep, *graphs: fx.GraphModule) -> None:
        self._step = step
        nodes = [node for graph in graphs for node in graph.graph.nodes]
        self._op_of = {node.name: node.meta[OP] for node in nodes if OP in node.meta}
        self.measured: dict[int, int] = {}
        taken = {number: each.workspace for number, each in step.deliveries.items()}
        left = [node for node in nodes if is_delivery(node)]
        self._taken = {node.name: taken[node.args[-1]] for node in left}

    def __call__(self, event: BufferEvent) -> int:
        """Workspace of a call."""
        if not self._taken.keys().isdisjoint(event.nodes):
            return max(self._taken.get(name, 0) for name in event.nodes)
        ops = {self._op_of[name] for name in event.nodes if name in self._op_of}
        calls = [op for op in ops if op not in self._step.fused_ops]
        if not calls:  # a kernel that Inductor has put in the place of others
            return max((op.temp for op in self._step.graph.ops), default=0)
        return max(self._of(op, event) for op in calls)

    def _of(self, op: int, event: BufferEvent) -> int:
        found = workspace_of(self._step.op_nodes[op], event.layouts)
        if found is None:
            return self._step.graph.ops[op].temp
        self.measured[op] = max(found, self.measured.get(op, 0))
        return found


def _as_ops(step: TracedStep, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Make what Inductor does not know of two emitted graphs, which have been checked, calls of ops."""
    compiled_deliveries.as_ops(step, backward)
    for graph in (forward, backward):
        compiled_losses.as_ops(graph)


def _lowered(step: TracedStep, schedule: Schedule, *, lean: bool, plain: bool) -> LoweredStep:
    forward, backward = emit(step, schedule, save_views=False)
    check(step, forward, backward)
    between = StepBuffers(step, forward, backward)
    _as_ops(step, forward, backward)
    owned = _owned(step, forward, backward)
    seen = range(step.num_outputs)
    code = lower_forward(forward, _inputs(forward), visible=seen, lean=lean, plain=plain)
    inputs = _restrided(_inputs(backward), code.results[step.num_outputs :])
    memory = between.memory(code, lower_backward(backward, inputs, owned=owned, lean=lean))
    return LoweredStep(memory, between.workspaces.measured)


def _owned(step: TracedStep, forward: fx.GraphModule, backward: fx.GraphModule) -> list[int]:
    """The saved tensors that share no storage with the step's inputs and results."""
    results = joint_outputs(forward)
    others = [*forward.graph.find_nodes(op="placeholder"), *results[: step.num_outputs]]
    others += joint_outputs(backward)
    shared = set().union(*(storages(node) for node in others if isinstance(node, fx.Node)))
    saved = results[step.num_outputs :]
    return [index for index, node in enumerate(saved) if shared.isdisjoint(storages(node))]


def _inputs(module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def _restrided(inputs: Sequence[Any], saved: Sequence[Result]) -> list[Any]:
    """The backward's inputs with the strides that the lowered forward gives what it saves."""
    changed = list(inputs)
    for index, (value, result) in enumerate(zip(inputs, saved, strict=False)):
        strides = result.strides
        if isinstance(value, torch.Tensor) and strides is not None and value.stride() != strides:
            changed[index] = value.as_strided(value.shape, strides)
    return changed
