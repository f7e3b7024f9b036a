"""The steps of a wrapped model that are captured once for many input sizes (``dynamic=``).

The first shape is captured as it is, unless all are asked for with symbols; the second one with symbols for
what differs between them. Sizes that a capture is not right for need one more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from hybridremat.errors import (
    CaptureError,
    HybridRematError,
    InfeasibleLimitError,
    InputError,
    ModelError,
    PlanMismatchError,
    PolicyError,
    ProfilerActiveError,
)
from hybridremat.planning.context import PlanContext
from hybridremat.planning.input_keys import (
    Shapes,
    conditions,
    every_dimension,
    has_gaps,
    has_idle_strides,
    plain_state,
    ranks_key,
    shape_text,
    shapes_of,
)
from hybridremat.planning.origin import origin_of
from hybridremat.planning.pipeline import Step, at_step
from hybridremat.planning.progress import say
from hybridremat.plans.sizes import dimension_names, equal_dimensions

if TYPE_CHECKING:
    from hybridremat.planning.sized_capture import SizedCapture
    from hybridremat.reports.size_curve import SizeCurve

logger = logging.getLogger(__name__)

MOST_CAPTURES: Final = 8
"""Captures of inputs that differ in sizes alone; from then on each shape is planned by itself."""


@dataclass
class _Family:
    """Calls that differ in sizes alone, in one state of the model.

    ``first``: the shapes of the first one; ``varied``: dimensions that have had several sizes; ``failed``:
    why the last one was not captured for all sizes; ``alone``: whether each shape is planned by itself.
    """

    first: Shapes
    varied: set[tuple[int, int]] = field(default_factory=set)
    captures: list[SizedCapture] = field(default_factory=list)
    states: dict[int, Hashable] = field(default_factory=dict)  # plain values that captures were made with
    steps: dict[Shapes, Step] = field(default_factory=dict)
    failed: str = ""
    alone: bool = False

    def note(self, shapes: Shapes) -> None:
        """Note which dimensions differ from the first call's."""
        for number, (one, other) in enumerate(zip(self.first, shapes, strict=True)):
            pairs = enumerate(zip(one or (), other or (), strict=True))
            self.varied.update((number, dim) for dim, (size, its) in pairs if size != its)


