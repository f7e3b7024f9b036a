"""The plans of a capture with symbols at sizes for which there are no inputs: by the names of the sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from hybridremat.errors import InfeasibleLimitError, InputError
from hybridremat.graph.joint import JointGraph
from hybridremat.graph.sizes import Domain, Sizes
from hybridremat.planning.context import PlanContext
from hybridremat.planning.other_sizes import known_for
from hybridremat.planning.plan import Plan
from hybridremat.plans.coverage import Coverage, KnownSchedule, with_sizes
from hybridremat.plans.origin import Origin
from hybridremat.plans.plan_data import PlanData, row_of
from hybridremat.plans.sizes import Place, SizeRow, require_sizes


class Capture(Protocol):
    """What is asked of a capture (:class:`~hybridremat.planning.sized_capture.SizedCapture`)."""

    @property
    def names(self) -> Mapping[str, str]:
        """By name of a size, its symbol."""
        ...

    @property
    def origin(self) -> Origin:
        """What was captured."""
        ...

    @property
    def rows(self) -> dict[tuple[int, ...], SizeRow]:
        """What is known of sizes that were planned, by their numbers in the order of ``names``."""
        ...

    @property
    def tensor_places(self) -> Mapping[str, Sequence[Place]]:
        """By the name of a symbol, its dimensions of inputs, counted among those that are tensors."""
        ...

    def refused_at(self, sizes: Sizes) -> Sequence[str]:
        """Why some sizes need a capture of their own; empty if they do not."""
        ...

    @property
    def domain(self) -> Domain:
        """The sizes that it is right for, by their names."""
        ...

    def plan(self, sizes: Sizes, context: PlanContext) -> object:
        """Plan at some sizes; the plan becomes the current one of the context's store."""
        ...

    @property
    def given(self) -> Plan | None:
        """A plan of the caller that is for its sizes."""
        ...

    def schedules(self, graph: JointGraph) -> Iterable[KnownSchedule]:
        """The schedules that are known, of a graph of the step at some sizes; none where each is searched."""
        ...


@dataclass(frozen=True)
class PlannedElsewhere:
    """A capture at sizes by name (:class:`~hybridremat.plans.sizes.OtherSizes`).

    ``context`` is that of the model; ``own`` are the sizes of the plan that this belongs to. If it is only
    ``looking``, a limit that is a share stays what it is for the sizes of training.
    """

    capture: Capture
    context: PlanContext
    own: Mapping[str, int]
    looking: bool = True

    def plan(self, sizes: Mapping[str, int]) -> Plan:
        """The plan at other sizes; the model's current plan stays. Raises as :meth:`Plan.at`."""
        numbers = self.numbers(sizes)
        with self._current_kept():
            self.capture.plan(numbers, self.context_at(numbers))
            made = self.context.store.current
        assert made is not None
        return made

    def rows(self, every: Sequence[Mapping[str, int]]) -> list[SizeRow]:
        """The step at many sizes. Raises as :meth:`plan`, but where nothing fits.

        The largest come first: where they are going to run, a share is that of the largest so far.
        """
        order = sorted(range(len(every)), key=lambda n: -prod({**self.own, **every[n]}.values()))
        found = {number: self._row(every[number]) for number in order}
        return [found[number] for number in range(len(every))]

    def _row(self, sizes: Mapping[str, int]) -> SizeRow:
        key = tuple({**self.own, **sizes}.values())
        if key not in self.capture.rows:
            try:
                self.plan(sizes)
            except InfeasibleLimitError as error:
                return SizeRow({**self.own, **sizes}, error.limit, None, None, None, error.least)
        return self.capture.rows[key]

    def known(self) -> Sequence[SizeRow]:
        """All sizes that have been planned, in order."""
        return [self.capture.rows[key] for key in sorted(self.capture.rows)]

    def coverage(self, plan: PlanData) -> Coverage | None:
        """What is known of the sizes by now, for the file of a plan at its own; None if that is nothing."""
        assert plan.details is not None
        graph, places = plan.details.graph, self.capture.tensor_places
        made = Coverage(
            dict(self.own),
            {name: tuple(places[symbol]) for name, symbol in self.capture.names.items()},
            self.capture.domain,
            (),
            tuple(self.capture.schedules(graph)),
        )
        if not made.schedules:
            return None
        found, schedules = dict(self.capture.rows), dict.fromkeys(made.schedules)
        for other in self.context.store.whole():  # such as that of the first shape, captured as it is
            sizes = made.sizes_of(plan.origin, other.origin.inputs)
            if sizes is None or other.details is None:
                continue
            for known in known_for(other.details.graph, other.schedule, graph):
                schedules.setdefault(known)
                found.setdefault(tuple(sizes.values()), row_of(other, sizes))
        given = self.capture.given
        before = given.coverage.rows if given is not None and given.coverage is not None else ()
        made = replace(made, rows=before, schedules=tuple(schedules))
        return made.knowing(made.own, found.values())

    def numbers(self, sizes: Mapping[str, int]) -> Sizes:
        """The sizes by the names of symbols.

        Raises
        ------
        InputError
            If a name is not known, a size is no whole number above 0, or the capture is not right for them.
        """
        if unknown := [name for name in sizes if name not in self.own]:
            raise InputError(
                f"{unknown[0]!r} is no size that may differ: one capture of this step is planned for "
                f"{', '.join(self.own) or 'no others'}. Further dimensions are symbols once inputs have met "
                "the model in which they differ, or with hybridremat.prepare(…, sizes=[…])"
            )
        require_sizes(sizes)
        numbers = {self.capture.names[name]: size for name, size in {**self.own, **sizes}.items()}
        if refused := self.capture.refused_at(numbers):
            raise InputError(
                f"{_text(sizes)} needs a capture of its own ({'; '.join(refused)}): pass "
                "inputs of these sizes to plan or prepare"
            )
        return numbers

    def context_at(self, numbers: Sizes) -> PlanContext:
        """The context of the step at some sizes."""
        return self.context.at(with_sizes(self.capture.origin, self.capture.tensor_places, numbers))

    @contextmanager
    def _current_kept(self) -> Iterator[None]:
        store = self.context.store
        before, granted = store.current, store.granted
        try:
            yield
        finally:
            store.use(before.fingerprint if before is not None else None)
            if self.looking:
                store.granted = granted

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return no_sizes, ()


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def no_sizes() -> None:
    """What a plan or frontier that is copied or sent knows of other sizes."""
