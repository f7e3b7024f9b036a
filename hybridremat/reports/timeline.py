"""The memory of a step over time, by block and kind, and the stretches that a chart draws of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.reports.moves import StepMoves, step_moves
from hybridremat.reports.spans import Band, Span, execution_blocks, live_spans, temporary_bytes
from hybridremat.sequence.offload.link import Link

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class StepTimeline:
    """One step, execution by execution.

    Attributes
    ----------
    graph
        The joint graph that the schedule runs.
    schedule
        The executions.
    blocks
        For each execution, the block that it works for; None for an op of no block.
    spans
        The lifetimes of all values.
    temporary
        Workspace bytes of each execution.
    block_count
        How many blocks the chain has.
    moves
        What waits in host memory meanwhile.
    """

    graph: JointGraph
    schedule: Schedule
    blocks: tuple[int | None, ...]
    spans: tuple[Span, ...]
    temporary: tuple[int, ...]
    block_count: int
    moves: StepMoves

    @property
    def bands(self) -> tuple[int | Band, ...]:
        """The blocks in order, then the kinds of memory outside of them."""
        return (*range(self.block_count), *Band)

    @cached_property
    def recomputed(self) -> tuple[bool, ...]:
        """For each execution, whether its op has run before."""
        first: dict[int, int] = {}
        return tuple(first.setdefault(op, now) != now for now, op in enumerate(self.schedule.steps))

    def totals(self) -> tuple[int, ...]:
        """Bytes at every execution."""
        change = np.zeros(len(self.temporary) + 1, np.int64)
        for span in self.spans:
            change[span.birth] += span.size
            change[span.death + 1] -= span.size
        return tuple((np.cumsum(change[:-1]) + np.array(self.temporary, np.int64)).tolist())

    @property
    def peak_at(self) -> int:
        """The first execution with the highest memory; 0 for an empty step."""
        totals = self.totals()
        return totals.index(max(totals)) if totals else 0

    def band_bytes(self, executions: Sequence[int]) -> Integers:
        """Bytes of each band (rows) at the given executions (columns), which must rise."""
        at = np.array(executions, np.int64)
        place = {band: row for row, band in enumerate(self.bands)}
        change = np.zeros((len(place), len(at) + 1), np.int64)
        births = np.searchsorted(at, [span.birth for span in self.spans])
        deaths = np.searchsorted(at, [span.death for span in self.spans], side="right")
        for span, birth, death in zip(self.spans, births, deaths, strict=True):
            change[place[span.band], birth] += span.size
            change[place[span.band], death] -= span.size
        summed: Integers = np.cumsum(change[:, :-1], axis=1)
        summed[place[Band.TEMPORARY]] += np.array(self.temporary, np.int64)[at]
        return summed


def step_timeline(chain: Chain, schedule: Schedule, link: Link | None = None) -> StepTimeline:
    """What is alive during a step, and when.

    Parameters
    ----------
    chain
        The joint graph, and the blocks that its ops belong to.
    schedule
        The executions of the step.
    link
        How its values move, if they do.

    Raises
    ------
    ScheduleError
        If an execution reads a value that no earlier execution wrote.
    """
    blocks = execution_blocks(chain, schedule.steps)
    return StepTimeline(
        graph=chain.graph,
        schedule=schedule,
        blocks=blocks,
        spans=live_spans(chain, schedule, blocks),
        temporary=temporary_bytes(chain.graph, schedule),
        block_count=len(chain.blocks),
        moves=step_moves(chain.graph, schedule, link),
    )


@dataclass(frozen=True, slots=True)
class Stretch:
    """Executions ``first`` … ``last``, both included; ``shown`` is the one with the highest memory."""

    first: int
    last: int
    shown: int


def thinned(totals: Sequence[int], num_forward: int, most: int) -> tuple[Stretch, ...]:
    """At most ``most`` stretches that cover all executions; none reaches from the forward into the backward.

    The peak of the step is shown, since each stretch shows its own.

    Parameters
    ----------
    totals
        Bytes at every execution.
    num_forward
        How many of them are the forward's.
    most
        How many stretches there may be, at least 2.
    """
    ends = [num_forward, len(totals)] if 0 < num_forward < len(totals) else [len(totals)]
    found: list[Stretch] = []
    start = 0
    for end in ends:
        count = min(end - start, max(1, most * (end - start) // max(1, len(totals))))
        edges = [start + (end - start) * i // count for i in range(count + 1)] if count else []
        for first, after in pairwise(edges):
            found.append(Stretch(first, after - 1, max(range(first, after), key=totals.__getitem__)))
        start = end
    return tuple(found)
