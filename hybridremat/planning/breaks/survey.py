"""Find the graphs of a step with graph breaks, by running its forward without gradients.

Which graph follows a break can depend on values, so the forward runs: once to capture the graphs, and once
more to measure the eager code between them. Both runs are trials on copies of the inputs, and leave nothing
changed.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from hybridremat.compiler.backend import UNIT, Backend, CaptureComplete, CapturedGraph
from hybridremat.compiler.early_gradients import original
from hybridremat.compiler.model_state import Unseen
from hybridremat.compiler.output_hooks import outputs_in_backward
from hybridremat.compiler.unread_runs import no_modes, unread_results
from hybridremat.errors import CaptureError, PolicyError
from hybridremat.graph.garbage import noting_freed, without_collection
from hybridremat.graph.joint import JointGraph, plain_schedule
from hybridremat.graph.memory import inputs_read
from hybridremat.graph.private_torch import noting_breaks, storage_reference
from hybridremat.graph.tracing.non_leaf import non_leaf
from hybridremat.graph.tracing.trace import (
    TracedStep,
    gradients_at,
    releasing,
    values_by_input,
    values_of_outputs,
)
from hybridremat.planning.accept import with_policy_fingerprint
from hybridremat.planning.breaks.eager_code import EagerCodeRecorder, measure_eager_code
from hybridremat.planning.breaks.fading import Fading, FadingInputs
from hybridremat.planning.breaks.sharding import Sharding
from hybridremat.planning.breaks.unread import OutputUse
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.planner import step_frontier
from hybridremat.planning.progress import Timings
from hybridremat.planning.step_costs import costed
from hybridremat.plans.fsdp import Fsdp
from hybridremat.plans.policy import resolve_policy
from hybridremat.sequence.joined_graphs import PartPoint, StepPart

if TYPE_CHECKING:
    from hybridremat.planning.graph_frontier import GraphFrontier

# Yields the forward on copies of the inputs; at exit the model's state is restored.
Trial = AbstractContextManager[Callable[[], Any]]

_TRIALS = 3  # pairs of runs, for models that change their path
Unread = Mapping[CapturedGraph, tuple[int, ...]]  # places of outputs


class NewPathError(CaptureError):
    """The run that measures has met a graph that has not been traced."""


@dataclass
class Survey:
    """What trial runs of the forward have found.

    Attributes
    ----------
    frontiers
        Those of the distinct graphs, by fingerprint.
    ran
        The graphs, in the order in which they ran.
    units
        The module that each of these is of, if modules were named; else empty.
    parameters
        The identities of the parameters that each of these is given, by place: equal units share a graph.
    calls
        The number of the call of a module that each of these is in; 0 outside of them.
    breaks
        Place and reason of the break after each of these, None without a break.
    eager_code
        Memory of the eager code before each graph of ``order`` and after the last one, if measured.
    nodes
        How many autograd nodes the code before each graph, and after the last one, has made.
    passing
        By fingerprint, the gradients that a graph's backward makes and the one after it takes.
    staying
        By fingerprint, the bytes of outputs that are held after the backward of their graph, where that is
        known.
    dropped
        By fingerprint, the outputs that are gone when the forward has returned, where no backward reads them.
    joined_bytes
        The largest gradient that several graphs make and autograd adds up.
    fading
        By fingerprint, the inputs that are gone when the forward has returned, where no backward reads them.
    going
        The places of inputs of each graph that code between graphs drops.
    broken
        Whether Dynamo met a break as it traced.
    unseen
        The identities of buffers and parameters that a run has changed so that only a copy tells.
    given
        The identities of tensors that graphs were given, in any run, but parameters, which they only read.
    refused
        Why the policy cannot be kept in one of the graphs.
    latest
        The fingerprint of the graph that was traced last.
    recorder
        Of the run that measures, while it runs.
    traced
        The distinct graphs with costs, by fingerprint.
    share
        The part of the time for planning that each has.
    leaves
        The identities of leaves that code between and after graphs reads itself, in any run.
    shared
        The identities of parameters that several graphs use, or one that runs twice, or one and the code
        between graphs.
    alive
        For each graph of ``ran``, what tells whether its outputs are still there.
    released
        The places of outputs that are gone when the backward of their graph runs: whoever read them has run
        its own by then.
    tracing
        The graph that is traced now.
    stable
        Whether a run that captures nothing is waited for.
    at_units_alone
        Whether it is refused if graphs break elsewhere than at units.
    inputs
        Which inputs of graphs go, as found in the same run.
    use
        Which outputs have gradients, as found in the run that captures.
    sharding
        What FSDP2 is going to gather and reduce; None if parameters stay whole.
    sharded
        What it would be if it were called in another way; None if parameters stay whole.
    """

    context: PlanContext
    frontiers: dict[str, GraphFrontier] = field(default_factory=dict)
    ran: list[CapturedGraph] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    parameters: list[dict[int, int]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    breaks: list[tuple[str, str] | None] = field(default_factory=list)
    eager_code: list[StepPart | None] = field(default_factory=list)
    joined_bytes: int = 0
    nodes: list[int] = field(default_factory=list)
    passing: dict[str, frozenset[int]] = field(default_factory=dict)
    staying: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, frozenset[int]] = field(default_factory=dict)
    fading: dict[str, frozenset[int]] = field(default_factory=dict)
    going: dict[CapturedGraph, Fading] = field(default_factory=dict)
    broken: bool = False
    unseen: Unseen = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    refused: PolicyError | None = None
    latest: str = ""
    recorder: EagerCodeRecorder | None = None
    traced: dict[str, TracedStep] = field(default_factory=dict)
    share: float = 1.0
    leaves: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)
    alive: list[list[Callable[[], bool]]] = field(default_factory=list)
    released: dict[CapturedGraph, frozenset[int]] = field(default_factory=dict)
    tracing: CapturedGraph | None = None
    stable: bool = False
    at_units_alone: bool = False
    inputs: FadingInputs = field(default_factory=FadingInputs)
    use: OutputUse = field(default_factory=OutputUse)
    sharding: Sharding | None = None
    sharded: Callable[[Fsdp], Sharding] | None = None

    def visit(self, graph: CapturedGraph, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run a graph without gradients, in place of planning it; for a device that is not here, on paper."""
        with nullcontext() if self.context.settings.spec is None else no_modes():
            return self._visit(graph, args)

    def _run(self, module: fx.GraphModule, args: Sequence[Any]) -> Any:
        spec = self.context.settings.spec
        return module(*args) if spec is None else unread_results(module, args, {}, spec.rounded)

    def _visit(self, graph: CapturedGraph, args: Sequence[Any]) -> tuple[Any, ...]:
        known = graph.unplanned
        assert known is not None
        if self.recorder is not None:
            self._trace(graph)
        self.ran.append(graph)
        self.units.append(graph.unit)
        self.calls.append(graph.call)
        self.breaks.append(known.ending)
        tensors = {n: original(each) for n, each in enumerate(args) if isinstance(each, torch.Tensor)}
        self.given.update(id(each) for each in tensors.values() if not isinstance(each, nn.Parameter))
        self.parameters.append({n: id(each) for n, each in tensors.items() if isinstance(each, nn.Parameter)})
        if self.recorder is not None:
            self.recorder.enter(args, self._going(graph))
        else:
            self.use.enter(args)
            self.inputs.enter(graph, args)
        with torch.no_grad():
            outputs = tuple(map(_as_in_training, self._run(known.module, args), known.differentiable))
        if self.recorder is not None:
            self.recorder.leave(outputs)
        else:
            self.alive.append([_reference(each) for each in outputs])
            self.use.leave(graph, outputs)
            self.inputs.leave(outputs)
        return outputs

    def _look(self, run: Callable[[], Any], *, again: bool = False) -> tuple[Unread, bool]:
        """Run the forward, and note which outputs no loss is made of, and which are gone after it.

        Those count as gone that are so where the caller alone is left, in each run of their graph. What the
        model leaves in cycles is there until Python's collector runs, and counts as held; what capturing
        leaves there is garbage, and holds nothing in training. Returns whether the collector has freed
        outputs, so that it has to be looked ``again``: without capturing, and with the collector off.
        """
        self._forget_path()
        with noting_freed(self._held) as freed:
            returned = run()
            unread = self.use.unread(returned, self.context.settings)
            self.leaves |= self.use.leaves
            for graph, fading in self.inputs.found().items():  # while what autograd has saved is there
                self.going[graph] = fading.or_as(self.going.get(graph))
            self.inputs = FadingInputs()
            kept = [each.detach() for each in outputs_in_backward(returned, self.context.settings)]
            del returned
            if self._held() and not again:
                gc.collect()
        for graph, outputs in zip(self.ran, self.alive, strict=True):
            gone = frozenset(place for place, is_there in enumerate(outputs) if not is_there())
            self.released[graph] = gone & self.released.get(graph, gone)
        del kept
        return unread, bool(freed)

    def _held(self) -> int:
        """The number of outputs of the graphs that have run that are still there."""
        return sum(is_there() for outputs in self.alive for is_there in outputs)

    def _plan_graphs(self) -> None:
        """Compute the frontiers of the graphs that are new.

        Gradients of shared parameters do not leave early: autograd adds them up first.
        """
        uses = Counter(number for graph in self.ran for number in graph.parameters.values())
        self.shared |= {n for n, runs in uses.items() if runs > 1 or n in self.use.leaves}
        distinct = dict.fromkeys(self.ran)
        self.share = 1 / len(distinct) if distinct else 1.0
        for graph in distinct:
            self._trace(graph)

    def _trace(self, graph: CapturedGraph) -> None:
        if not graph.key:
            graph.keep_gradients_of(self.shared)
            self.tracing = graph
            graph.plan()  # asks choose, and gets no schedule
            graph.key, self.tracing = self.latest, None

    @property
    def released_outputs(self) -> dict[str, frozenset[int]]:
        """By fingerprint, the values of outputs that are gone on this path when their backward runs."""
        return {key: step.graph.released_outputs for key, step in self.traced.items()}

    @property
    def order(self) -> list[str]:
        """Fingerprints in the order in which the graphs ran; empty for those that have not been traced."""
        return [graph.key for graph in self.ran]

    def choose(self, traced: TracedStep) -> Chosen:
        """Compute the frontier of a graph, which is not planned yet.

        Raises
        ------
        CaptureComplete
            When it is known.
        NewPathError
            If the graph is new in the run that measures: its kernels cannot be measured then.
        """
        step = with_policy_fingerprint(traced, self.context)
        key = step.graph.fingerprint
        if key not in self.traced:
            if self.recorder is not None:
                raise NewPathError("another path")
            step, timings = costed(step, self.context)
            self.traced[key] = self._releasing(step)
            if key not in self.frontiers:
                self._plan(key, timings, step.graph)
        self.latest = key
        raise CaptureComplete

    def _releasing(self, step: TracedStep) -> TracedStep:
        """The step without the outputs that are gone in its backward, unless it has others than the model."""
        graph = self.tracing
        if graph is None or graph.unplanned is None:
            return step
        if step.num_outputs != len(graph.unplanned.differentiable):
            return step
        step = releasing(step, self.released.get(graph, ()))
        held = sum(step.graph.values[value].bytes for value in step.graph.held_outputs)
        self.staying[step.graph.fingerprint] = held
        return step

    @property
    def by_chunks(self) -> bool:
        """Whether a loss is made by chunks of rows."""
        return any(step.originals.whole is not None for step in self.traced.values())

    def _plan(self, key: str, timings: Timings, holding: JointGraph) -> None:
        """``holding``: the graph with all outputs held, as others read what it hands out."""
        try:
            resolve_policy(holding, self.context.settings.policy)
            self.frontiers[key] = path_frontier(self.traced[key], timings, self.context, share=self.share)
        except PolicyError as error:  # matters only if there are breaks: one graph holds fewer outputs
            self.refused = self.refused or error

    def run(self, trial: Callable[[], Trial], device: str, backend: Backend) -> None:
        """Trace the graphs that a backend captures and, if there are breaks, measure the code between them.

        Raises
        ------
        CaptureError
            If the model takes a path that is new each time it runs.
        """
        for _ in range(_TRIALS):
            reasons: list[str] = []
            with trial() as run, noting_breaks(reasons):
                unread, freed = self._look(run)
            self.broken = bool(reasons)
            if not self.has_breaks:
                return
            if self.at_units_alone and (own := [reason for reason in reasons if UNIT not in reason]):
                raise CaptureError(f"its graph breaks elsewhere, too: {own[0].splitlines()[0]}")
            if freed:
                with trial() as run, without_collection():
                    unread, _ = self._look(run, again=True)
            for graph in dict.fromkeys(self.ran):
                if graph.text not in backend.unread:
                    graph.leave_unread(unread.get(graph, ()))
            self._plan_graphs()
            captured = backend.graphs
            try:
                with trial() as run:
                    self._measure(run, device)
            except NewPathError:
                continue
            if not self.stable or backend.graphs == captured:
                return
        raise CaptureError(
            f"the forward took another path in each of {2 * _TRIALS} runs or more on the same inputs, with "
            "graphs that had not come before, so it cannot be planned. Keep what changes with every call (a "
            "counter, random numbers of Python's own) out of the branches and loops of the forward."
        )

    def _forget_path(self) -> None:
        self.ran.clear()
        self.units.clear()
        self.parameters.clear()
        self.calls.clear()
        self.breaks.clear()
        self.alive.clear()
        self.use, self.inputs = OutputUse(), FadingInputs()

    def _measure(self, run: Callable[[], Any], device: str) -> None:
        """Run once more; the survey keeps the path of this run."""
        self._forget_path()
        self.recorder = EagerCodeRecorder(device)
        try:
            self.eager_code, passing = measure_eager_code(
                self.recorder, lambda: outputs_in_backward(run(), self.context.settings)
            )
            self.joined_bytes, self.nodes = self.recorder.joined_bytes, self.recorder.nodes
            every: dict[str, set[int]] = {}
            for key, places in zip(self.order, passing, strict=True):
                every[key] = every.get(key, places) & places
            self.passing = {key: gradients_at(self.traced[key], every[key]) for key in every}
            if self.context.settings.sharding is None:
                self._add_up_gradients()
            self._note_dropped(self.recorder.unsaved)
            for graph in self.ran:
                values = values_by_input(self.traced[graph.key], self._going(graph)).values()
                self.fading[graph.key] = frozenset[int]().union(*values)
        finally:
            self.recorder = None

    def _add_up_gradients(self) -> None:
        """Count gradients of a parameter that several runs make once: autograd adds them to the first."""
        there: set[int] = set()
        for place, key in reversed(list(enumerate(self.order))):
            step, added = self.traced[key], 0
            for number, parameter in self.parameters[place].items():
                made = gradients_at(step, {number})
                added += sum(step.graph.values[each].bytes for each in made if parameter in there)
                there |= {parameter} if made else set()
            if added:
                code = self.eager_code[place] or StepPart((PartPoint(0, 0, 0, time=0),), 0)
                self.eager_code[place] = replace(code, gradient_bytes=code.gradient_bytes - added)

    def _note_dropped(self, unsaved: Sequence[Collection[int]]) -> None:
        """Note the released outputs that are gone with the forward: nothing has saved them."""
        places: dict[str, set[int]] = {}
        for graph, gone in zip(self.ran, unsaved, strict=True):
            here = set(gone) & self.released.get(graph, frozenset())
            places[graph.key] = places.get(graph.key, here) & here
        for key, gone in places.items():
            step = self.traced[key]
            values = values_of_outputs(step, gone) & step.graph.released_outputs if gone else ()
            self.dropped[key] = frozenset(values)

    def _going(self, graph: CapturedGraph) -> frozenset[int]:
        """The places of inputs that a graph, or an equal one, counts as its own if its backward reads them.

        Those that it reads in the plain step are counted twice where others hold them, too.
        """
        fading = None
        for each, places in self.going.items():
            fading = places.or_as(fading) if each.key == graph.key else fading
        if fading is None:
            return frozenset()
        read = inputs_read(joint := self.traced[graph.key].graph, plain_schedule(joint))
        kept = values_by_input(self.traced[graph.key], fading.ever)
        return fading.always | {place for place, values in kept.items() if read.isdisjoint(values)}

    @property
    def writes_unseen(self) -> bool:
        """Whether code between graphs changes the model's tensors so that only a copy tells.

        What graphs change can be told in training: they write it back then.
        """
        return not self.unseen <= self.given

    @property
    def has_breaks(self) -> bool:
        """Whether the step is anything but one graph; a break before the first one is after none."""
        several = bool(self.context.settings.units) or self.broken or len(self.ran) > 1
        return several or any(ending is not None for ending in self.breaks)


def path_frontier(
    step: TracedStep,
    timings: Timings,
    context: PlanContext,
    *,
    reuse: bool | None = None,
    seconds: float | None = None,
    share: float = 1.0,
) -> GraphFrontier:
    """The frontier of one of several graphs; in training, options of other shapes are reused.

    Searches go as far as that can be won back, or so many ``seconds`` of a nominal core. ``share``: of a
    planning budget's time.
    """
    reuse = len(context.store) > 0 if reuse is None else reuse
    given = context.given is not None and not len(context.store)  # a plan that says how it runs
    return step_frontier(
        step,
        timings,
        context,
        reuse=reuse,
        bounded=True,
        seconds=seconds,
        alone=False,
        share=share,
        searched=not given,
    )


def _reference(output: object) -> Callable[[], bool]:
    return storage_reference(output) if isinstance(output, torch.Tensor) else lambda: True


def _as_in_training(output: Any, differentiable: bool) -> Any:
    """The output, requiring a gradient if it would in training.

    A view that is made without gradients says that it requires one, and has no history.
    """
    if not differentiable or output.grad_fn is not None:
        return output
    return output if output.requires_grad and not output._is_view() else non_leaf(output)
