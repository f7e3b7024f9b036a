"""The whole step of a plan as one sequence: its graphs' forwards in order, then their backwards in reverse.

A step of one graph is that graph's timeline. For several, each execution of a graph has beside it what the
other graphs and the code between them hold then (:mod:`hybridremat.sequence.joined_graphs`), so that the most
of all is the plan's peak, to the byte. What graphs save and the gradients that they leave are told value by
value. Code between graphs was measured as a whole: it is one execution in each phase, and what it leaves,
with outputs that go from graph to graph, is a block without a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridremat.errors import PlotError
from hybridremat.graph.memory import inputs_in_backward
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import StepComposition
from hybridremat.reports.moves import starts
from hybridremat.reports.spans import Band, Span
from hybridremat.reports.timeline import Integers, StepTimeline, step_timeline

BETWEEN = "between graphs"


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution: of an op of a section's graph (``local``: which), or of a section as a whole (None)."""

    section: int
    local: int | None
    forward: bool

    @property
    def section_in_phase(self) -> tuple[int, bool]:
        """What runs, and in which phase."""
        return self.section, self.forward


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that are alive from execution ``birth`` to execution ``death``, both included.

    ``span`` of the graph of ``section``; both are None for what is held between graphs.
    """

    size: int
    birth: int
    death: int
    section: int | None = None
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of a value of a section's graph: its bytes, and start and length in nanoseconds of the step."""

    section: int
    name: str
    size: int
    start: int
    time: int
    to_host: bool


