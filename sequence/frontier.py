"""The frontier of a chain: the breakpoints of its tables, backtracked to schedules and simulated exactly.

A table's peaks are never too low but up to a few percent too high, so the frontier keeps only
figures of flat schedules, to the byte and nanosecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import Final

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.sequence.backtrack import Backtracker
from hybridremat.sequence.chain_problem import ChainProblem, chain_problem
from hybridremat.sequence.decisions import Decision
from hybridremat.sequence.dynamic_program import ChainTable, chain_table, slot_bytes, slots_for
from hybridremat.sequence.flatten import Flattener
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.repair import PinRepair
from hybridremat.sequence.states import table_rows

MOST_POINTS: Final = 1000
"""Breakpoints of a table that are backtracked and simulated. On T5, Llama and GPT-2 with dropout 1000 lose
nothing, and 500 lose 0.01 points of time in the mean, 3 at the worst limit."""

MOST_EXECUTIONS: Final = 4_000_000
"""Executions that are simulated for a table (some seconds): graphs of many ops get fewer points."""

COARSER: Final = 4
"""Slots of the second table against those of the finest."""

SPREAD: Final = 24
"""Intervals between the breakpoints of a table that are simulated wherever the limits are."""

BESIDE: Final = 16
"""Slots from the beginning of a range that are looked at, however short it is."""

CLOSE: Final = 1.3
"""A limit of up to so many times the least memory is near it, and gets a thorough search. Farther from it, at
70 to 25 % of the plain peak of nine models, a strategy's rivals changed one plan, by 0.001 points of time."""

MANY_ROWS: Final = 1000
"""Tables of more rows are filled with the finest slots for limits near the least memory alone: of T5, which
has 3000, that changed no plan at those limits. It did of ResNet-50, which has few."""

NEAR_LEAST: Final = 0.05
"""The share of the least memory within which schedules are near it: where exchanges at the least begin."""

Ranges = Sequence[tuple[int, int]]
"""Bytes from … to."""


@dataclass(frozen=True)
class Wanted:
    """What a frontier is for.

    Attributes
    ----------
    ranges
        Where all that the tables tell apart is looked at, in bytes, and little elsewhere. None: everywhere.
    deadline
        When to end with what has been looked at: at least the least memory, and what just fits at the ends of
        each range.
    finest
        Whether the finest table is wanted as well as the coarse one.
    """

    ranges: Ranges | None = None
    deadline: Deadline = NO_DEADLINE
    finest: bool = True

    def near(self, least: int) -> bool:
        """Whether schedules are wanted near the least memory (bytes)."""
        return self.ranges is None or min(low for low, _ in self.ranges) <= CLOSE * least


EVERYTHING: Final = Wanted()


