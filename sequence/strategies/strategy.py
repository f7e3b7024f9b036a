"""What a search strategy is: which options the blocks may have, and which schedules are considered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.graph.joint import Schedule, plain_schedule
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.sequence.chain_problem import ChainProblem, chain_problem
from hybridremat.sequence.decisions import Decision, Forward, Solo
from hybridremat.sequence.flatten import Flattener
from hybridremat.sequence.frontier import EVERYTHING, Wanted, frontier
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.repair import PinRepair
from hybridremat.sequence.search import Search

Decided = Callable[[ChainProblem], Iterable[Sequence[Decision]]]
"""The decisions about a chain with at least one block."""

Restrict = Callable[[OptionSet], OptionSet]
"""Some of the options of a block."""

Moved = Callable[[Judge, Chain, Schedule], Schedule]
"""A schedule of a chain with the moves that a strategy makes in it."""


@dataclass(frozen=True)
class Strategy:
    """A way to choose what is recomputed.

    Attributes
    ----------
    name
        As the user writes it.
    restrict
        The options of a block that it looks at.
    decided
        The decisions that it looks at beside the plain step; None for all that the chain's dynamic program
        finds with these options.
    rivals
        Restrictions of these options with which the program runs as well: with fewer of them it rounds
        otherwise, and may find what it took for dominated.
    waiting
        The same where what is saved counts besides, since several forwards wait for their backward, or others
        run meanwhile: the program goes by the peak of one, and takes an option that saves less for dominated
        if it needs as much then.
    searches
        What looks further under each limit that is asked for, one after the other.
    rivals_everywhere
        Whether the rivals run for limits far above the least memory, too.
    moved
        The moves that its decisions come with, or the plain step, if they are none. None: with ``offload=``
        moves are placed for each limit, as for any strategy.
    """

    name: str
    restrict: Restrict
    decided: Decided | None = None
    rivals: tuple[Restrict, ...] = ()
    waiting: tuple[Restrict, ...] = ()
    searches: tuple[Search, ...] = ()
    rivals_everywhere: bool = False
    moved: Moved | None = None

    def frontier(
        self,
        chain: Chain,
        bindings: Sequence[BlockBinding],
        option_sets: Sequence[OptionSet],
        judge: Judge | None = None,
        wanted: Wanted = EVERYTHING,
    ) -> Pool:
        """The Pareto set of its schedules of a chain, restricted options given; see :func:`frontier`."""
        if self.decided is None:
            own = frontier(chain, bindings, option_sets, judge, wanted)
            rivals = (each for each in self._rivals_for(wanted, own) if not wanted.deadline.passed)
            others = (self._rival(each, chain, bindings, option_sets, judge, wanted) for each in rivals)
            return Pool.merged((own, *others))
        judge = judge or Judge(chain.graph)
        repair = PinRepair(chain.graph, judge.pins, chain.rebuilt)
        flatten = Flattener(chain, bindings, option_sets)
        plain = judge(repair(plain_schedule(chain.graph)))
        problem = chain_problem(chain, bindings, option_sets)
        points = [
            judge(repair(flatten(decisions)), tuple(decisions))
            for decisions in (self.decided(problem) if len(problem) else ())
        ]
        if self.moved is not None and len(problem):
            points = [
                judge(self.moved(judge, chain, each.schedule), each.decisions) for each in points or [plain]
            ]
        return judge.pool([plain, *points])

    def for_saved(self) -> Strategy:
        """The strategy where schedules that save less are worth more time at the same peak."""
        return replace(self, rivals=(*self.rivals, *self.waiting), rivals_everywhere=True)

    def _rivals_for(self, wanted: Wanted, own: Pool) -> tuple[Restrict, ...]:
        """The rivals that are worth it: for a plan under one limit they are near the least memory alone."""
        return self.rivals if wanted.near(own.base[0].needs) or self.rivals_everywhere else ()

    @staticmethod
    def _rival(
        restrict: Restrict,
        chain: Chain,
        bindings: Sequence[BlockBinding],
        option_sets: Sequence[OptionSet],
        judge: Judge | None,
        wanted: Wanted,
    ) -> Pool:
        """The frontier with fewer options, its decisions by the numbers of all.

        For a plan under one limit, of the coarse table alone: at 27 limits of nine models that made no other
        plan. A whole frontier is to be nowhere above that of the strategy with those options.
        """
        # by identity: sets of options are large to hash, and blocks that are equal share one
        distinct = {id(options): options for options in option_sets}
        fewer = {key: restrict(options) for key, options in distinct.items()}
        numbers = {key: _numbers(fewer[key], options) for key, options in distinct.items()}
        few = [fewer[id(each)] for each in option_sets]
        pool = frontier(chain, bindings, few, judge, replace(wanted, finest=wanted.ranges is None))

        @cache  # the schedules of a chain share most of their decisions
        def renumbered(decision: Decision) -> Decision:
            if isinstance(decision, Forward):
                return decision
            ordinary, solo = numbers[id(option_sets[decision.block])]
            number = (solo if isinstance(decision, Solo) else ordinary)[decision.option]
            return replace(decision, option=number)

        def with_numbers_of_all(point: SchedulePoint) -> list[SchedulePoint]:
            return [replace(point, decisions=tuple(map(renumbered, point.decisions)))]

        return pool.mapped(with_numbers_of_all)


def _numbers(few: OptionSet, every: OptionSet) -> tuple[list[int], list[int]]:
    """For each of a few ordinary options, and solo ones, its number among all."""
    return [every.options.index(each) for each in few.options], [every.solo.index(each) for each in few.solo]


def every_option(options: OptionSet) -> OptionSet:
    """All options of a block."""
    return options


def fastest_option(options: OptionSet) -> OptionSet:
    """The ordinary option that recomputes least."""
    fastest = min(options.options, key=lambda each: each.time)
    return OptionSet((fastest,), (), options.solves, options.unproved)
