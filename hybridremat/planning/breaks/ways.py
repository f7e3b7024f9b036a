"""The ways to run one graph of several: the points of its frontier, with the figures of their phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridremat.graph.joint import JointGraph, Schedule, as_plain
from hybridremat.graph.memory import MemorySimulator
from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.plan import Plan
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.sequence.joined_graphs import PartPoint
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import SchedulePoint

if TYPE_CHECKING:
    from hybridremat.compiler.emitted_memory import EmittedMemory
    from hybridremat.planning.lowered_frontier import LoweredFrontier, LoweredPoint


@dataclass(frozen=True)
class Way:
    """One way to run a graph: its figures, its flops, and the point of the frontier that it is."""

    figures: PartPoint
    flops: int
    point: SchedulePoint | LoweredPoint


def graph_of(frontier: StepFrontier | LoweredFrontier) -> JointGraph:
    """The joint graph of a frontier, with costs."""
    return frontier.graph if isinstance(frontier, StepFrontier) else frontier.counted.graph


def pins_and_timings(frontier: StepFrontier | LoweredFrontier) -> StepFrontier:
    """Where a frontier keeps what its graph pins and the seconds of its stages."""
    return frontier if isinstance(frontier, StepFrontier) else frontier.counted


def plain_way(frontier: StepFrontier | LoweredFrontier) -> Way:
    """The plain step."""
    if isinstance(frontier, StepFrontier):
        (way,) = _counted(as_plain(frontier.graph), [frontier.plain])
        return way
    point = frontier.plain_point
    memory = frontier.at_end or point.memory
    return Way(_of_code(frontier, memory, point.candidate.time), point.candidate.flops, point)


def ways_of(frontier: StepFrontier | LoweredFrontier) -> tuple[Way, ...]:
    """All points of a frontier; of a step that is to be compiled, the handful whose code is lowered."""
    if isinstance(frontier, StepFrontier):
        found: list[Way] = []
        for point in frontier.candidates:
            found += _counted(frontier.graph_of(point), [point])
        return tuple(found)
    return tuple(
        Way(_of_code(frontier, each.memory, each.candidate.time), each.candidate.flops, each)
        for each in frontier.lowered_points()
    )


def plan_of(frontier: StepFrontier | LoweredFrontier, way: Way, cost_model: str) -> Plan:
    """The plan of a graph that runs in one way."""
    if isinstance(frontier, StepFrontier):
        assert isinstance(way.point, SchedulePoint)
        return plan_of_point(frontier, way.point, limit=None, asked=None, cost_model=cost_model)
    from hybridremat.planning.choose_lowered import plan_of_lowered

    assert not isinstance(way.point, SchedulePoint)
    return plan_of_lowered(frontier, way.point, limit=None, asked=None, cost_model=cost_model)


def way_of_plan(frontier: StepFrontier | LoweredFrontier, plan: Plan) -> Way:
    """The way in which a plan runs a graph."""
    assert plan.details is not None
    graph = plan.details.graph
    point = Judge(graph)(plan.schedule)
    if isinstance(frontier, StepFrontier):
        (way,) = _counted(graph, [point])
        return way
    lowered = frontier.lowered_as(point, lean=plan.lean, plain=plan.plain_code)
    return Way(_of_code(frontier, lowered.memory, point.time), point.flops, lowered)


def _counted(graph: JointGraph, points: Iterable[SchedulePoint]) -> Iterator[Way]:
    """Points by the bytes of the graph's values."""
    replay = MemorySimulator(graph)
    released = sum(graph.values[value].bytes for value in graph.released_outputs)
    for point in points:
        schedule: Schedule = point.schedule
        memory, split = replay(schedule), schedule.num_forward
        figures = PartPoint(
            forward_peak=max(memory.profile[:split], default=0),
            backward_peak=max(memory.profile[split:], default=0),
            saved=memory.saved + released,
            time=point.time,
        )
        yield Way(figures, point.flops, point)


def _of_code(frontier: LoweredFrontier, memory: EmittedMemory, time: int) -> PartPoint:
    """The figures of generated code."""
    graph = frontier.counted.graph
    released = sum(graph.values[value].bytes for value in graph.released_outputs)
    return PartPoint(memory.forward_peak, memory.backward_peak, memory.saved + released, time)