def frontier(
    chain: Chain,
    bindings: Sequence[BlockBinding],
    option_sets: Sequence[OptionSet],
    judge: Judge | None = None,
    wanted: Wanted = EVERYTHING,
) -> Pool:
    """The Pareto set of needed bytes against time that the options of the blocks allow.

    The plain schedule is among the candidates, and its peak is the largest limit looked at. Schedules that
    the ``judge`` of the chain's graph does not allow are repaired (:mod:`hybridremat.sequence.repair`).

    Raises
    ------
    ValueError
        If there is not one binding and one option set for each block.
    """
    judge = judge or Judge(chain.graph)
    repair = PinRepair(chain.graph, judge.pins, chain.rebuilt)
    plain = judge(repair(plain_schedule(chain.graph)))
    problem = chain_problem(chain, bindings, option_sets)
    flatten = Flattener(chain, bindings, option_sets)
    found: dict[tuple[Decision, ...], SchedulePoint] = {}
    base = [plain]
    most = max(100, min(MOST_POINTS, MOST_EXECUTIONS // (2 * len(chain.graph.ops) + 1)))

    def near() -> bool:
        return wanted.near(min(point.needs for point in base))

    for table in chain_tables(problem, plain.peak, wanted.deadline, finest=wanted.finest, near=near):
        backtrack = Backtracker(table)

        @cache
        def point_at(slot: int, backtrack: Backtracker = backtrack) -> SchedulePoint:
            decisions = backtrack(slot)
            if decisions not in found:
                found[decisions] = judge(repair(flatten(decisions)), decisions)
            return found[decisions]

        slots = evenly_spaced(table.breakpoints(), most)
        base += look_near(slots, point_at, wanted.ranges, wanted.deadline)
    return judge.pool((plain, *found.values()), base)


def chain_tables(
    problem: ChainProblem,
    memory: int,
    deadline: Deadline = NO_DEADLINE,
    *,
    finest: bool = True,
    near: Callable[[], bool] = lambda: True,
) -> Iterator[ChainTable]:
    """The finest table, if it is asked for, and one with coarser slots; none for a chain without blocks.

    With a deadline the coarse one comes first, and the finest if there is time. With many rows as well, and
    then the finest if it says ``near``, when it is asked after the coarse one.

    The finest is right about the recursion, yet a schedule that it counts as dominated may not be so
    in exact bytes. The coarse one errs otherwise, and found what was lost (up to 1.2 points of time
    on GPT-2, 3 % of the least memory on T5) for a few more simulations.
    """
    if not len(problem):
        return
    problem, rows = table_rows(problem)
    unit = slot_bytes(memory, slots_for(rows))
    coarse = partial(chain_table, problem, memory=memory, slots=max(1, memory // (COARSER * unit)), rows=rows)
    fine = partial(chain_table, problem, memory=memory, rows=rows)
    if finest and not deadline and len(rows) <= MANY_ROWS:
        yield fine()
        yield coarse()
        return
    yield coarse()
    if finest and not deadline.passed and (len(rows) <= MANY_ROWS or near()):
        yield fine()


def look_near(
    slots: Sequence[int],
    point_at: Callable[[int], SchedulePoint],
    ranges: Ranges | None,
    deadline: Deadline = NO_DEADLINE,
) -> list[SchedulePoint]:
    """Look at every slot in some ranges of bytes and near the least memory, and at few others.

    Where a range begins and ends is found by bisection, so it does not matter how far a table's bytes are
    from those that schedules need. Where these do not rise with the slots, some in a range may be missed.

    Returns
    -------
    list
        What does not depend on the ranges: some slots evenly spread, and those near the least.
    """
    if not slots:
        return []
    if deadline:
        for limit in dict.fromkeys(end for ends in ranges or () for end in ends):
            _place_beyond(slots, point_at, limit)
    places = list(dict.fromkeys(round(n * (len(slots) - 1) / SPREAD) for n in range(SPREAD + 1)))
    base = [point_at(slots[each]) for each in places if not each or not deadline.passed]
    needs = [each.needs for each in base]

    def looked(places: range) -> list[SchedulePoint]:
        return [point_at(slots[each]) for each in places if not deadline.passed]

    def beyond(limit: float) -> int:
        """The place of a slot that needs more than a limit, after one that does not; or of the last."""
        span = bisect_right(needs, limit)
        begin, end = places[max(0, span - 1)], places[min(span, len(needs) - 1)]
        return begin if deadline.passed else _place_beyond(slots, point_at, limit, begin, end)

    base += looked(range(beyond(min(needs) * (1 + NEAR_LEAST))))
    for low, high in ((0, inf),) if ranges is None else ranges:
        first = max(0, beyond(low) - 1)
        looked(range(first, min(len(slots), max(first + BESIDE, beyond(high)))))
    return base


def _place_beyond(
    slots: Sequence[int],
    point_at: Callable[[int], SchedulePoint],
    limit: float,
    begin: int = 0,
    end: int | None = None,
) -> int:
    """The place of a slot that needs more than ``limit`` bytes, after one that does not; ``end`` if none."""
    return bisect_right(slots, limit, begin, end, key=lambda slot: point_at(slot).needs)


def evenly_spaced(slots: Sequence[int], most: int) -> tuple[int, ...]:
    """At most ``most`` of the ascending ``slots``, evenly over memory, the first and the last included."""
    if len(slots) <= most:
        return tuple(slots)
    first, span = slots[0], slots[-1] - slots[0]
    # of every interval the last slot, which is the fastest; the interval's number is rounded up
    chosen = {-(-(slot - first) * (most - 1) // span): slot for slot in slots}
    return tuple(sorted(chosen.values()))