class AllSizes:
    """Plans the steps of one model at all sizes of its inputs."""

    def __init__(self, model: nn.Module, *, show: bool = False) -> None:
        self._model, self._show = model, show
        self._families: dict[Hashable, _Family] = {}

    def forgetting(self) -> AllSizes:
        """The same without any step."""
        return AllSizes(self._model, show=self._show)

    @property
    def captures(self) -> int:
        """Graphs that were captured and sizes that were planned."""
        families = self._families.values()
        graphs = sum(each.backend.graphs for family in families for each in family.captures)
        return graphs + sum(len(family.steps) for family in families)

    def counts(self) -> tuple[int, int]:
        """How many captures with symbols there are, and how many schedules they run."""
        captures = [each for family in self._families.values() for each in family.captures]
        made = [each.partition.portfolio for each in captures]
        return len(captures), sum(len(each.members) for each in made if each is not None)

    def known(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
        """The step of a call whose sizes are planned already; None if they are not."""
        family = self._families.get(self._key(args, kwargs))
        return None if family is None else family.steps.get(shapes_of(args, kwargs))

    def step(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], context: PlanContext
    ) -> Step | None:
        """The step of a call, planned at its sizes; None if this shape is to be planned by itself.

        Raises
        ------
        HybridRematError
            As planning; CaptureError also where symbols are asked for, and the step cannot have them.
        """
        asked, shapes = context.settings.dynamic, shapes_of(args, kwargs)
        family = self._families.setdefault(self._key(args, kwargs), _Family(shapes))
        family.note(shapes)
        family.failed = ""
        if family.alone or (asked is None and (shapes == family.first or not family.varied)):
            return None
        if context.settings.one_capture_refused() or has_idle_strides(args, kwargs):
            return None
        if has_gaps(args, kwargs):
            why = "an input has gaps between its elements, as a slice has: pass tensor.contiguous()."
            if asked:
                raise self._refusal(why)
            family.failed = why
            return None
        for capture in family.captures:
            if (sizes := capture.sizes_of(shapes)) is not None:
                try:
                    with at_step(self._model, args, kwargs, context, show=self._show) as here:
                        fingerprint = capture.plan(sizes, here)
                except InfeasibleLimitError:
                    if family.states[id(capture)] == plain_state(self._model):
                        raise
                    continue  # another graph may be captured by now
                return self._kept(family, shapes, capture, fingerprint)
        return self._captured(family, shapes, args, kwargs, context)

    def curve(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Sequence[Mapping[str, int]],
        context: PlanContext,
    ) -> SizeCurve:
        """Plan at sizes by name, from one capture that has symbols for these; sample inputs tell the others.

        Raises
        ------
        InputError
            If a name is none of the inputs', or a size cannot be a symbol or needs a capture of its own.
        HybridRematError
            As planning; InfeasibleLimitError, once all others are planned, if some do not fit.
        """
        capture = self._with_symbols(args, kwargs, {name for each in sizes for name in each}, context)
        rows = capture.elsewhere(shapes_of(args, kwargs), context).rows(sizes)
        if tight := [row for row in rows if row.needed is None]:
            most = max(tight, key=lambda row: row.least or 0)
            raise InfeasibleLimitError(
                f"{len(tight)} of {len(rows)} sizes do not fit memory_limit {most.memory_limit}: most is "
                f"needed at {most.text}, {most.least} bytes at least. The others are planned. Raise the "
                'limit, leave these sizes out, or pass on_infeasible="least".',
                limit=most.memory_limit or 0,
                least=most.least or 0,
            )
        from hybridremat.reports.size_curve import SizeCurve

        return SizeCurve(tuple(rows))

    def _with_symbols(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], names: set[str], context: PlanContext
    ) -> SizedCapture:
        """A capture that has symbols for sizes by these names, and is right for these inputs."""
        shapes, inputs = shapes_of(args, kwargs), origin_of(self._model, args, kwargs).inputs
        named = dimension_names(equal_dimensions(inputs), inputs)
        if unknown := sorted(names - named.keys()):
            raise InputError(
                f"{unknown[0]!r} is no size of these inputs: there are {', '.join(named)}. Dimensions of "
                "size 1 have no name, and those that are equal share one: pass inputs in which sizes that "
                "are to differ do"
            )
        family = self._families.setdefault(self._key(args, kwargs), _Family(shapes))
        for capture in family.captures:
            if names <= capture.names.keys() and capture.sizes_of(shapes) is not None:
                return capture
        tensors = [number for number, shape in enumerate(shapes) if shape is not None]
        family.varied.update((tensors[n], dim) for name in names for n, dim in named[name])
        family.failed = ""
        if self._captured(family, shapes, args, kwargs, context) is None:
            raise self._refusal(family.failed or "PyTorch makes numbers of its sizes.")
        return family.captures[-1]

    def planned_alone(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Plan each further shape by itself if this one could be, and could not be captured for all sizes.

        A first forward that puts other layers into the model leaves it in a state that nothing is known of.
        """
        family = self._families.get(self._key(args, kwargs))
        if family is not None and family.failed and not family.alone:
            family.alone = True
            logger.warning(
                "%s is captured and planned for each input shape by itself: %s", self._name, family.failed
            )

    def _captured(
        self,
        family: _Family,
        shapes: Shapes,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        context: PlanContext,
    ) -> Step | None:
        """The step of a call that needs a capture of its own."""
        if len(family.captures) == MOST_CAPTURES:
            family.failed = f"it was captured {MOST_CAPTURES} times for inputs of other sizes"
            return None
        asked, dimensions = context.settings.dynamic, _symbols(family, shapes, context.settings.dynamic)
        if not dimensions:
            return None
        if family.captures:
            logger.info("%s is captured once more: no capture is right for %s", self._name, shapes)
        from hybridremat.planning.sized_capture import capture_sizes  # not where all inputs have one shape

        started = time.perf_counter()
        try:
            made = capture_sizes(self._model, args, kwargs, dimensions, context, show=self._show)
        except (InfeasibleLimitError, ModelError, PlanMismatchError, PolicyError, ProfilerActiveError):
            raise
        except HybridRematError as error:
            if asked:
                raise self._refusal(str(error)) from error
            family.failed = str(error)
            return None
        if made is None:
            why = "its graph is another one at each of these sizes, so that PyTorch makes numbers of them."
            if asked and all(min(shape or (2,), default=2) > 1 for shape in shapes):
                raise self._refusal(why)
            family.failed = why if not asked else ""
            return None
        family.captures.append(made)
        family.states[id(made)] = plain_state(self._model)
        taken = time.perf_counter() - started
        say(f"new shape {shape_text(args, kwargs)}: captured for all sizes in {taken:.1f} s", show=self._show)
        if made.refused is not None:
            raise made.refused.fresh()
        sizes = made.sizes_of(shapes)
        assert sizes is not None
        return self._kept(family, shapes, made, made.keep_current(sizes, context))

    def _kept(
        self, family: _Family, shapes: Shapes, capture: SizedCapture, fingerprint: str | None
    ) -> Step:
        family.steps[shapes] = Step(capture.backend, capture.compiled, fingerprint)
        return family.steps[shapes]

    def _refusal(self, why: str) -> CaptureError:
        return CaptureError(
            f"{self._name} cannot be captured for all sizes of its inputs: {why} Pass dynamic=False, and "
            "each shape is captured by itself."
        )

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        return ranks_key(args, kwargs), conditions(self._model)


def _symbols(family: _Family, shapes: Shapes, asked: bool | None) -> dict[int, tuple[int, ...]]:
    """The dimensions that are symbols: those that vary, or all, but those of size 0 and 1.

    PyTorch makes numbers of these. None at all where two that vary apart have one size here: they would
    be one symbol.
    """
    every = every_dimension(shapes)
    if asked:
        return every
    found: dict[int, tuple[int, ...]] = {}
    firsts: dict[int, int] = {}
    for number, dims in every.items():
        varied = tuple(dim for dim in dims if (number, dim) in family.varied)
        for dim in varied:
            size, its = (shapes[number] or ())[dim], (family.first[number] or ())[dim]
            if firsts.setdefault(size, its) != its:
                return {}
        if varied:
            found[number] = varied
    return found