@dataclass(frozen=True)
class WholeStep:
    """A step, execution by execution.

    Attributes
    ----------
    names
        Of the sections, in the order of the forward: graphs, and the code between them.
    timelines
        Of the graph of each section; None for code between graphs, and for a graph without details.
    executions
        Of the step.
    holdings
        All that is alive for longer than an execution.
    temporary
        Workspace bytes of each execution; all that a section takes where it is one execution.
    waits
        Nanoseconds that are waited before each execution for what moves.
    """

    names: tuple[str, ...]
    timelines: tuple[StepTimeline | None, ...]
    executions: tuple[Execution, ...]
    holdings: tuple[Holding, ...]
    temporary: tuple[int, ...]
    waits: tuple[int, ...]

    def totals(self) -> tuple[int, ...]:
        """Bytes at every execution."""
        change = np.zeros(len(self.executions) + 1, np.int64)
        for held in self.holdings:
            change[held.birth] += held.size
            change[held.death + 1] -= held.size
        return tuple((np.cumsum(change[:-1]) + np.array(self.temporary, np.int64)).tolist())

    def bytes_by(self, key: Callable[[int | None, int | Band | None], str]) -> dict[str, list[int]]:
        """Bytes at every execution by what ``key`` says of their section and band, in order of appearance.

        Both are None for what is held between graphs; the band is None for a section as a whole.
        """
        count = len(self.executions)
        change: dict[str, Integers] = {}

        def row(name: str) -> Integers:
            return change.setdefault(name, np.zeros(count + 1, np.int64))

        for held in sorted(self.holdings, key=lambda each: each.birth):
            name = key(held.section, None if held.span is None else held.span.band)
            row(name)[held.birth] += held.size
            row(name)[held.death + 1] -= held.size
        for now, (at, size) in enumerate(zip(self.executions, self.temporary, strict=True)):
            if size:
                name = key(at.section, None if at.local is None else Band.TEMPORARY)
                row(name)[now] += size
                row(name)[now + 1] -= size
        return {name: np.cumsum(each[:-1]).tolist() for name, each in change.items()}

    def name(self, section: int | None) -> str:
        """The name of a section, or of what is held between graphs."""
        return BETWEEN if section is None else self.names[section]

    def times(self) -> tuple[int, ...]:
        """Nanoseconds of each execution, by the cost model.

        Of what runs as a whole none are known: each has 1/200 of the others' sum, so that it can be seen.
        """
        known = [self._time(each) for each in self.executions]
        drawn = max(1, sum(filter(None, known)) // 200)
        return tuple(drawn if each is None else each for each in known)

    def starts(self) -> tuple[int, ...]:
        """Nanoseconds at which executions start."""
        return starts(self.times(), self.waits)[:-1]

    def places(self) -> dict[tuple[int, int], int]:
        """The execution of the step that is one of a section's graph."""
        every = enumerate(self.executions)
        return {(each.section, each.local): now for now, each in every if each.local is not None}

    def hosted(self) -> tuple[Holding, ...]:
        """What waits in host memory, from the start of its copy there until it is back."""
        places, found = self.places(), list[Holding]()
        for section, timeline in enumerate(self.timelines):
            for each in () if timeline is None else timeline.moves.values:
                birth, ready = places[section, each.move.birth], places[section, each.move.ready]
                found.append(Holding(each.size, birth, ready, section))
        return tuple(found)

    def copies(self) -> Iterator[HostCopy]:
        """All copies to host memory and back."""
        places, at = self.places(), self.starts()
        for section, timeline in enumerate(self.timelines):
            if timeline is None or not timeline.moves.values:
                continue
            moves, split = timeline.moves, timeline.schedule.num_forward
            ahead = [at[places[section, local]] - moves.starts[local] for local in (0, split)]
            for each in moves.values:
                name = timeline.graph.values[each.move.value].name
                for copy, out in ((each.out, True), (each.back, False)):
                    start = copy.start + ahead[0 if out else 1]
                    yield HostCopy(section, name, each.size, start, copy.end - copy.start, to_host=out)

    def host_bytes(self) -> tuple[int, ...]:
        """Bytes in host memory at every execution."""
        change = np.zeros(len(self.executions) + 1, np.int64)
        for held in self.hosted():
            change[held.birth] += held.size
            change[held.death + 1] -= held.size
        return tuple(np.cumsum(change[:-1]).tolist())

    def _time(self, execution: Execution) -> int | None:
        timeline = self.timelines[execution.section]
        if timeline is None or execution.local is None:
            return None
        return timeline.graph.ops[timeline.schedule.steps[execution.local]].time


def whole_step(plan: PlanData) -> WholeStep:
    """The timeline of a plan's step.

    Raises
    ------
    PlotError
        If the step has no backward, is several graphs that are compiled, or the plan's file does not say how
        these are joined: there is then no one sequence of operations.
    """
    if plan.parts:
        return _joined(plan)
    if plan.details is None or not plan.schedule.steps:
        raise PlotError("this step has no backward, so that there is no sequence of operations to be written")
    timeline = step_timeline(plan.details.chain, plan.schedule, plan.details.link)
    split = plan.schedule.num_forward
    return WholeStep(
        ("",),
        (timeline,),
        tuple(Execution(0, now, now < split) for now in range(len(timeline.temporary))),
        tuple(Holding(span.size, span.birth, span.death, 0, span) for span in timeline.spans),
        timeline.temporary,
        timeline.moves.waits,
    )


def _joined(plan: PlanData) -> WholeStep:
    if plan.compiler != "eager":
        raise PlotError(
            "this step is several compiled graphs, whose memory is that of generated code: there is no one "
            "sequence of operations to be written; plan.to_html shows such a plan, graph by graph"
        )
    if plan.composition is None:
        raise PlotError(
            "this plan of several graphs is of a version that did not keep how they are joined, so that "
            "there is no one sequence of operations to be written. Make the plan again"
        )
    of_parts = [_timeline(part) for part in plan.parts]
    sections = plan.composition.sections
    timelines = tuple(None if each.part is None else of_parts[each.part] for each in sections)
    step = _Joined(plan.composition, timelines)
    return WholeStep(
        section_names(plan.composition),
        timelines,
        tuple(step.executions),
        tuple(step.holdings()),
        tuple(map(step.temporary, step.executions)),
        tuple(step.waits()),
    )


def section_names(composition: StepComposition) -> tuple[str, ...]:
    """``layers.2`` for a graph of a module that was named, else ``graph 3 of 7``; or what is between them.

    A module that runs as several graphs, or several times, is numbered as well.
    """
    graphs = [each for each in composition.sections if each.part is not None]
    units = [each.unit for each in graphs]
    names: list[str] = []
    number = 0
    for each in composition.sections:
        if each.part is None:
            names.append(BETWEEN)
            continue
        number += 1
        place = f"graph {number} of {len(graphs)}"
        alone = each.unit and units.count(each.unit) == 1
        names.append(each.unit if alone else ", ".join(filter(None, (each.unit, place))))
    return tuple(names)


def _timeline(part: PlanData) -> StepTimeline | None:
    if part.details is None or not part.schedule.steps:
        return None
    return step_timeline(part.details.chain, part.schedule, part.details.link)


class _Joined:
    """The executions of all sections in one order, and what is alive at them."""

    def __init__(self, composition: StepComposition, timelines: Sequence[StepTimeline | None]) -> None:
        self.composition, self.sections, self.timelines = composition, composition.sections, timelines
        self.executions: list[Execution] = []
        self.own: dict[tuple[int, bool], range] = {}
        order = range(len(self.sections))
        for forward, sections in ((True, order), (False, reversed(order))):
            for section in sections:
                start = len(self.executions)
                self.executions += self._executions(section, forward=forward)
                self.own[section, forward] = range(start, len(self.executions))
        self.last = len(self.executions) - 1

    def _executions(self, section: int, *, forward: bool) -> list[Execution]:
        """Those of one phase: of each op, or one of the section as a whole."""
        timeline = self.timelines[section]
        if timeline is None:
            return [Execution(section, None, forward)]
        split, end = timeline.schedule.num_forward, len(timeline.temporary)
        found = range(split) if forward else range(split, end)
        return [Execution(section, local, forward) for local in found] or [Execution(section, None, forward)]

    def temporary(self, execution: Execution) -> int:
        """Bytes that an execution takes beside what is held."""
        section, timeline = self.sections[execution.section], self.timelines[execution.section]
        if timeline is not None:
            return 0 if execution.local is None else timeline.temporary[execution.local]
        return section.forward_peak if execution.forward else section.backward_peak

    def waits(self) -> list[int]:
        """Nanoseconds before each execution: at the end of its forward a graph waits for what leaves."""
        found = [0] * (len(self.executions) + 1)
        for section, timeline in enumerate(self.timelines):
            if timeline is None:
                continue
            split = timeline.schedule.num_forward
            for local, wait in timeline.moves.waits_out.items():
                found[self._at(section, local) if local < split else self.own[section, True].stop] += wait
            for local, wait in timeline.moves.waits_back.items():
                found[self._at(section, local)] += wait
        return found[:-1]

    def holdings(self) -> list[Holding]:
        """All that is held; values are told apart unless what they take would be more than is counted."""
        for across in (True, False):
            values = [held for n in range(len(self.sections)) for held in self._values(n, across=across)]
            left = self._beside(values)
            if min(left) >= 0:
                return values + list(_stacked(left))
        raise AssertionError("other graphs hold less than nothing")

    def _at(self, section: int, local: int) -> int:
        """The execution of the step that is one of a section's graph."""
        timeline = self.timelines[section]
        assert timeline is not None
        split = timeline.schedule.num_forward
        phase = local < split
        return self.own[section, phase].start + (local if phase else local - split)

    def _values(self, section: int, *, across: bool) -> Iterator[Holding]:
        """The lifetimes of a graph's values; ``across``: also while other sections run."""
        timeline = self.timelines[section]
        if timeline is None:
            return
        end, split = len(timeline.temporary) - 1, timeline.schedule.num_forward
        stay = self._staying(section)
        for span in timeline.spans:
            if span.death < span.birth:
                continue
            birth, death = self._at(section, span.birth), self._at(section, span.death)
            crosses = span.birth < split <= span.death
            if across and (span.value, span.birth) in stay and span.death == end:
                death = self.last
            if across or not crosses:
                yield Holding(span.size, birth, death, section, span)
            else:
                yield Holding(span.size, birth, self._at(section, split - 1), section, span)
                yield Holding(span.size, self._at(section, split), death, section, span)

    def _staying(self, section: int) -> set[tuple[int | None, int]]:
        """The gradients that stay to the end of the step, each with the execution that makes it."""
        timeline = self.timelines[section]
        assert timeline is not None
        gradients = timeline.graph.gradients - self.sections[section].passed
        last = {span.value: span.birth for span in sorted(timeline.spans, key=lambda span: span.birth)}
        return {(value, last[value]) for value in gradients if value in last}

    def _beside(self, values: Sequence[Holding]) -> list[int]:
        """Bytes beside a section's own at each execution that belong to none of the others' values."""
        change = np.zeros(self.last + 2, np.int64)
        for held in values:
            for birth, death in self._elsewhere(held):
                change[birth] += held.size
                change[death + 1] -= held.size
        told = np.cumsum(change[:-1])
        levels = self._levels()
        beside = [levels[each.section, each.forward] for each in self.executions]
        return [all_of_it - known for all_of_it, known in zip(beside, told.tolist(), strict=True)]

    def _elsewhere(self, held: Holding) -> Iterator[tuple[int, int]]:
        """The executions of other sections in which a value is held."""
        assert held.section is not None
        at = held.birth
        for forward in (True, False):
            own = self.own[held.section, forward]
            if at < own.start <= held.death:
                yield at, own.start - 1
            at = max(at, own.stop)
        if at <= held.death:
            yield at, held.death

    def _levels(self) -> dict[tuple[int, bool], int]:
        """Bytes beside each section in each phase: the sums of the step's peak."""
        before = kept = 0
        later = sum(each.left for each in self.sections)
        levels = {}
        for number, section in enumerate(self.sections):
            later -= section.left
            levels[number, True] = before + section.beside_forward
            beside = self.composition.joined_bytes + section.beside_backward
            levels[number, False] = kept + later + beside + self._inputs(number)
            before += section.saved
            kept += section.saved - section.dropped
        return levels

    def _inputs(self, section: int) -> int:
        """Bytes of inputs that a graph alone holds for its backward."""
        timeline = self.timelines[section]
        if timeline is None:
            return 0
        return inputs_in_backward(timeline.graph, timeline.schedule, self.sections[section].inputs)


def _stacked(levels: Sequence[int]) -> Iterator[Holding]:
    """Bytes over time as blocks, of which the latest goes first."""
    stack: list[tuple[int, int]] = []  # (size, birth)
    height = 0
    for now, level in enumerate((*levels, 0)):
        while height > level:
            size, birth = stack.pop()
            gone = min(size, height - level)
            yield Holding(gone, birth, now - 1)
            height -= gone
            if size > gone:
                stack.append((size - gone, birth))
        if level > height:
            stack.append((level - height, now))
            height = level
