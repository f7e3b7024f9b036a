"""Checkmate's program solved by CP-SAT."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from hybridremat.graph.joint import Schedule
from hybridremat.sequence.bounds.integer import integer_model
from hybridremat.sequence.checkmate.program import CheckmateProgram
from hybridremat.sequence.solving import solved

EFFORT: Final = 10.0
"""Deterministic seconds of CP-SAT for one limit: up to four times as long on the clock."""


@dataclass(frozen=True)
class Solved:
    """What CP-SAT said of a program.

    Attributes
    ----------
    schedule
        The best schedule found; None if there is none, or none was found.
    bound
        What no solution costs less than: nanoseconds of what runs again, or bytes of the peak.
    proved
        Whether the search ended.
    cost
        What the schedule costs, in the same unit; 0 without one.
    """

    schedule: Schedule | None
    bound: int
    proved: bool
    cost: int = 0


def solve(built: CheckmateProgram, hint: Schedule | None = None, effort: float = EFFORT) -> Solved:
    """The schedule of least time (or of least peak) of a program, with deterministic effort.

    ``hint``: a schedule of these stages to begin with.
    """
    from ortools.sat.python import cp_model

    model, variables = integer_model(built.program)
    solver = cp_model.CpSolver()
    # Eight strategies in turns, in an order that no clock decides: one alone needed ten times as long.
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = True
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False  # Ctrl-C would pass for the end of the search
    if hint is not None:
        runs, kept = built.stages.decisions(hint)
        for decided, names in ((runs, built.runs), (kept, built.kept)):
            for each, variable in names.items():
                model.add_hint(variables[variable], int(each in decided))
    status = solved(solver, model)
    proved = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solved(None, max(0, ceil(solver.best_objective_bound - 0.5)), proved)
    again = built.runs_in(lambda variable: bool(solver.value(variables[variable])))
    bound, cost = ceil(solver.best_objective_bound - 0.5), round(solver.objective_value)
    return Solved(built.stages.schedule(again), bound, proved, cost)

