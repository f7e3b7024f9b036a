"""The lifetimes of all values in a step: from which execution to which, and in which block.

A value that is computed again has a lifetime for each version, from the execution that makes it to its last
reader, by the rules of :mod:`hybridremat.graph.memory`. That module sums bytes for hundreds of schedules;
this one says, for one schedule that is shown, which values they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hybridremat.graph.joint import JointGraph, Move, Phase, Schedule
from hybridremat.graph.memory import MemorySimulator, ScheduleError, step_memory
from hybridremat.graph.segmentation.chain import Chain


class Band(StrEnum):
    """Kinds of memory that belong to no block.

    ``SHARED`` values are kept by every plan, or made outside of blocks; ``GRADIENTS`` are those of
    activations; ``PARAMETER_GRADIENTS`` stay to the end, unless they leave early; ``TEMPORARY`` is the
    workspace of kernels, and the states of random generators.
    """

    SHARED = "shared"
    GRADIENTS = "gradients"
    PARAMETER_GRADIENTS = "parameter gradients"
    TEMPORARY = "temporary"


@dataclass(frozen=True, slots=True)
class Span:
    """The lifetime of one version of a value, or of an op's generator state (``value`` is then None).

    ``birth`` and ``death`` are executions, both included; ``op`` made it (None for tangents); ``band`` is
    the index of its block, or a :class:`Band`; ``size`` in bytes.
    """

    value: int | None
    op: int | None
    size: int
    birth: int
    death: int
    band: int | Band


def live_spans(chain: Chain, schedule: Schedule, blocks: Sequence[int | None]) -> tuple[Span, ...]:
    """All lifetimes of a step; ``blocks`` are those of its executions.

    Raises
    ------
    ScheduleError
        If an execution reads a value that no earlier execution wrote.
    """
    graph = chain.graph
    births, last_reads = _versions(graph, schedule)
    simulate = MemorySimulator(graph)
    for now, leaving in simulate.departures(schedule).items():
        last_reads |= {(each.gradient, births[each.gradient][-1]): now for each in leaving}
    over = simulate.overwritten(schedule)
    overwritten = {(value, max(b for b in births[value] if b < now)) for now, value in over.items()}
    away = {(move.value, move.birth): move for move in schedule.moves}
    spans = [
        Span(value, op, graph.values[value].bytes, first, last, _band(chain, value, blocks[birth]))
        for value, versions in births.items()
        for op, birth, death in _lifetimes(graph, schedule, value, versions, last_reads)
        # what overwrites it has its storage from then on
        for first, last in _there(birth, death - ((value, birth) in overwritten), away.get((value, birth)))
    ]
    end, split = len(schedule.steps) - 1, schedule.num_forward
    tangents = [value for value in graph.values if value.tangent] if split <= end else []
    spans += [Span(v.id, None, v.bytes, split, end, Band.GRADIENTS) for v in tangents]
    state = graph.rng_state_bytes
    spans += [Span(None, op, state, at[0], at[-1], Band.TEMPORARY) for op, at in _replayed(graph, schedule)]
    return tuple(spans)


def _there(birth: int, death: int, move: Move | None) -> list[tuple[int, int]]:
    """When a version is on the device, of one that lives so long."""
    return [(birth, death)] if move is None else [(birth, move.free - 1), (move.fetch, death)]


def temporary_bytes(graph: JointGraph, schedule: Schedule) -> tuple[int, ...]:
    """Workspace bytes of each execution, and of whoever takes the gradients that leave after it."""
    temporary = [graph.ops[op].temp for op in schedule.steps]
    if graph.deliveries:
        bare = replace(graph, deliveries=tuple(replace(each, workspace=0) for each in graph.deliveries))
        pairs = zip(step_memory(graph, schedule).profile, step_memory(bare, schedule).profile, strict=True)
        temporary = [own + full - without for own, (full, without) in zip(temporary, pairs, strict=True)]
    for _, runs in _replayed(graph, schedule):
        for again in runs[1:]:
            temporary[again] += graph.rng_state_bytes  # the generator's current state is kept meanwhile
    return tuple(temporary)


def _versions(
    graph: JointGraph, schedule: Schedule
) -> tuple[dict[int, list[int]], dict[tuple[int, int], int]]:
    """For each value the executions that make it, and for each (value, birth) its last reader."""
    births: dict[int, list[int]] = {}
    last_reads: dict[tuple[int, int], int] = {}
    for now, op in enumerate(schedule.steps):
        for value in graph.ops[op].reads:
            if graph.values[value].producer is None:
                continue
            if value not in births:
                name = graph.values[value].name or value
                raise ScheduleError(f"step {now} ({graph.ops[op].name}) reads {name} before it is computed")
            last_reads[value, births[value][-1]] = now
        for value in graph.ops[op].writes:
            births.setdefault(value, []).append(now)
    return births, last_reads


def _lifetimes(
    graph: JointGraph,
    schedule: Schedule,
    value: int,
    births: Sequence[int],
    last_reads: dict[tuple[int, int], int],
) -> list[tuple[int, int, int]]:
    """Op, birth and death of each version of a value."""
    deaths = [last_reads.get((value, birth), birth) for birth in births]
    end = len(schedule.steps) - 1
    if value in graph.released_outputs:
        deaths[0] = max(deaths[0], schedule.num_forward - 1)
    if value in graph.held_outputs:
        deaths[0] = end
    if value in graph.gradients:
        deaths[-1] = end
    return [(schedule.steps[birth], birth, death) for birth, death in zip(births, deaths, strict=True)]


def _band(chain: Chain, value: int, block: int | None) -> int | Band:
    op = chain.graph.producer(value)
    if value in chain.graph.gradients or value in chain.graph.leaving:
        return Band.PARAMETER_GRADIENTS
    if op is not None and op.phase is Phase.BACKWARD:
        return Band.GRADIENTS
    return Band.SHARED if block is None or value in chain.always else block


def _replayed(graph: JointGraph, schedule: Schedule) -> Iterator[tuple[int, list[int]]]:
    """Each random op that runs more than once, and its executions."""
    runs: dict[int, list[int]] = {}
    for now, op in enumerate(schedule.steps):
        if graph.ops[op].random:
            runs.setdefault(op, []).append(now)
    return ((op, at) for op, at in runs.items() if len(at) > 1)


def execution_blocks(chain: Chain, steps: Sequence[int]) -> tuple[int | None, ...]:
    """The block that each execution works for.

    An op that stands in several blocks runs for the one whose own op comes next, or else came last.
    """
    blocks_of: dict[int, list[int]] = {}
    for index, block in enumerate(chain.blocks):
        for op in (*block.forward, *block.optional, *block.backward):
            blocks_of.setdefault(op, []).append(index)
    own = [blocks_of[op][0] if len(blocks_of.get(op, ())) == 1 else None for op in steps]
    following: list[int | None] = [None] * len(own)
    coming: int | None = None
    for now in reversed(range(len(own))):
        coming = following[now] = own[now] if own[now] is not None else coming
    found: list[int | None] = []
    before: int | None = None
    for now, op in enumerate(steps):
        among = blocks_of.get(op, [])
        likely = [block for block in (following[now], before) if block in among]
        found.append(next(iter(likely or among), None))
        before = own[now] if own[now] is not None else before
    return tuple(found)
