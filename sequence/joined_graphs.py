"""A step that comes in several graphs: one point of each graph's frontier, so that the whole step fits.

Graph breaks part a step into graphs that run one after the other, and backward in reverse. Nothing is
recomputed across a break, so the parts meet in memory alone. With F, B and S the forward peak, backward peak
and saved bytes of a part's point, and G its gradients, the step's peak is the most of

- forward of part i: F_i + Σ_{j<i} S_j
- backward of part i: B_i + Σ_{j<i} (S_j − D_j) + Σ_{j>i} G_j

where D are those of the saved bytes that are gone once the forward has returned: what its frames held, which
is counted where it was allocated, and the part's backward does not read. Code between graphs may free what
earlier parts have left (S below 0, D as well), such as what it has made for a graph: where the backward of
that graph reads it, it is in the graph's S and B.

With k forwards that wait for their backward at a time, k − 1 sets of saved bytes are there besides, and in
the backward the gradients of earlier ones, the largest once more while it is added up (as for one graph in
:mod:`hybridremat.sequence.outside_memory`). All of this is linear in the choice of points: a small problem
for CP-SAT, solved to optimality. Equal graphs (the layers of a Transformer with a break in each) may take
different points, but only a few: each point is compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hybridremat.graph.joint import PAGE
from hybridremat.sequence.outside_memory import Moment
from hybridremat.sequence.solving import solved

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExpr

EFFORT: Final = 60.0
"""CP-SAT's deterministic time for one choice; all that we have seen end in a small part of it."""

APART: Final = 1 << 20
"""Pages of host memory that are saved where they cost less than a nanosecond."""

VARIANTS: Final = 3
"""Points that graphs that are equal may take."""


@dataclass(frozen=True)
class PartPoint:
    """One way to run a part: bytes, and nanoseconds of all executions.

    ``retained``: of what the part drops when the forward has returned, the bytes its backward reads.
    ``host``: bytes of host memory that its moves take, whole pages.
    ``inputs``: of the saved bytes, inputs that nothing else holds in the backward, in whose peak they are;
    what code between graphs has freed of them is below 0.
    """

    forward_peak: int
    backward_peak: int
    saved: int
    time: int
    retained: int = 0
    host: int = 0
    inputs: int = 0


@dataclass(frozen=True)
class Beside:
    """Bytes that others hold while a part runs forward and backward."""

    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class StepPart:
    """A distinct graph of the step: its points, and the bytes of the gradients that its backward leaves.

    Below 0 it takes away what others have left.
    ``dropped`` are those of the saved bytes that are gone when the forward has returned, unless retained.
    """

    points: tuple[PartPoint, ...]
    gradient_bytes: int
    dropped: int = 0


def largest_part(parts: Sequence[StepPart]) -> StepPart:
    """A part with one point, at least as large as each of ``parts`` in each figure, which frees no inputs."""
    points = [point for part in parts for point in part.points]
    most = PartPoint(
        max(point.forward_peak - point.inputs for point in points),
        max(point.backward_peak for point in points),
        max(point.saved - point.inputs for point in points),
        time=0,
    )
    least = min(part.dropped - point.inputs for part in parts for point in part.points)
    return StepPart((most,), max(0, *(part.gradient_bytes for part in parts)), min(0, least))


def most_of(first: StepPart | None, second: StepPart | None) -> StepPart | None:
    """One piece of code between graphs with the most of two measurements; None: it allocates nothing."""
    if first == second:
        return first
    nothing = StepPart((PartPoint(0, 0, 0, time=0),), 0)
    parts = [each or nothing for each in (first, second)]
    points = [part.points[0] for part in parts]
    saved = max(point.saved for point in points)
    most = PartPoint(
        max(point.forward_peak for point in points),
        max(point.backward_peak for point in points),
        saved,
        time=0,
        inputs=min(point.inputs for point in points),
    )
    kept = max(part.points[0].saved - part.dropped for part in parts)
    return StepPart((most,), max(part.gradient_bytes for part in parts), saved - kept)


