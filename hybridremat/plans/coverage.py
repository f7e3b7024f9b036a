"""What a plan file tells of a step at other sizes than its own: which, and the schedules that run there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridremat.graph.joint import Schedule
from hybridremat.graph.sizes import Domain
from hybridremat.plans.origin import Origin, TensorSpec, origin_differences
from hybridremat.plans.sizes import Place, SizeRow


@dataclass(frozen=True)
class KnownSchedule:
    """A schedule of a step at all of its sizes.

    Attributes
    ----------
    schedule
        Its executions.
    parted
        The ops that run by parts, where the sizes allow that, each with the kernel that does.
    """

    schedule: Schedule
    parted: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Coverage:
    """The sizes that the schedules of a plan are for, by name.

    Attributes
    ----------
    own
        The sizes of the plan.
    places
        The dimensions of inputs that each of them is; all others are as in the plan.
    domain
        The sizes that one capture is right for, in these names.
    rows
        The step at sizes at which it was planned.
    schedules
        All that ran at one of them, and more of what was found on the way.
    """

    own: Mapping[str, int]
    places: Mapping[str, tuple[Place, ...]]
    domain: Domain
    rows: tuple[SizeRow, ...]
    schedules: tuple[KnownSchedule, ...]

    def sizes_of(self, planned: Origin, inputs: Sequence[TensorSpec]) -> dict[str, int] | None:
        """The sizes of inputs to a plan's step; None if they are others, or not covered."""
        found = self._sizes_in(planned, inputs)
        return None if found is None or self.domain.refused(found) else found

    def differences(self, planned: Origin, here: Origin) -> list[str]:
        """How a step differs in words from that of a plan, but for sizes that are covered."""
        found = self._sizes_in(planned, here.inputs)
        if found is None:
            return origin_differences(planned, here)
        outside = (f"its schedules are for other sizes: {each}" for each in self.domain.refused(found))
        return [*origin_differences(with_sizes(planned, self.places, found), here), *outside]

    def _sizes_in(self, planned: Origin, inputs: Sequence[TensorSpec]) -> dict[str, int] | None:
        """The sizes of inputs, if they are those of a plan but for these."""
        if len(inputs) != len(planned.inputs):
            return None
        try:
            found = {name: inputs[places[0][0]].shape[places[0][1]] for name, places in self.places.items()}
        except IndexError:
            return None
        return found if with_sizes(planned, self.places, found).inputs == tuple(inputs) else None

    def knowing(self, own: Mapping[str, int], rows: Iterable[SizeRow]) -> Coverage:
        """The same at other sizes, with what is known of more of them."""
        every = {tuple(row.sizes[name] for name in own): row for row in (*self.rows, *rows)}
        return replace(self, own=own, rows=tuple(every[key] for key in sorted(every)))

    @property
    def ranges(self) -> dict[str, str]:
        """The sizes of each name in words: ``"2 to 512"``."""

        def text(least: int | None, most: int | None) -> str:
            return f"from {least or 1}" if most is None else f"{least or 1} to {most}"

        return {name: text(*self.domain.ranges[name]) for name in self.own}


def with_sizes(origin: Origin, places: Mapping[str, Sequence[Place]], sizes: Mapping[str, int]) -> Origin:
    """The record of a plan with inputs of other sizes."""
    inputs = list(origin.inputs)
    for name, dimensions in places.items():
        for number, dim in dimensions:
            shape = list(inputs[number].shape)
            shape[dim] = sizes[name]
            inputs[number] = replace(inputs[number], shape=tuple(shape))
    return replace(origin, inputs=tuple(inputs))
