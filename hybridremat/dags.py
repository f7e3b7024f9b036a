"""Plans for graphs that are no models: ops with bytes and times, and edges between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Final

import networkx as nx
import numpy as np

from hybridremat.errors import DagError, InfeasibleLimitError
from hybridremat.graph.deadline import Deadline
from hybridremat.graph.joint import JointGraph, Op, Phase, Schedule, Value, plain_schedule
from hybridremat.planning.progress import Progress, planning_progress
from hybridremat.sequence.bounds.certificate import bound_under, heaviest_op
from hybridremat.sequence.dag import DagSearch
from hybridremat.sequence.dag_runs import Dag
from hybridremat.sequence.judge import Judge
from hybridremat.units import format_bytes, parse_seconds, resolve_limit

MOST: Final = 2**62
"""Bytes or times of all ops together: sums of them are counted in 64 bits."""


@dataclass(frozen=True)
class DagPlan:
    """A schedule of a graph under a budget.

    Attributes
    ----------
    steps
        The ops in the order in which they run; some run more than once.
    budget, peak, plain_peak
        Bytes: what was given, what this schedule takes at most, and what each op once takes, as given.
    time, plain_time
        The sum of the times of all executions, and of each op once.
    bound
        Time that no schedule under the budget beats: ``plain_time``, or more with ``certify=True`` (of
        schedules with the ops of ``backward`` last).
    """

    steps: tuple[Hashable, ...]
    budget: int
    peak: int
    plain_peak: int
    time: int
    plain_time: int
    bound: int

    @property
    def overhead(self) -> float:
        """The extra time, as a share of each op once."""
        return self.time / self.plain_time - 1 if self.plain_time else 0.0


def plan_dag(
    ops: Iterable[Hashable] | nx.DiGraph,
    edges: Iterable[tuple[Hashable, Hashable]] = (),
    bytes: Sequence[int] | Mapping[Hashable, int] | str = "bytes",  # noqa: A002 (as everyone names them)
    times: Sequence[int] | Mapping[Hashable, int] | str = "times",
    budget: int | str = "100%",
    *,
    backward: Collection[Hashable] = (),
    certify: bool = False,
    planning_budget: float | str | None = None,
    progress: bool = True,
) -> DagPlan:
    """The fastest schedule that is found for a graph under a budget of memory.

    Any op may run any number of times, in any order that its edges allow. Its output is there from its
    execution to the last one that reads it, and at least while it runs. What has to stay to the end is read
    by a last op.

    Parameters
    ----------
    ops
        Their names, in the order in which they would run without a budget (if edges contradict it: in the
        nearest one that they allow); or a networkx ``DiGraph``, which has the edges as well. One that no
        other reads runs once.
    edges
        ``(maker, reader)``.
    bytes, times
        Of each op's output, and of one execution, in whole units of your own: by name, in the order of the
        ops, or the name of an attribute of the ``DiGraph``'s nodes.
    budget
        Bytes as a number or as a size (``"6GiB"``), or a share of what each op once takes (``"80%"``).
    backward
        Ops of a training step's backward, which run once, behind all others. Then the step is planned as that
        of a model is, in blocks, by all searches: the others run once before the backward, and may run again
        in it. On steps of a few ops that finds less than a call without ``backward``.
    certify
        Whether to prove how near the plan is, which takes seconds more, for large graphs half a minute.
        Without ``backward`` nothing more is proven than that each op runs once.
    planning_budget
        A time (seconds, or ``"2min"``) after which the best so far is taken; the proof is not part of it.
        Without one the search goes by counts, and the plan is the same each time.
    progress
        Whether to show how far it is.

    Raises
    ------
    DagError
        If there is a cycle, an edge of an op that is not there, or bytes or times that are no whole numbers
        from 0 on, or too large.
    LimitError
        If a budget cannot be read.
    InfeasibleLimitError
        If nothing fits, or nothing is found; ``least`` is the smallest budget known to be enough.
    """
    seconds = None if planning_budget is None else parse_seconds(planning_budget, name="planning_budget")
    names, graph, backward = _read(ops, edges, bytes, times, backward)
    judge = Judge(graph)
    plain = plain_schedule(graph) if backward else Schedule(tuple(range(len(names))), 0)
    plain_peak = judge.needs(plain)
    limit = resolve_limit(budget, plain_peak, name="budget", least=0)
    heaviest, alone = heaviest_op(graph)
    if limit < alone:
        why = f"{names[heaviest.id]!r} takes {alone} bytes with what it reads, and no schedule less"
        raise _infeasible(limit, plain_peak, why)
    if plain_peak <= limit:
        schedule = plain
    else:
        find = _trained if backward else _searched
        with planning_progress(show=progress, first="planning a graph") as show:
            schedule = find(graph, limit, seconds, show)
        if judge.needs(schedule) > limit:
            more = "" if seconds is None else f" in planning_budget={planning_budget!r}, or give more time"
            raise _infeasible(limit, judge.needs(schedule), f"none was found{more}")
    return DagPlan(
        steps=tuple(names[op] for op in schedule.steps),
        budget=limit,
        peak=judge.needs(schedule),
        plain_peak=plain_peak,
        time=judge.time(schedule),
        plain_time=judge.time(plain),
        bound=bound_under(judge, limit, schedule) if certify and backward else judge.time(plain),
    )


def _read(
    ops: Iterable[Hashable] | nx.DiGraph,
    edges: Iterable[tuple[Hashable, Hashable]],
    bytes: Sequence[int] | Mapping[Hashable, int] | str,  # noqa: A002
    times: Sequence[int] | Mapping[Hashable, int] | str,
    backward: Iterable[Hashable],
) -> tuple[tuple[Hashable, ...], JointGraph, frozenset[Hashable]]:
    """The ops in an order that their edges allow, the graph of them, and those of the backward."""
    names, read = _graph(ops, edges)
    sizes, durations = _figures("bytes", bytes, names, ops), _figures("times", times, names, ops)
    names = _in_order(names, read)
    last = _listed("backward", backward)
    if unknown := [name for name in last if name not in read]:
        raise DagError(f"backward= names {unknown[0]!r}, which is no op of this graph")
    return names, _joint(names, read, sizes, durations, frozenset(last)), frozenset(last)


def _searched(graph: JointGraph, limit: int, seconds: float | None, show: Progress) -> Schedule:
    """The fastest schedule that is found, or, where none fits, each op once."""
    dag = Dag(
        tuple(value.bytes for value in graph.values),
        tuple(op.time for op in graph.ops),
        tuple(op.reads for op in graph.ops),
    )
    steps = DagSearch(dag, limit, show, Deadline(seconds))()
    return Schedule(tuple(range(len(graph.ops))) if steps is None else steps, 0)


def _trained(graph: JointGraph, limit: int, seconds: float | None, show: Progress) -> Schedule:
    """The same of a training step; where none fits, the one that needs least."""
    from hybridremat.planning.option_cache import OptionCache  # torch
    from hybridremat.planning.planner import plan_graph

    deadline = Deadline(seconds)
    frontier = plan_graph(graph, cache=OptionCache(), workers=1, deadline=deadline, progress=show)
    try:
        return frontier.choose(limit, None).schedule
    except InfeasibleLimitError as error:
        return frontier.choose(error.least, None).schedule


def _infeasible(limit: int, least: int, why: str) -> InfeasibleLimitError:
    return InfeasibleLimitError(
        f"no schedule fits budget {format_bytes(limit)} ({limit} bytes): {why}. Raise the budget: {least} "
        "bytes are known to be enough.",
        limit=limit,
        least=least,
    )


def _listed(what: str, given: Iterable[Hashable]) -> tuple[Hashable, ...]:
    """What was given, once, as names that can be looked up."""
    try:
        listed = tuple(given)
        for each in listed:
            hash(each)
    except TypeError as error:
        raise DagError(f"{what}= are no names of ops: {error}. Give a list of hashable names") from None
    if None in listed:
        raise DagError(f"{what}= name an op None: give it another name")
    return listed


def _graph(
    ops: Iterable[Hashable] | nx.DiGraph, edges: Iterable[tuple[Hashable, Hashable]]
) -> tuple[tuple[Hashable, ...], dict[Hashable, list[Hashable]]]:
    """The names of ops, and what each of them reads."""
    if isinstance(ops, nx.Graph) and not isinstance(ops, nx.DiGraph):
        raise DagError("the edges of this networkx graph have no direction: give a DiGraph")
    names = _listed("ops", ops)
    if not names:
        raise DagError("the graph has no ops: give at least one")
    read: dict[Hashable, list[Hashable]] = {name: [] for name in names}
    if len(read) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise DagError(f"two ops are named {twice!r}: give each a name of its own")
    for edge in (*_edges(edges), *(ops.edges() if isinstance(ops, nx.DiGraph) else ())):
        maker, reader = edge
        for end in _listed("edges", edge):
            if end not in read:
                raise DagError(f"the edge {edge!r} names {end!r}, which is no op of this graph")
        read[reader].append(maker)
    return names, read


def _edges(given: Iterable[tuple[Hashable, Hashable]]) -> list[tuple[Hashable, Hashable]]:
    found = []
    try:
        for edge in given:
            if isinstance(edge, set | frozenset | Mapping | str):
                raise TypeError(f"{edge!r}")
            maker, reader = edge
            found.append((maker, reader))
    except (TypeError, ValueError) as error:
        raise DagError(f"edges= are no pairs (maker, reader): {error}") from None
    return found


def _figures(
    what: str,
    given: Sequence[int] | Mapping[Hashable, int] | str,
    names: Sequence[Hashable],
    ops: Iterable[Hashable] | nx.DiGraph,
) -> dict[Hashable, int]:
    """Bytes or times by the name of an op."""
    found: Mapping[Hashable, object]
    if isinstance(given, str):
        if not isinstance(ops, nx.DiGraph):
            raise DagError(f"{what}={given!r} names an attribute of nodes: give a networkx DiGraph for it")
        found = dict(ops.nodes(data=given))
    elif isinstance(given, Mapping):
        found = given
        if unknown := [name for name in found if name not in names]:
            raise DagError(f"{what}= names {unknown[0]!r}, which is no op of this graph")
    else:
        if not isinstance(given, Sequence | np.ndarray):
            raise DagError(f"{what}= is {given!r}: give a list in the order of the ops, or a dict by name")
        if len(given) != len(names):
            raise DagError(f"{what}= has {len(given)} figures for {len(names)} ops: give one for each")
        found = dict(zip(names, given, strict=True))
    figures = {}
    for name in names:
        value = found.get(name)
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
            raise DagError(
                f"{what} of {name!r} are {value!r}: give whole numbers from 0 on, in smaller units if need be"
            )
        figures[name] = int(value)
    if sum(figures.values()) > MOST:
        raise DagError(f"{what} come to more than {MOST} together: give them in larger units")
    return figures


def _in_order(
    names: tuple[Hashable, ...], read: Mapping[Hashable, Sequence[Hashable]]
) -> tuple[Hashable, ...]:
    """The ops as given, or in the nearest order that edges allow."""
    place = {name: number for number, name in enumerate(names)}
    graph = nx.DiGraph((maker, reader) for reader, makers in read.items() for maker in makers)
    graph.add_nodes_from(names)
    try:
        return tuple(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
    except nx.NetworkXUnfeasible:
        around = [maker for maker, _ in nx.find_cycle(graph)]
        text = " -> ".join(map(repr, [*around, around[0]]))
        raise DagError(f"the edges go in a circle: {text}. No order runs that") from None


def _joint(
    names: Sequence[Hashable],
    read: Mapping[Hashable, Sequence[Hashable]],
    sizes: Mapping[Hashable, int],
    times: Mapping[Hashable, int],
    backward: frozenset[Hashable],
) -> JointGraph:
    """The graph as searches know it: an op and its one value have the number of its place."""
    place = {name: number for number, name in enumerate(names)}
    started = [number for number, name in enumerate(names) if name in backward][:1]
    if started and (early := [name for name in names[started[0] :] if name not in backward]):
        raise DagError(
            f"{early[0]!r} runs behind {names[started[0]]!r} of the backward: name the ops of the backward "
            f"last, or {early[0]!r} in backward= too"
        )
    readers = {maker for makers in read.values() for maker in makers}
    made = []
    for number, name in enumerate(names):
        alone = name not in readers  # run for its own sake, once
        phase = Phase.BACKWARD if name in backward or (alone and not backward) else Phase.FORWARD
        reads = tuple(sorted({place[each] for each in read[name]}))
        made.append(
            Op(
                number,
                str(name),
                phase,
                reads,
                (number,),
                time=times[name],
                flops=times[name],
                recomputable=not alone or phase is Phase.BACKWARD,
            )
        )
    values = tuple(Value(number, sizes[name], number, str(name)) for number, name in enumerate(names))
    return JointGraph(tuple(made), values)
