"""What of a schedule is worth deciding again, window by window, until none gains anything or effort is up.

Exchanges (:mod:`hybridremat.sequence.exchange`) leave one recomputation out at a time. Where two have to go
for two others elsewhere, CP-SAT finds it: each search asks for a schedule that saves a worthwhile time, so
that most windows are refuted in a moment. Effort is counted in the solver's deterministic seconds, never by a
clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import Schedule
from hybridremat.sequence.bounds.integer import integer_model, single_solver
from hybridremat.sequence.checkmate.stages import Stages, stages_of
from hybridremat.sequence.dead_code import DeadCodeElimination
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.polish.program import PolishProgram, Runs
from hybridremat.sequence.polish.windows import DEEP, WIDE, Size, Window, windows
from hybridremat.sequence.solving import solved

EFFORT_AT_ONCE: Final = 2.0
"""Deterministic seconds for one window: three to five times as many on the clock."""


@dataclass(frozen=True)
class Look:
    """Which windows are searched, for what, and how hard.

    Attributes
    ----------
    sizes
        Of the windows.
    worth
        The least share of the step's time that a search has to save.
    effort
        Deterministic seconds of all searches for one schedule.
    """

    sizes: tuple[Size, ...]
    worth: float
    effort: float


INTO_DEPTH: Final = Look(DEEP, worth=0.0005, effort=6.0)
"""For what several recomputations near each other save together."""

ALL_OVER: Final = Look(WIDE, worth=0.00002, effort=2.0)
"""For which of many small recomputations far apart are the best to fill the memory with."""

LOOKS: Final = (INTO_DEPTH, ALL_OVER)
"""One after the other; the first one only where a good deal could be gained."""

WINDOWS_OF_PAIR: Final = 2e-7
"""Seconds of a nominal core to find the windows of a schedule, for each pair of its executions."""


def preparation_seconds(schedule: Schedule) -> float:
    """What it takes to find the windows of a schedule, on a nominal core."""
    return WINDOWS_OF_PAIR * len(schedule.steps) ** 2


@dataclass
class Polish:
    """Searches in schedules of one graph.

    Attributes
    ----------
    judge
        What schedules cost, and which are allowed.
    limit
        Bytes that they may need.
    look
        Which windows it searches, for what, and how hard.
    deadline
        When to end with the best so far, by the clock.
    report
        Called with the share of the effort that is spent.
    """

    judge: Judge
    limit: int
    look: Look = INTO_DEPTH
    deadline: Deadline = NO_DEADLINE
    report: Callable[[float], None] = lambda _: None

    def __post_init__(self) -> None:
        self._left = self.look.effort
        self._last: tuple[Schedule, Stages, Runs] | None = None
        self.graph = self.judge.graph
        self._remove_dead = DeadCodeElimination(self.graph)

    def __call__(self, schedule: Schedule) -> Schedule:
        """A faster schedule that fits as well, or ``schedule``, which fits and has no dead executions."""
        self._left = self.look.effort
        in_vain = 0  # windows, one after the other
        number = 0
        found = self._windows(schedule)
        while found and in_vain < len(found) and self._left > 0 and not self.deadline.passed:
            self.report(self.spent / self.look.effort)
            faster = self._searched(schedule, found[number % len(found)])
            if faster is None:
                in_vain, number = in_vain + 1, number + 1
            else:
                schedule, in_vain = faster, 0
                found = self._windows(schedule)
        return schedule

    @property
    def spent(self) -> float:
        """Deterministic seconds of the last call."""
        return self.look.effort - self._left

    def _windows(self, schedule: Schedule) -> list[Window]:
        stages, given = self._decided(schedule)
        return [each for near, most in self.look.sizes for each in windows(stages, given, near, most)]

    def _decided(self, schedule: Schedule) -> tuple[Stages, Runs]:
        if self._last is None or self._last[0] is not schedule:
            stages = stages_of(self.graph, schedule)
            self._last = schedule, stages, frozenset(stages.decisions(schedule)[0])
        return self._last[1:]

    def _searched(self, schedule: Schedule, window: Window) -> Schedule | None:
        """A schedule that is faster by what is worth it and fits; None if none is found."""
        stages, given = self._decided(schedule)
        time = self.judge.time(schedule)
        worth = max(1, int(self.look.worth * time))
        spent = sum(self.graph.ops[op].time for _, op in given if op in window.ops)
        if spent < worth:
            return None
        memory = self.judge.simulate(schedule)
        limit = memory.peak + self.limit - self.judge.needs(schedule, memory)
        program = PolishProgram(
            stages, limit, given=given, open_ops=window.ops, open_runs=window.runs
        )
        again = self._solved(program, sum(self.graph.ops[op].time for _, op in given) - worth, worth)
        if again is None:
            return None
        found = self._remove_dead(stages.schedule(again))
        fits = self.judge.needs(found) <= self.limit
        faster = self.judge.time(found) <= time - worth
        return found if fits and faster and self.judge.allows(found) else None

    def _solved(self, built: PolishProgram, most: int, worth: int) -> list[list[int]] | None:
        """What runs again in each stage, in at most so long; ``worth`` is what more it may leave."""
        from ortools.sat.python import cp_model

        model, variables = integer_model(built.program)
        model.add(cp_model.LinearExpr.weighted_sum(variables, built.program.cost) <= most)
        solver = single_solver(min(self._left, EFFORT_AT_ONCE))
        solver.parameters.absolute_gap_limit = worth
        if self.deadline:
            solver.parameters.max_time_in_seconds = self.deadline.left
        status = solved(solver, model)
        self._left -= solver.response_proto.deterministic_time
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return built.runs_in(lambda variable: bool(solver.value(variables[variable])))
