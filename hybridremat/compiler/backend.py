"""The torch.compile backend: what happens between Dynamo's graph and the two graphs that run.

Dynamo hands over a graph; AOTAutograd makes the joint graph of it and asks for a partition, which a
:class:`Partitioner` makes (``planning/pipeline.py``); an inner compiler runs its two graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import fx
from torch.profiler import record_function

from hybridremat.compiler.early_gradients import EarlyGradients, leaving_inputs
from hybridremat.compiler.frame_room import with_room
from hybridremat.compiler.inner import Compiled, Finish, InnerCompiler, run_op_by_op
from hybridremat.compiler.model_checks import require_current_device
from hybridremat.compiler.opaque_calls import note_leaves
from hybridremat.compiler.output_hooks import (
    HeldOutputs,
    UndefinedGradients,
    assign_roles,
    delivered_sources,
    gradient_sources,
    sparing_saved,
)
from hybridremat.compiler.recurrent import make_recurrent_opaque
from hybridremat.errors import CaptureError, HybridRematError
from hybridremat.graph.garbage import collected_seldom
from hybridremat.graph.private_torch import allows_second_backward
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
    """The two graphs that run in place of a joint graph.

    ``started`` is called when the forward starts, ``accept`` with the code that the inner compiler makes of
    both graphs, unless it was cached; it raises PlanError if that is not what was planned. ``lean``: whether
    a compiler has to keep the order of the graphs and free every buffer at once; ``plain``: whether they are
    those of the plain step. ``delivered``: the inputs whose gradients the backward delivers;
    ``overwritten``: the places of the backward's own inputs that it writes over.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    started: Callable[[], None]
    accept: Callable[[object, object], None] = lambda *_: None
    lean: bool = False
    plain: bool = False
    delivered: tuple[int, ...] = ()
    overwritten: tuple[int, ...] = ()


class Partitioner(Protocol):
    """Makes the graphs that run (``planning/pipeline.py``)."""

    def split(
        self, joint: fx.GraphModule, num_outputs: int, *, hold_outputs: bool, leaving: Mapping[int, int]
    ) -> Partition:
        """The forward and backward of a joint graph with ``num_outputs`` forward outputs.

        ``leaving``: the inputs whose gradients are to leave early, as in
        :func:`~hybridremat.graph.tracing.trace.trace_joint`.
        """
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
    loss_only
        Whether None is returned for outputs that take no part in the loss.
    early_gradients
        Whether gradients of parameters leave in the backward (:mod:`hybridremat.compiler.early_gradients`).
    inner
        Compiles and runs the graphs.
    build
        Whether graphs are compiled. Otherwise :class:`CaptureComplete` is raised once a step is planned.

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
    compile_seconds
        What the inner compiler took to build code.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        *,
        hold_outputs: bool = False,
        all_outputs: bool = False,
        several_graphs: bool = False,
        loss_only: bool = False,
        early_gradients: bool = False,
        inner: InnerCompiler = run_op_by_op,
        build: bool = True,
    ) -> None:
        self.partitioner = partitioner
        self.inner, self.build = inner, build
        self.hold_outputs, self.all_outputs = hold_outputs, all_outputs or several_graphs
        self.loss_only = loss_only
        self.several_graphs, self.early_gradients = several_graphs, early_gradients
        self.armed = True
        self.error: HybridRematError | None = None
        self.captured = False
        self.graphs = 0
        self.compile_seconds = 0.0
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
            with self.noting_errors():
                require_current_device(module, example_inputs)
                make_recurrent_opaque(module)
                note_leaves(module, example_inputs)
                roles = assign_roles(module, all_outputs=self.all_outputs, loss_only=self.loss_only)
            hold_outputs = self.hold_outputs or not roles.loss_inside
            held, undefined = HeldOutputs(expected=hold_outputs), UndefinedGradients()
            early = EarlyGradients(leaving_inputs(example_inputs) if self.early_gradients else {})
            graphs = _Graphs(self, held, undefined, early, hold_outputs=hold_outputs)
            with collected_seldom():
                compiled = with_room(lambda: self.inner(module, example_inputs, graphs))
            _forget_examples(module)

        def run(*args: object) -> Any:
            outputs = compiled(*early.aliases(args))
            undefined.register(outputs)
            early.watch(outputs)
            return held.guard(outputs, roles.detached, args) if roles.loss_inside else outputs

        return run

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Keep errors of planning, which Dynamo would wrap."""
        try:
            yield
        except TraceError as error:
            self.error = CaptureError(str(error))
            raise self.error from error
        except HybridRematError as error:
            self.error = error
            raise


class _Graphs:
    """What the inner compiler asks for, for one of Dynamo's graphs (``inner.Callbacks``)."""

    def __init__(
        self,
        backend: Backend,
        held: HeldOutputs,
        undefined: UndefinedGradients,
        early: EarlyGradients,
        *,
        hold_outputs: bool,
    ) -> None:
        self._backend, self._held, self._undefined, self._early = backend, held, undefined, early
        self._hold_outputs = hold_outputs
        self._started: Callable[[], None] = lambda: None
        self._accept: Callable[[object, object], None] = lambda *_: None
        self._forward_code: object = None
        self._overwritten: tuple[int, ...] = ()
        self.lean = self.plain = False

    def partition(
        self, joint: fx.GraphModule, inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and backward graph of a joint graph."""
        backend = self._backend
        backend.captured = True
        with self._backend.noting_errors():
            made = backend.partitioner.split(
                joint, num_fwd_outputs, hold_outputs=self._hold_outputs, leaving=self._early.leaving
            )
        self._early.indices, self._overwritten = made.delivered, made.overwritten
        self._started, self._accept = made.started, made.accept
        self.lean, self.plain = made.lean, made.plain
        return made.forward, made.backward

    def begin_inference(self, graph: fx.GraphModule) -> None:
        """A graph without a backward, which is part of a step of several graphs."""
        if self._backend.several_graphs:
            self._started = self._backend.partitioner.forward_only(graph)

    def begin(self, graph: fx.GraphModule, *, backward: bool) -> Finish:
        """Read what is needed of a graph before it is compiled."""
        if not self._backend.build:
            raise CaptureComplete
        sources = gradient_sources(graph.graph) if backward else []
        early_sources = delivered_sources(graph.graph) if backward else {}
        if backward:
            self._undefined.once = not allows_second_backward()

        def finish(run: Compiled, code: object = None, seconds: float = 0.0) -> Compiled:
            self._backend.compile_seconds += seconds
            if not backward:
                self._forward_code = code
                return self._runnable(run, self._started, "forward")
            forward_code, self._forward_code = self._forward_code, None
            if code is not None and forward_code is not None:
                with self._backend.noting_errors():
                    self._accept(forward_code, code)
            runnable = self._runnable(sparing_saved(run, self._overwritten), self._held.warn_once, "backward")
            unreached = partial(self._undefined.unreached, early_sources)
            return self._undefined.drop_unreached(sources, self._early.wrapped(runnable, unreached))

        return finish

    def _runnable(self, run: Compiled, before: Callable[[], None], name: str) -> Compiled:
        backend = self._backend

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
