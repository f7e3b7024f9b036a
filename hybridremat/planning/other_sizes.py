"""A schedule that was found at some sizes, at others: whether it may run there, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from hybridremat.compiler.check import check
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.lifted import Lifted
from hybridremat.graph.joint import JointGraph, Op, Schedule, ops_by_parts
from hybridremat.graph.memory import MemorySimulator
from hybridremat.graph.tracing.symbolic import Instance
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.plans.coverage import KnownSchedule
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import SchedulePoint

PLACED: Final = 16
"""Known schedules that moves are placed in at new sizes."""


def differences(one: JointGraph, other: JointGraph) -> Iterator[str]:
    """Where two graphs are not the same but for sizes: names of ops, or what else differs."""

    def described(op: Op) -> tuple[object, ...]:
        return op.target, op.phase, op.reads, op.writes, op.random, op.mutates, op.recomputable

    if len(one.ops) != len(other.ops) or len(one.values) != len(other.values):
        yield f"{len(one.ops)} ops, and {len(other.ops)}"
        return
    pairs = zip(one.ops, other.ops, strict=True)
    yield from (op.name for op, its in pairs if described(op) != described(its))
    for name in ("held_outputs", "released_outputs", "gradients", "deliveries"):
        if getattr(one, name) != getattr(other, name):
            yield name


def moved(graph: JointGraph, schedule: Schedule, other: JointGraph) -> JointGraph | None:
    """The graph at other sizes with its ops run as the schedule runs them; None if they cannot be.

    ``graph`` is the one that the schedule was found on, ``other`` what is known at the other sizes, with all
    ways to run its ops. What writes over something does so there too, or the schedule cannot run: this is in
    the code of its graphs.
    """
    if any(differences(graph, other)):
        return None
    over = MemorySimulator(graph).overwritten(schedule)
    used: dict[int, set[int]] = {}
    for position, value in over.items():
        used.setdefault(schedule.steps[position], set()).add(value)
    ops = []
    for op, its in zip(graph.ops, other.ops, strict=True):
        how = (op.runs.kernel, op.runs.parts)
        ways = [number for number, way in enumerate(its.ways) if (way.kernel, way.parts) == how]
        if not ways or not used.get(op.id, set()) <= set(its.ways[ways[0]].overwrites):
            return None
        ops.append(replace(its.run_as(ways[0]), overwrites=op.overwrites))
    return replace(other, ops=tuple(ops))


def run_alike(graph: JointGraph, other: JointGraph) -> JointGraph:
    """The graph at other sizes, its ops run by parts where those of a graph are, if they can be there."""
    ops = []
    for op, its in zip(graph.ops, other.ops, strict=True):
        kernel = op.runs.kernel if op.variants else ""
        alike = [number for number, way in enumerate(its.variants) if way.kernel == kernel]
        ops.append(its.run_as(alike[0] if alike else 0))
    return replace(other, ops=tuple(ops))


def known_for(graph: JointGraph, schedule: Schedule, other: JointGraph) -> Iterator[KnownSchedule]:
    """A schedule of a graph as one of the step at other sizes; nothing if it differs in more than these."""
    if not any(differences(graph, other)):
        yield KnownSchedule(schedule, tuple((op.id, op.runs.kernel) for op in graph.ops if op.variant))


def with_ways(graph: JointGraph, kernels: Mapping[int, str]) -> JointGraph:
    """The graph in which ops also run by parts, by kernels that have been met at other sizes.

    Where these cannot run at the graph's own sizes, they have the figures of the op's own kernel.
    """

    def made(op: Op) -> Op:
        if op.id not in kernels or op.variants:
            return op
        own = op.runs
        return replace(op, variants=(own, replace(own, kernel=kernels[op.id], overwrites=())))

    return replace(graph, ops=tuple(map(made, graph.ops)))


def fastest_elsewhere(
    graph: JointGraph, points: Sequence[SchedulePoint], there: Judge, limit: int
) -> tuple[SchedulePoint, JointGraph] | None:
    """The fastest of some schedules that keeps a limit at other sizes, and how it runs there.

    It may have to be emitted anew there: :func:`moved` tells.

    Parameters
    ----------
    graph
        The graph that they were found on.
    points
        The schedules, the fastest first: they are tried in this order, until one fits.
    there
        Judges the graph at the other sizes, which has all ways to run its ops.
    limit
        Most bytes of the step, with what is alive around it.
    """
    if any(differences(graph, there.graph)):
        return None
    judge_of = _judges(graph, there)
    for point in points:
        judge = judge_of(point.parted)
        if judge.needs(point.schedule) <= limit and judge.allows(point.schedule):
            return point, judge.graph
    return None


def _judges(graph: JointGraph, there: Judge) -> Callable[[frozenset[int]], Judge]:
    """What judges schedules of a graph at other sizes, by the ops that they run by parts."""

    @cache
    def judge(parted: frozenset[int]) -> Judge:
        return there.with_ops_of(run_alike(ops_by_parts(graph, parted), there.graph))

    return judge


def placed_elsewhere(
    graph: JointGraph, points: Iterable[SchedulePoint], there: Judge, limit: int, most: float
) -> tuple[SchedulePoint, int] | None:
    """A schedule of some with moves for other sizes, and its nanoseconds there, fewer than ``most``.

    ``graph``, ``there`` and ``limit`` as in :func:`fastest_elsewhere`. Looked at are :data:`PLACED` of those
    that run fast enough without moves.
    """
    from hybridremat.sequence.offload.search import fastest_placed  # not where nothing moves

    if any(differences(graph, there.graph)):
        return None
    judge_of = _judges(graph, there)
    fast: dict[tuple[Schedule, frozenset[int]], SchedulePoint] = {}
    for point in points:
        bare = replace(point.schedule, moves=())
        if judge_of(point.parted).time(bare) < most:
            fast.setdefault((bare, point.parted), point)
    best: tuple[SchedulePoint, int] | None = None
    few = list(fast)[:: max(1, -(-len(fast) // PLACED))]
    for parted in dict.fromkeys(parted for _, parted in few):
        judge = judge_of(parted)
        runs = frozenset(op.id for op in judge.graph.ops if op.variant)
        pool = judge.pool(replace(judge(bare), parted=runs) for bare, its in few if its == parted)
        for found in fastest_placed(judge, pool, limit, 1):
            if found.time < (most if best is None else best[1]):
                origin = fast[replace(found.schedule, moves=()), parted]
                best = replace(origin, schedule=found.schedule), found.time
    return best


def checked(
    lifted: Lifted, step: TracedStep, graph: JointGraph, instance: Instance, limit: int | None = None
) -> EmittedMemory:
    """The memory of lifted graphs at some sizes, where they are checked as any that are emitted there.

    Parameters
    ----------
    lifted
        The graphs.
    step
        The traced step at these sizes, of ``instance``.
    graph
        How it runs there, from :func:`moved`.
    limit
        Most bytes.

    Raises
    ------
    PlanError
        If they do not compute what the step at these sizes does, or need more.
    """
    forward, backward = lifted.at(instance)
    return check(replace(step, graph=graph), forward, backward, limit=limit)