@dataclass(frozen=True)
class MultiGraphStep:
    """The distinct graphs of a step and the order in which their forwards run.

    ``joined_bytes`` are needed once in the backward to add up gradients of what several parts use.
    ``forwards`` wait for their backward at a time; ``largest_gradient`` (bytes) is added to an earlier one.
    ``host_limit``: bytes of host memory for the moves of all of them; None for any. ``others``: what is
    beside each of ``order``; empty for nothing.
    """

    parts: tuple[StepPart, ...]
    order: tuple[int, ...]
    joined_bytes: int = 0
    forwards: int = 1
    largest_gradient: int = 0
    host_limit: int | None = None
    others: tuple[Beside, ...] = ()

    @property
    def beside(self) -> tuple[Beside, ...]:
        """Bytes of others at each of ``order``."""
        return self.others or (Beside(),) * len(self.order)

    def host(self, chosen: Sequence[int]) -> int:
        """Bytes of host memory that the moves of one forward take."""
        return sum(self.parts[g].points[chosen[g]].host for g in self.order)

    def has_room(self, chosen: Sequence[int]) -> bool:
        """Whether the host memory is enough for the moves of all forwards that wait."""
        return self.host_limit is None or self.forwards * self.host(chosen) <= self.host_limit

    def time(self, chosen: Sequence[int]) -> int:
        """Nanoseconds of the step with ``chosen[g]`` the point of distinct graph g."""
        return sum(self.parts[g].points[chosen[g]].time for g in self.order)

    def peak(self, chosen: Sequence[int]) -> int:
        """Bytes that the step takes at most with ``chosen[g]`` the point of distinct graph g."""
        points = [self.parts[g].points[chosen[g]] for g in self.order]
        later, highest = sum(self.parts[g].gradient_bytes for g in self.order), 0
        gone = [self.parts[g].dropped - point.retained for g, point in zip(self.order, points, strict=True)]
        waiting = (self.forwards - 1) * (sum(point.saved for point in points) - sum(gone))
        before, kept, earlier = waiting, waiting, self.earlier_gradients
        for g, point, dropped, beside in zip(self.order, points, gone, self.beside, strict=True):
            later -= self.parts[g].gradient_bytes
            backward = kept + point.backward_peak + later + self.joined_bytes + earlier + beside.backward
            highest = max(highest, before + point.forward_peak + beside.forward, backward)
            before += point.saved
            kept += point.saved - dropped
        return highest

    @property
    def dropped(self) -> int:
        """Bytes that are gone when the forward has returned, of all that was saved, if none is retained."""
        return sum(self.parts[g].dropped for g in self.order)

    def moments_of(self, graph: int, chosen: Sequence[int]) -> tuple[Moment, ...]:
        """What a distinct graph sees of the step, where the others run as chosen.

        It is taken to retain what it does as chosen, and to keep as much of its inputs.
        """
        others = [(g, self.parts[g].points[chosen[g]]) for g in self.order]
        later = sum(self.parts[g].gradient_bytes for g in self.order)
        waiting = self.forwards - 1
        saved = waiting * sum(g == graph for g in self.order)
        left = sum(point.inputs if g == graph else point.saved for g, point in others)
        left -= sum(self.parts[g].dropped - point.retained for g, point in others)
        before = kept = waiting * left
        found: dict[Moment, None] = {}
        for (g, point), beside in zip(others, self.beside, strict=True):
            later -= self.parts[g].gradient_bytes
            forward = before + beside.forward
            backward = kept + later + self.joined_bytes + self.earlier_gradients + beside.backward
            if g == graph:
                found[Moment("forward", saved, forward)] = None
                found[Moment("backward", saved, backward + point.inputs)] = None
                saved += 1
                before += point.inputs
                kept += point.inputs
            else:
                highest = max(point.forward_peak + forward, point.backward_peak + backward)
                found[Moment("other", saved, highest)] = None
                before += point.saved
                kept += point.saved
            kept -= self.parts[g].dropped - point.retained
        return tuple(found)

    @property
    def earlier_gradients(self) -> int:
        """Bytes of gradients that earlier backwards have left, where several forwards wait."""
        if self.forwards == 1:
            return 0
        return sum(self.parts[g].gradient_bytes for g in self.order) + self.largest_gradient

    def peak_bound(self) -> int:
        """Bytes that no choice of points can pass."""
        used, runs = [self.parts[g] for g in self.order], self.forwards
        peaks = [
            max(p.forward_peak, p.backward_peak) + runs * (abs(p.saved) + abs(part.dropped))
            for part in used
            for p in part.points
        ]
        gradients = sum(max(0, part.gradient_bytes) for part in used)
        gradients += max((max(each.forward, each.backward) for each in self.beside), default=0)
        return sum(peaks) + gradients + self.joined_bytes + self.earlier_gradients


