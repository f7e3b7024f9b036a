"""A step that is captured once with symbols for sizes, and planned at each size when it first comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hybridremat.compiler.backend import Backend, CapturedGraph
from hybridremat.compiler.capture import capture, compile_step, model_device, translated_errors
from hybridremat.compiler.dynamic_inputs import Dimensions, sample_with_symbols
from hybridremat.compiler.frame_room import with_room
from hybridremat.compiler.library_workspaces import keep_workspaces
from hybridremat.compiler.model_checks import require_capturable
from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import JointGraph
from hybridremat.graph.sizes import Domain, Sizes
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.chosen import Choose
from hybridremat.planning.context import PlanContext
from hybridremat.planning.input_keys import Shapes, shapes_of
from hybridremat.planning.other_plans import PlannedElsewhere
from hybridremat.planning.pipeline import at_step, backend_of, rewriting_of
from hybridremat.planning.plan import Plan
from hybridremat.planning.progress import no_progress
from hybridremat.planning.size_choice import SizeChoice
from hybridremat.planning.symbolic_partition import SymbolicPartition
from hybridremat.plans.coverage import KnownSchedule
from hybridremat.plans.origin import Origin
from hybridremat.plans.plan_data import row_of
from hybridremat.plans.sizes import Place, SizeRow, dimension_names


@dataclass(frozen=True)
class SizedCapture:
    """A step with symbols for sizes.

    Attributes
    ----------
    model
        The model.
    backend, compiled
        As those of :class:`~hybridremat.planning.pipeline.Step`.
    graph
        What is compiled once the first sizes are planned.
    partition
        Has the schedules.
    choice
        Chooses among them.
    shapes
        Those of the sample.
    places
        By the name of a symbol, the dimensions of inputs that it is: (input, dimension). All others are as in
        the sample.
    names
        By name of a size (:func:`~hybridremat.plans.sizes.dimension_names`), its symbol.
    origin
        What was captured.
    refused
        Why the sizes of the sample could not be planned; others may be.
    rows
        What is known of sizes that were planned, by their numbers in the order of ``names``.
    """

    model: nn.Module
    backend: Backend
    compiled: Callable[..., Any]
    graph: CapturedGraph
    partition: SymbolicPartition
    choice: SizeChoice
    shapes: Shapes
    places: Mapping[str, tuple[tuple[int, int], ...]]
    names: Mapping[str, str]
    origin: Origin
    refused: InfeasibleLimitError | None = None
    rows: dict[tuple[int, ...], SizeRow] = field(default_factory=dict)

    @property
    def tensor_places(self) -> dict[str, tuple[Place, ...]]:
        """By the name of a symbol, its dimensions of inputs, counted among those that are tensors."""
        return _among_tensors(self.places, self.shapes)

    @property
    def domain(self) -> Domain:
        """The sizes that it is right for, by their names."""
        assert self.partition.portfolio is not None
        names = {symbol: name for name, symbol in self.names.items()}
        return self.partition.portfolio.steps.joint.domain.renamed(names)

    @property
    def given(self) -> Plan | None:
        """A plan of the caller that is for its sizes."""
        return self.choice.given

    def schedules(self, graph: JointGraph) -> list[KnownSchedule]:
        """The schedules that are known, of a graph of the step at some sizes; none where each is searched."""
        return self.choice.schedules(graph) if self.choice.covers else []

    def refused_at(self, sizes: Sizes) -> tuple[str, ...]:
        """Why some sizes need a capture of their own; empty if they do not."""
        assert self.partition.portfolio is not None
        return self.partition.portfolio.steps.joint.domain.refused(sizes)

    def elsewhere(self, shapes: Shapes, context: PlanContext) -> PlannedElsewhere:
        """The capture at sizes by name; those not given are of inputs of these shapes, which suit it.

        They are going to run: a limit that is a share is that of the largest of them.
        """
        sizes = self.sizes_of(shapes)
        assert sizes is not None
        return replace(self._elsewhere(self._named(sizes), context), looking=False)

    def _elsewhere(self, own: Mapping[str, int], context: PlanContext) -> PlannedElsewhere:
        return PlannedElsewhere(self, replace(context, progress=no_progress), own)

    def _named(self, sizes: Sizes) -> dict[str, int]:
        return {name: sizes[symbol] for name, symbol in self.names.items()}

    def sizes_of(self, shapes: Shapes) -> Sizes | None:
        """The sizes that inputs of some shapes have; None if they need a capture of their own."""
        assert self.partition.portfolio is not None
        named = {place: name for name, places in self.places.items() for place in places}
        found: dict[str, int] = {}
        for number, (shape, known) in enumerate(zip(shapes, self.shapes, strict=True)):
            for dim, size in enumerate(shape or ()):
                name = named.get((number, dim))
                wanted = (known or ())[dim] if name is None else found.setdefault(name, size)
                if size != wanted:
                    return None
        return None if self.refused_at(found) else found

    @prompt_interrupts()
    @with_room
    def plan(self, sizes: Sizes, context: PlanContext) -> str | None:
        """Plan for sizes of the capture, in the context of a call; the fingerprint of the plan.

        Raises
        ------
        HybridRematError
            As planning.
        """
        portfolio, started = self.partition.portfolio, time.perf_counter()
        assert portfolio is not None
        with portfolio.lock:
            self.choice.context = context
            portfolio.begin(sizes)
            if (plan := context.store.current) is not None and plan.details is None:
                portfolio.choose_again(sizes)
        if self.backend.build:  # else it is captured, and no more
            with translated_errors(self.model, self.backend):
                self.graph.plan()
        context.store.note_total(time.perf_counter() - started)
        return self.keep_current(sizes, context)

    def keep_current(self, sizes: Sizes, context: PlanContext) -> str | None:
        """The fingerprint of the plan of some sizes that was made last, which is kept with its capture.

        Its figures are kept as long as its step may run.
        """
        if (plan := context.store.current) is None:
            return None
        own = self._named(sizes)
        self.rows[tuple(own.values())] = row_of(plan, own)
        context.store.let_know(plan.fingerprint, self._elsewhere(own, context))
        context.store.keep_figures(plan.fingerprint)
        return plan.fingerprint


@prompt_interrupts()
@with_room
def capture_sizes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dimensions: Dimensions,
    context: PlanContext,
    *,
    show: bool = False,
    choose: Choose | None = None,
) -> SizedCapture | None:
    """Capture a step with symbols for some dimensions of these inputs, and plan it for their sizes.

    None if PyTorch makes numbers of all of them. ``choose`` is called in place of planning.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.wrap`, but for a limit in which nothing fits at these sizes.
    """
    require_capturable(model)
    started, refused = time.perf_counter(), None
    with at_step(model, args, kwargs, context, show=show) as context:
        choice = SizeChoice(context)
        partition = SymbolicPartition(
            choose or choice, rewriting_of(context.settings), most=context.settings.max_plans
        )
        backend = backend_of(context.settings, partition, build=context.build, dynamic=True)
        compiled = compile_step(model, backend)
        given, named = sample_with_symbols(args, kwargs, dimensions)
        graph = capture(model, compiled, backend, given, named)
        if graph is None:
            return None
        try:
            with translated_errors(model, backend):
                graph.plan()
        except InfeasibleLimitError as error:
            refused = error.fresh()
    keep_workspaces(model_device(model))
    if partition.portfolio is None:
        return None
    context.store.note_total(time.perf_counter() - started, backend.compile_seconds)
    shapes = shapes_of(args, kwargs)
    places = _places(partition.portfolio.steps.joint.sample, shapes, dimensions)
    if not all(places.values()):  # a stride, for one, is a symbol of its own
        return None
    groups = {places: symbol for symbol, places in _among_tensors(places, shapes).items()}
    names = {name: groups[each] for name, each in dimension_names(groups, context.origin.inputs).items()}
    return SizedCapture(
        model, backend, compiled, graph, partition, choice, shapes, places, names, context.origin, refused
    )


def _among_tensors(
    places: Mapping[str, tuple[Place, ...]], shapes: Shapes
) -> dict[str, tuple[Place, ...]]:
    tensors = [number for number, shape in enumerate(shapes) if shape is not None]
    numbers = {number: place for place, number in enumerate(tensors)}
    return {name: tuple((numbers[n], dim) for n, dim in each) for name, each in places.items()}


def _places(
    sample: Sizes, shapes: Shapes, dimensions: Dimensions
) -> dict[str, tuple[tuple[int, int], ...]]:
    """The dimensions that each symbol is: PyTorch makes those that are equal in the sample one symbol."""
    named = {size: name for name, size in sample.items()}
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in sample}
    for number, dims in dimensions.items():
        for dim in dims:
            size = (shapes[number] or ())[dim]
            if size in named:
                found[named[size]].append((number, dim))
    return {name: tuple(places) for name, places in found.items()}
