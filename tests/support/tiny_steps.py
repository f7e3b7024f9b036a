"""Tiny joint graphs that hypothesis draws, and the fastest schedule of one under a limit, by enumeration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Phase, Schedule, Variant
from support.naive_memory import naive_profile
from support.nets import Net


@st.composite
def tiny_steps(draw) -> JointGraph:
    """Two to four forward ops, perhaps an optional one, one to three backward ops."""
    net = Net()
    forward: list[int] = [net.input()]
    backward = [net.input(draw(st.integers(0, 2)), tangent=True)]
    optional: list[int] = []

    def reads(pool: list[int], *others: int) -> list[int]:
        more = st.lists(st.sampled_from([*pool, *others]), max_size=1)
        return sorted({pool[-draw(st.integers(1, min(2, len(pool))))], *draw(more)})

    def fields(sources: list[int], size: int) -> dict[str, object]:
        over = [v for v in sources if v in made and net.values[v].bytes == size]
        return {
            "time": draw(st.integers(1, 9)),
            "temp": draw(st.sampled_from((0, 0, 2, 5))),
            "overwrites": tuple(over) if draw(st.booleans()) else (),
            "recomputable": draw(st.integers(0, 9)) > 0,
        }

    made: set[int] = set()
    pools = {Phase.FORWARD: forward, Phase.OPTIONAL: optional, Phase.BACKWARD: backward}
    counts = draw(st.integers(2, 4)), draw(st.integers(0, 1)), draw(st.integers(1, 3))
    for phase, number in zip((Phase.FORWARD, Phase.OPTIONAL, Phase.BACKWARD), counts, strict=True):
        for _ in range(number):
            if phase is Phase.BACKWARD:
                sources = reads(backward, *forward[1:], *optional)
            else:
                sources = reads(forward)
            size = draw(st.integers(1, 9))
            written = net.op(phase, sources, [size], **fields(sources, size))
            pools[phase].extend(written)
            made.update(written)
    net.held = set(draw(st.lists(st.sampled_from(forward[1:]), max_size=1)))
    net.gradients = set(draw(st.lists(st.sampled_from(backward[1:]), max_size=2)))
    released = frozenset(draw(st.lists(st.sampled_from(forward[1:]), max_size=1))) - net.held
    return net.joint(released_outputs=released)


@st.composite
def in_two_ways(draw, graphs) -> JointGraph:
    """A graph of ``graphs``, of which one or two ops can be run by parts as well."""
    graph = draw(graphs)
    ops = list(graph.ops)
    for op in draw(st.lists(st.sampled_from(ops), min_size=1, max_size=2, unique=True)):
        over = op.overwrites if draw(st.booleans()) else ()
        parts = Variant("by_rows", 2, draw(st.integers(1, 9)), draw(st.sampled_from((0, 2, 5))), over)
        ops[op.id] = replace(op, variants=(op.runs, parts))
    return replace(graph, ops=tuple(ops))


def schedules(graph: JointGraph, most: int) -> Iterator[Schedule]:
    """Every schedule with up to ``most`` executions."""
    needed = {op.id for op in graph.ops if op.phase is not Phase.OPTIONAL}
    forward = set(graph.phase_ops(Phase.FORWARD))

    def grow(steps: tuple[int, ...], split: int | None) -> Iterator[Schedule]:
        done = set(steps)
        if split is not None and needed <= done and _gradients(graph) <= done:
            yield Schedule(steps, split)
        if split is None and forward <= done:
            yield from grow(steps, len(steps))
        if len(steps) + len((needed | _gradients(graph)) - done) >= most and needed <= done:
            return
        for op in graph.ops:
            ready = all(graph.values[v].producer in {None, *done} for v in op.reads)
            allowed = op.id not in done or op.recomputable
            room = len(steps) + 1 + len(needed - done - {op.id}) <= most
            if ready and allowed and room and (split is not None or op.phase is not Phase.BACKWARD):
                yield from grow((*steps, op.id), split)

    return grow((), None)


def _gradients(graph: JointGraph) -> set[int]:
    return {graph.values[v].producer for v in graph.gradients if graph.values[v].producer is not None}


def fastest_by_enumeration(
    graph: JointGraph, most: int, *, only: Callable[[Schedule], bool] = lambda schedule: True
) -> list[tuple[int, int]]:
    """Peak and least time of schedules of up to ``most`` executions, by rising peak; none beats another.

    ``only``: which schedules count.
    """
    best: dict[int, int] = {}
    for schedule in filter(only, schedules(graph, most)):
        peak = max(naive_profile(graph, schedule))
        time = sum(graph.ops[op].time for op in schedule.steps)
        best[peak] = min(time, best.get(peak, time))
    front: list[tuple[int, int]] = []
    for peak in sorted(best):
        if not front or best[peak] < front[-1][1]:
            front.append((peak, best[peak]))
    return front