def choose_points(
    step: MultiGraphStep,
    *,
    limit: int | None = None,
    most_time: int | None = None,
    effort: float = EFFORT,
    alike: Sequence[Sequence[int]] = (),
    hint: Sequence[int] | None = None,
    gap: float = 0.0,
) -> tuple[int, ...] | None:
    """The point of each distinct graph: least time under a limit, else least memory within a time.

    Parameters
    ----------
    limit
        Most bytes; None: as few as possible.
    most_time
        Most nanoseconds of the step; None: any.
    effort
        CP-SAT's deterministic time at which the search ends; some steps of many graphs may then get no answer
        though there is one.
    alike
        Groups of parts with the same points, of which each group takes at most :data:`VARIANTS`.
    hint
        A choice to start from.
    gap
        Fraction of the figure sought by which a better choice may be missed.

    Returns
    -------
    tuple of int, or None
        Point of each distinct graph; None if nothing satisfies what was asked.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    taken = [[model.new_bool_var("") for _ in part.points] for part in step.parts]
    for group in taken:
        model.add_exactly_one(group)
    for parts in alike:
        _take_few(model, [taken[part] for part in parts])
    memory = model.new_int_var(0, step.peak_bound() if limit is None else max(0, limit), "memory")
    _bound_memory(model, step, taken, memory)
    runs = Counter(step.order)
    host = sum(
        runs[g] * (point.host // PAGE) * var
        for g, part in enumerate(step.parts)
        for point, var in zip(part.points, taken[g], strict=True)
    )
    if step.host_limit is not None:
        model.add(step.forwards * host <= step.host_limit // PAGE)
    for number, group in zip(hint or (), taken, strict=False):
        for point, var in enumerate(group):
            model.add_hint(var, point == number)
    time = sum(
        runs[g] * point.time * var
        for g, part in enumerate(step.parts)
        for point, var in zip(part.points, taken[g], strict=True)
    )
    if most_time is not None:
        model.add(time <= most_time)
    model.minimize(memory if limit is None else time * APART + host)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.relative_gap_limit = gap
    solver.parameters.catch_sigint_signal = False
    status = solved(solver, model)
    if status == cp_model.UNKNOWN:
        return _least_if_fitting(step, limit, most_time)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return tuple(next(p for p, var in enumerate(group) if solver.value(var)) for group in taken)


def _take_few(model: CpModel, taken: Sequence[Sequence[IntVar]]) -> None:
    """Let parts with the same points take few of them."""
    used = []
    for column in zip(*taken, strict=True):
        used.append(model.new_bool_var(""))
        for var in column:
            model.add_implication(var, used[-1])
    model.add(sum(used) <= VARIANTS)


def _least_if_fitting(
    step: MultiGraphStep, limit: int | None, most_time: int | None
) -> tuple[int, ...] | None:
    """Where a search found nothing in its effort: each graph's point of least peak, or of least time."""
    def first(figure: Callable[[PartPoint], int]) -> tuple[int, ...]:
        return tuple(min(range(len(p.points)), key=lambda n, p=p: figure(p.points[n])) for p in step.parts)  # type: ignore[misc]

    for chosen in (first(lambda point: point.time), first(_highest)):
        if (limit is not None and step.peak(chosen) > limit) or not step.has_room(chosen):
            continue
        if most_time is None or step.time(chosen) <= most_time:
            return chosen
    return None


def _highest(point: PartPoint) -> int:
    return max(point.forward_peak, point.backward_peak) + point.saved


def _bound_memory(model: CpModel, step: MultiGraphStep, taken: list[list[IntVar]], memory: IntVar) -> None:
    """Hold every phase of every part under the variable ``memory``.

    What is saved before each part is a variable: sums of all that come before would grow with the square.
    """
    from ortools.sat.python.cp_model import LinearExpr

    def total(part: int, figure: Callable[[PartPoint], int]) -> LinearExpr:
        figures = [figure(point) for point in step.parts[part].points]
        return LinearExpr.weighted_sum(taken[part], figures)

    most = step.peak_bound()
    later = sum(step.parts[g].gradient_bytes for g in step.order)
    more = step.forwards - 1
    waiting = [more * total(g, lambda point: point.saved + point.retained) for g in step.order]
    before: LinearExpr | IntVar = LinearExpr.sum(waiting)
    gone = dropped = more * step.dropped
    retained: list[LinearExpr] = []
    for g, beside in zip(step.order, step.beside, strict=True):
        later -= step.parts[g].gradient_bytes
        held = later + step.joined_bytes + step.earlier_gradients + beside.backward
        model.add(before + total(g, lambda point: point.forward_peak) + beside.forward - gone <= memory)
        backward = before + total(g, lambda point: point.backward_peak) + LinearExpr.sum(retained)
        model.add(backward + held - dropped <= memory)
        after = model.new_int_var(-most, most, "")
        model.add(after >= before + total(g, lambda point: point.saved))
        before = after
        dropped += step.parts[g].dropped
        if any(point.retained for point in step.parts[g].points):
            retained.append(total(g, lambda point: point.retained))
