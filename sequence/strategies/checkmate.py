"""``checkmate``: the fastest frontier-advancing schedule of the whole graph under the limit.

Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica and Gonzalez, "Checkmate: Breaking the Memory Wall with
Optimal Tensor Rematerialization" (MLSys 2020): an integer program over stages, one for each op
(:mod:`hybridremat.sequence.checkmate.program`), here solved by CP-SAT with a limit of effort that no clock
decides. Optimal, where the search ends, among the schedules in which ops run for the first time in the plain
order and each op of the forward runs again at most once between two of these, by the program's count of
memory, in which nothing is written in place. Where the search does not end, the plan says how far from
optimal it may be. It begins at a rounding of the relaxation (``checkmate-lp``), and these compete by exact
figures.
"""

from __future__ import annotations

from typing import Final

from hybridremat.errors import GraphSizeError
from hybridremat.graph.joint import JointGraph, plain_schedule
from hybridremat.graph.memory import MemorySimulator, schedule_time
from hybridremat.sequence.checkmate.exact import EFFORT, solve
from hybridremat.sequence.checkmate.program import CheckmateProgram
from hybridremat.sequence.checkmate.stages import Stages, one_op_stages
from hybridremat.sequence.strategies.checkmate_lp import Roundings
from hybridremat.sequence.strategies.whole_graph import Found, WholeGraph

MOST_RUNS: Final = 6_000
"""Pairs of a stage and an op that may run again in it: 100 ops have some 2,000. With 9,000 (220 ops) what is
found in the time there is can be far from the best."""


class Checkmate:
    """The search in one graph; ``effort``: deterministic seconds for each limit."""

    def __init__(self, graph: JointGraph, effort: float = EFFORT) -> None:
        self._graph, self._effort = graph, effort
        self._stages = one_op_stages(graph)
        _require_small(self._stages)
        self._roundings = Roundings(graph, self._stages)
        self._simulate = MemorySimulator(graph)

    def under(self, limit: int) -> Found:
        """See :class:`~hybridremat.sequence.strategies.whole_graph.Search`."""
        rounded = self._roundings.under(limit).schedules
        fitting = [each for each in rounded if self._simulate(each).peak <= limit]
        hint = min(fitting, key=lambda each: schedule_time(self._graph, each), default=None)
        found = solve(CheckmateProgram(self._stages, limit), hint, self._effort)
        once = schedule_time(self._graph, plain_schedule(self._graph))
        return Found([*([] if found.schedule is None else [found.schedule]), *rounded], once + found.bound)

    def least(self, known: int) -> Found:
        """See :class:`~hybridremat.sequence.strategies.whole_graph.Search`."""
        rounded = self._roundings.least(known).schedules
        hint = min(rounded, key=lambda each: self._simulate(each).peak)
        program = CheckmateProgram(self._stages, known, least_peak=True)
        found = solve(program, hint, self._effort)
        if found.schedule is None:
            return Found(rounded)
        fastest = solve(CheckmateProgram(self._stages, found.cost), found.schedule, self._effort)
        return Found([found.schedule, *([] if fastest.schedule is None else [fastest.schedule]), *rounded])


def _require_small(stages: Stages) -> None:
    runs = sum(map(len, stages.again))
    if runs > MOST_RUNS:
        raise GraphSizeError(
            f'strategy="checkmate" solves the whole graph at once, and this one of {len(stages)} ops is too '
            f"large: it has {runs:,} pairs of an op and a stage in which that may run again, and "
            f'{MOST_RUNS:,} are possible. strategy="checkmate-lp" rounds the relaxation of the same program, '
            'strategy="hybrid" solves block by block.'
        )


CHECKMATE: Final = WholeGraph("checkmate", Checkmate)
