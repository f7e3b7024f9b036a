"""The torch.compile backend: what happens between Dynamo's graph and the two graphs that run.

Dynamo hands over a graph; it is captured, and nothing else happens below Dynamo. Before it first runs, a
:class:`Partitioner` (``planning/pipeline.py``) makes two graphs of it, which an inner compiler runs.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import fx, nn
from torch.profiler import record_function

from hybridremat.compiler.constants import share_constants
from hybridremat.compiler.dispatch import Dispatch
from hybridremat.compiler.early_gradients import EarlyGradients, leaving_inputs, original
from hybridremat.compiler.emit import unwatched
from hybridremat.compiler.forgetting import DynamoBackend
from hybridremat.compiler.handing_over import HandingOver
from hybridremat.compiler.inner import Captured, Finish, InnerCompiler, op_by_op
from hybridremat.compiler.model_checks import require_current_device
from hybridremat.compiler.opaque_calls import note_leaves
from hybridremat.compiler.output_hooks import (
    HeldOutputs,
    OutputRoles,
    UndefinedGradients,
    assign_roles,
    delivered_sources,
    detach_outputs,
    gradient_sources,
    sparing_saved,
    with_unread,
)
from hybridremat.compiler.recurrent import make_recurrent_opaque
from hybridremat.compiler.second_backwards import refuse_second_through
from hybridremat.errors import CaptureError, HybridRematError, InfeasibleLimitError
from hybridremat.graph.garbage import collected_seldom
from hybridremat.graph.private_joint import Compiled, planning_state
from hybridremat.graph.private_torch import (
    DynamicOutputShapeException,
    TensorifyScalarRestartAnalysis,
    allows_second_backward,
    calls_custom_ops,
    is_other_subclass,
    is_traceable_wrapper_subclass,
    next_node_number,
    saved_may_vary,
    without_alias_check,
)
from hybridremat.graph.tracing.alias_analysis import OF_GRADIENT, TraceError
from hybridremat.graph.tracing.fx_nodes import joint_outputs, name_modules

if TYPE_CHECKING:
    from hybridremat.compiler.turns import Turns
    from hybridremat.graph.tracing.trace import TracedStep


class CaptureComplete(BaseException):
    """Raised instead of running a captured graph: nothing has run. Never leaves hybridremat."""


class GraphError(Exception):
    """What planning or compiling a captured graph raised that is no error of ours: its cause."""


class SurveyNeededError(BaseException):
    """A step takes a path that should be surveyed, and it can be run again. Never leaves hybridremat.

    An error is the only way out of the running forward, whatever exceptions this catches itself.

    Attributes
    ----------
    refused
        What the step ends in if no survey is possible; None: in what the survey raises, if it is ``needed``.
    needed
        Whether the step has no plan without it.
    """

    def __init__(self, refused: InfeasibleLimitError | None = None, *, needed: bool = True) -> None:
        super().__init__("a path that should be surveyed")
        self.refused, self.needed = refused, needed

    def fresh(self) -> SurveyNeededError:
        """The same, no longer holding the forward that it ended, with all that it had made."""
        refused = self.refused.fresh() if self.refused is not None else None
        return SurveyNeededError(refused, needed=self.needed)


UNIT: Final = "a unit of a planned step"
"""Why Dynamo does not look into a unit: no graph break that anyone could remove."""

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
    ``overwritten``: the places of the backward's own inputs that it writes over. ``dispatch``: runs one of
    several schedules in place of the graphs. ``step``: what other schedules are emitted from, if they may
    take turns with this one.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    started: Callable[[], None]
    accept: Callable[[object, object], None] = lambda *_: None
    lean: bool = False
    plain: bool = False
    delivered: tuple[int, ...] = ()
    overwritten: tuple[int, ...] = ()
    dispatch: Dispatch | None = None
    step: TracedStep | None = None


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
        Captures, compiles and runs the graphs.
    build
        Whether graphs are compiled. Otherwise :class:`CaptureComplete` is raised once a step is planned.
    dynamic
        Whether sizes of inputs are symbols in its graphs.

    Attributes
    ----------
    armed
        Whether graphs are planned and run when they are called. While False they raise
        :class:`CaptureComplete` instead, so that a step is captured without running.
    shared
        Identities of parameters whose gradients leave no graph early.
    workspaces
        By identity of a parameter: bytes that its hooks allocate, where a trial run takes the hooks off.
    visit
        While it is set: what runs graphs in place of planning and running them.
    select
        If it is set: the variant in which a graph runs that is called.
    starting, ran
        If they are set: called before a graph's forward and after it, with the number that the next autograd
        node has.
    compiling
        If it is set: called when Dynamo has compiled code.
    latest
        The graph that was captured last while it is not armed.
    error
        What capturing raised; Dynamo wraps it.
    refused
        Why a graph could not be captured that Dynamo then breaks, in the place of an error; else empty.
    captured
        Whether a graph with a backward has been planned.
    graphs
        How many graphs have been captured.
    compile_seconds
        What the inner compiler took to build code.
    unit
        The name of the unit that runs (``units.py``); empty where there are none.
    calls
        The names of the units that have been called in the forward of the model, in order.
    codes
        The code objects that Dynamo compiled for it: the model's own where graphs break.
    for_dynamo, runs
        What Dynamo is given to keep in place of it, and what runs graphs, by what Dynamo keeps of it.
    unread
        By the text of a graph: the outputs for which there is no gradient, once that is decided.
    captures_rest
        Of a step with units: whether what runs between them is captured as well.
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
        inner: InnerCompiler = op_by_op,
        build: bool = True,
        dynamic: bool = False,
    ) -> None:
        self.partitioner = partitioner
        self.inner, self.build, self.dynamic = inner, build, dynamic
        self.hold_outputs, self.all_outputs = hold_outputs, all_outputs or several_graphs
        self.loss_only = loss_only
        self.several_graphs, self.early_gradients = several_graphs, early_gradients
        self.armed = True
        self.error: HybridRematError | None = None
        self.refused = ""
        self.shared: set[int] = set()
        self.workspaces: dict[int, int] = {}
        self.visit: Callable[[CapturedGraph, Sequence[Any]], Any] | None = None
        self.select: Callable[[CapturedGraph], CapturedGraph] | None = None
        self.starting: Callable[[int], None] | None = None
        self.ran: Callable[[int], None] | None = None
        self.compiling: Callable[[], None] | None = None
        self.latest: CapturedGraph | None = None
        self.captured = False
        self.graphs = 0
        self.compile_seconds = 0.0
        self.unit = ""
        self.calls: list[str] = []
        self.codes: set[CodeType] = set()
        self.for_dynamo = DynamoBackend(self)
        self.runs: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()
        self.unread: dict[str, tuple[int, ...]] = {}
        self.captures_rest = True
        self._captured_graphs: WeakSet[CapturedGraph] = WeakSet()
        self.lock = threading.RLock()

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_: object
    ) -> Callable[..., Any]:
        """Capture one of Dynamo's graphs; what runs it, once it is planned."""
        graph = self.capture(module, example_inputs)
        if not self.armed:
            self.latest = graph

        def run(*args: object) -> Any:
            if not self.armed:
                raise CaptureComplete
            if self.visit is not None:
                return self.visit(graph, args)
            return (graph if self.select is None else self.select(graph))(*args)

        return run

    def capture(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> CapturedGraph:
        """Capture one of Dynamo's graphs.

        Raises
        ------
        CaptureError
            If the graph ends in a graph break.
        """
        with self.lock:
            self.graphs += 1
            if not self.several_graphs:
                _refuse_graph_break(module)
            with self.noting_errors():
                _refuse_backward(module)
                require_current_device(module, example_inputs)
                make_recurrent_opaque(module)
                note_leaves(module, example_inputs)
                name_modules(module, self.unit)
                roles = assign_roles(module, all_outputs=self.all_outputs, loss_only=self.loss_only)
            differentiable = tuple(_requires_grad(node) for node in joint_outputs(module))
            text = graph_text(module, example_inputs) if self.several_graphs else ""
            detach_outputs(module, self.unread.get(text, ()))
            known = self.early_gradients or not any(map(is_traceable_wrapper_subclass, example_inputs))
            leaving = leaving_inputs(example_inputs, self.workspaces) if known else {}  # else places differ
            with collected_seldom(), self._noting_gradients():
                graph = CapturedGraph(self, self.inner(module, example_inputs), roles, leaving)
            if not calls_custom_ops(module) or any(map(is_other_subclass, example_inputs)):
                graph.around = without_alias_check
            self._captured_graphs.add(graph)
            if self.several_graphs:
                graph.text, graph.unread = text, self.unread.get(text, ())
                graph.unplanned = Unplanned(module, break_after(module), differentiable)
                given = enumerate(example_inputs)
                graph.parameters = {n: id(original(e)) for n, e in given if isinstance(e, nn.Parameter)}
            return graph

    def settle(self, has_variants: Callable[[str], bool]) -> None:
        """Let go of what further variants are compiled from, of graphs that have none, by fingerprint."""
        for graph in list(self._captured_graphs):
            if graph.key and not has_variants(graph.key):
                graph.settle()

    def graph_of(self, fingerprint: str) -> CapturedGraph | None:
        """The planned graph with this fingerprint whose schedules may take turns; None if there is none."""
        known = ((each.step, each) for each in self._captured_graphs)
        return next((each for step, each in known if step and step.graph.fingerprint == fingerprint), None)

    def note_code(self, code: CodeType) -> None:
        """Dynamo has compiled this code."""
        self.codes.add(code)
        if self.compiling is not None:
            self.compiling()

    @contextmanager
    def _noting_gradients(self) -> Iterator[None]:
        """Keep why a graph has none, where Dynamo breaks it in the place of an error."""
        try:
            yield
        except DynamicOutputShapeException as error:
            self.refused = f"the shape of a gradient in it depends on the data ({error.func}). {OF_GRADIENT}"
            raise

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


@dataclass(frozen=True)
class Unplanned:
    """One of the graphs of a step with graph breaks, as Dynamo has captured it.

    ``ending``: place and reason of the break after it, if there is one; ``differentiable``: whether its
    outputs carry gradients.
    """

    module: fx.GraphModule
    ending: tuple[str, str] | None
    differentiable: tuple[bool, ...]


class CapturedGraph:
    """One of Dynamo's graphs, which is planned and compiled before it first runs (``inner.Callbacks``).

    Attributes
    ----------
    unplanned
        Of a step with graph breaks, until it is planned: what a survey runs.
    parameters
        Of a step with graph breaks: the identity of each parameter among its inputs.
    key, number
        Of a step with graph breaks: the fingerprint, once it is known, and in which variant it runs.
    text
        Of a step with graph breaks: identifies the graph as Dynamo hands it over.
    around
        Makes a context that its forward runs in.
    unread
        Places of outputs that no loss is made of, for which there is no gradient.
    step
        Once it is planned: as in :class:`Partition`.
    """

    def __init__(
        self, backend: Backend, captured: Captured, roles: OutputRoles, leaving: Mapping[int, int]
    ) -> None:
        """``leaving``: the inputs whose gradients may leave early, with workspace of whoever takes them."""
        self._backend, self._roles = backend, roles
        self._captured: Captured | None = captured
        self._again: Callable[[], Captured] | None = captured.again if backend.several_graphs else None
        self._hold_outputs = backend.hold_outputs or not roles.loss_inside
        self._held, self._undefined = HeldOutputs(expected=self._hold_outputs), UndefinedGradients()
        self._early = EarlyGradients(leaving if backend.early_gradients else {})
        self._handing_over, self._leaving = HandingOver(leaving), leaving
        self._made: Partition | None = None
        self._overwritten: tuple[int, ...] = ()
        self._accept: Callable[[object, object], None] = lambda *_: None
        self._forward_code: object = None
        self._run: Callable[..., Any] | None = None
        self.unplanned: Unplanned | None = None
        self.parameters: dict[int, int] = {}
        self.key = ""
        self.number: int | None = None
        self.text = ""
        self.unread: tuple[int, ...] = ()
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._variants: dict[int, CapturedGraph] = {}
        self.step: TracedStep | None = None
        self._ways = _Way(), _Way()
        self._saved_vary: Callable[[], None] = lambda: None
        self._turns: Turns | None = None
        self._first: tuple[int, int] | None = None  # outputs of the compiled forward, and what is unwatched

    def variant(self, number: int) -> CapturedGraph:
        """The graph with a schedule of its own for each number; the first that is asked for is itself."""
        if self.number is None:
            self.number = number
        if number == self.number:
            return self
        if number not in self._variants:
            assert self._again is not None, "a graph with variants is not settled"
            with self._backend.lock, collected_seldom(), self._backend.noting_errors():
                other = CapturedGraph(self._backend, self._again(), self._roles, self._leaving)
            other.parameters, other.key, other.number = self.parameters, self.key, number
            other.text, other.unread, other.around = self.text, self.unread, self.around
            other.settle()
            self._variants[number] = other
        return self._variants[number]

    def leave_unread(self, places: tuple[int, ...]) -> None:
        """Let some outputs have no gradient, before the graph is planned; one that reaches them raises."""
        self._backend.unread[self.text] = places
        if not places or self._captured is None or self.unplanned is None:
            return
        detach_outputs(self.unplanned.module, places)
        with self._backend.lock, collected_seldom(), self._backend.noting_errors():
            self._captured = self._captured.again()
        self._again, self.unread = self._captured.again, places

    def turns(self) -> Turns:
        """What lets other schedules take turns with the one that is compiled.

        It has to have a step (:attr:`step`), and runs from then on behind these turns.
        """
        if self._turns is None:
            from hybridremat.compiler.turns import Turns

            assert self._first is not None, "its schedules may take turns"
            forward, backward = self._ways
            turns = self._turns = Turns(forward.run_planned, backward.run_planned, *self._first)
            self._saved_vary()
            forward.run, backward.run = turns.forward, turns.backward
        return self._turns

    def settle(self) -> None:
        """Let go of what variants are compiled from: there are none."""
        self._again = None

    def plan(self) -> None:
        """Plan the graph and, if graphs are to be built, compile it: once.

        Raises
        ------
        HybridRematError
            Whatever planning raised.
        """
        with self._backend.lock, suppress(CaptureComplete):
            if (captured := self._captured) is None:
                return
            with collected_seldom(), self._backend.noting_errors(), _failures_named():
                if (joint := captured.joint) is not None:  # else the compiler asks when it has made one
                    with planning_state():
                        how = self._how
                        self._made = self._backend.partitioner.split(joint.graph, joint.num_outputs, **how)
                self._run = captured.compiled(self)
                if self.dispatch is not None:
                    self.dispatch.compiled()
            self._captured = self._made = self.unplanned = None

    def __call__(self, *args: object) -> Any:
        """Run the forward; autograd runs the backward."""
        if self._run is None:
            self.plan()
        assert self._run is not None
        since = next_node_number()
        if self._backend.starting is not None:
            self._backend.starting(since)
        with self.around():
            outputs = self._run(*self._inputs(args))
        if self._backend.several_graphs:
            refuse_second_through(outputs, since)
        self._undefined.register(outputs)
        self._early.watch(outputs)
        if self.unread:
            outputs = with_unread(outputs, self.unread, args)
        if self._roles.loss_inside:
            leaving: list[Any] = [args[place] for place in self._early.indices]
            outputs = self._held.guard(outputs, self._roles.detached, args, leaving)
        if self._backend.ran is not None:
            self._backend.ran(next_node_number())
        return outputs

    def _inputs(self, args: Sequence[Any]) -> Sequence[Any]:
        """What the compiled forward is given. Where schedules take turns, all gradients come at the end."""
        if self._turns is not None:
            return self._early.aliases(args)
        return self._handing_over.inputs(self._early.aliases(args))

    def keep_gradients_of(self, shared: Collection[int]) -> None:
        """Let the gradients of some parameters leave no graph of the step early: several add to them."""
        self._backend.shared |= set(shared)

    @property
    def unit(self) -> str:
        """The name of the unit that runs."""
        return self._backend.unit

    @property
    def call(self) -> int:
        """The number of the call of that unit in the forward of the model; 0 outside of units."""
        return len(self._backend.calls) if self.unit else 0

    @property
    def _how(self) -> dict[str, Any]:
        """How the graph is split."""
        kept = {place for place, number in self.parameters.items() if number in self._backend.shared}
        leaving = {place: room for place, room in self._early.leaving.items() if place not in kept}
        return {"hold_outputs": self._hold_outputs, "leaving": leaving}

    @property
    def lean(self) -> bool:
        """See :class:`Partition`."""
        return self._made is not None and self._made.lean

    @property
    def dispatch(self) -> Dispatch | None:
        """See :class:`Partition`."""
        return self._made.dispatch if self._made is not None else None

    @property
    def plain(self) -> bool:
        """See :class:`Partition`."""
        return self._made is not None and self._made.plain

    def partition(
        self, joint: fx.GraphModule, inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and backward graph of a joint graph."""
        share_constants(joint)
        if self._made is None:
            with planning_state(), self._backend.noting_errors():
                self._made = self._backend.partitioner.split(joint, num_fwd_outputs, **self._how)
        self._backend.captured = True
        self._early.indices, self._overwritten = self._made.delivered, self._made.overwritten
        self._accept = self._made.accept
        self._handing_over.plan(self._made.backward)
        self.step = self._made.step
        if self.step is not None:
            self._first = num_fwd_outputs, len(unwatched(self._made.forward, num_fwd_outputs))
        return self._made.forward, self._made.backward

    def begin(self, graph: fx.GraphModule, *, backward: bool) -> Finish:
        """Read what is needed of a graph before it is compiled: a backward, perhaps when it first runs."""
        share_constants(graph)
        if not backward and self._made is None and self._backend.several_graphs:  # it has no backward
            with planning_state():
                started = self._backend.partitioner.forward_only(graph)
        else:
            started = self._made.started if self._made is not None else lambda: None
        if not self._backend.build:
            raise CaptureComplete
        sources = gradient_sources(graph.graph) if backward else []
        early_sources = delivered_sources(graph.graph) if backward else {}
        if backward:
            self._undefined.once = not allows_second_backward()
        elif self.step is not None:
            self._saved_vary = saved_may_vary()

        def finish(run: Compiled, code: object = None, seconds: float = 0.0) -> Compiled:
            self._backend.compile_seconds += seconds
            if not backward:
                self._forward_code = code
                return _runnable(self._ways[0], run, started, "forward")
            forward_code, self._forward_code = self._forward_code, None
            if code is not None and forward_code is not None:
                with self._backend.noting_errors():
                    self._accept(forward_code, code)
            undefined = partial(self._undefined.unreached, dict(enumerate(sources)))
            run = self._handing_over.wrapped(run, undefined)
            spared = sparing_saved(run, self._overwritten)
            runnable = _runnable(self._ways[1], spared, self._held.at_backward, "backward")
            unreached = partial(self._undefined.unreached, early_sources)
            return self._undefined.drop_unreached(sources, self._early.wrapped(runnable, unreached))

        return finish


@contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except (HybridRematError, TraceError, TensorifyScalarRestartAnalysis):
        raise  # the last is for Dynamo, which captures again with a number for a float
    except Exception as error:
        raise GraphError(str(error)) from error


class _Way:
    """What runs the forward or the backward of a graph, which others may take the place of."""

    planned: Compiled
    run: Compiled | None = None

    def run_planned(self, args: list[Any]) -> Any:
        """Run what was compiled, perhaps not before now."""
        return self.planned(args)


def _runnable(way: _Way, run: Compiled, before: Callable[[], None], name: str) -> Compiled:
    way.planned, way.run = run, way.run or run

    def call(args: list[Any]) -> Any:
        before()
        with record_function("##hybridremat:" + name):
            return way.run(args)  # type: ignore[misc]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _requires_grad(node: object) -> bool:
    """Whether an output of Dynamo's graph carries a gradient."""
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad


def graph_text(module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Identifies one of Dynamo's graphs and the shapes, types and gradients of its inputs."""
    text = [module.code]
    for each in inputs:
        if isinstance(each, torch.Tensor):
            text.append(f"{each.dtype} {tuple(each.shape)} {each.device} {each.requires_grad}")
        else:
            text.append(repr(each))
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def break_after(module: fx.GraphModule) -> tuple[str, str] | None:
    """Place and reason of the graph break that ends one of Dynamo's graphs, if any."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or UNIT in str(reason.reason):
        return None
    place = reason.user_stack[-1] if reason.user_stack else None
    return (f"{place.filename}:{place.lineno}" if place is not None else "", str(reason.reason))


def _refuse_backward(module: fx.GraphModule) -> None:
    """Refuse a forward that runs a backward: what it adds to gradients stays, and no plan counts it."""
    for derivative in module.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        into = [user.args[0] for each in derivative.users for user in each.users if user.target == "copy_"]
        if any(getattr(each, "target", None) is torch.empty_like for each in into):  # as Dynamo writes it
            raise CaptureError(
                "the forward calls .backward(), which adds to gradients that no plan counts. Make the "
                "derivative with torch.autograd.grad or torch.func.grad, or call it outside of the model."
            )


def _refuse_graph_break(module: fx.GraphModule) -> None:
    found = break_after(module)
    if found is not None:
        place, reason = found
        where = f" at {place}" if place else ""
        raise CaptureError(
            f"the model's graph breaks{where} ({reason}), so the memory of the whole step cannot be "
            f"planned. Nothing has been run. {REMOVE_BREAK}"
        )
