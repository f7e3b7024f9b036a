"""The linear program of a bound with whole numbers, by CP-SAT: a little more than its relaxation proves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridremat.sequence.bounds.linear_program import LinearProgram
from hybridremat.sequence.solving import solved

if TYPE_CHECKING:  # takes a third of a second, and most plans need no search
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar


def integer_bound(program: LinearProgram, effort: float) -> int:
    """A number that no solution in integers costs less than; no variable may have a cost below zero.

    Parameters
    ----------
    effort
        Deterministic seconds of CP-SAT: with too few of them the bound is below the optimum.

    Raises
    ------
    ValueError
        If there is no solution.
    """
    from ortools.sat.python import cp_model

    model, _ = integer_model(program)
    solver = single_solver(effort)
    solver.parameters.optimize_with_lb_tree_search = True  # for the bound alone, whatever solutions there are
    status = solved(solver, model)
    if status == cp_model.INFEASIBLE:
        raise ValueError("no solution satisfies every row")
    if status == cp_model.MODEL_INVALID:  # its numbers are too large
        return program.lower_bound()
    return int(solver.response_proto.inner_objective_lower_bound)


def integer_model(program: LinearProgram) -> tuple[CpModel, list[IntVar]]:
    """The program as CP-SAT takes it, to be minimized, and its variables."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    variables = [
        model.new_int_var(*bounds, "") for bounds in zip(program.lower, program.upper, strict=True)
    ]
    for terms, limit in program.rows():
        model.add(sum(coefficient * variables[column] for column, coefficient in terms) <= limit)
    model.minimize(cp_model.LinearExpr.weighted_sum(variables, program.cost))
    return model, variables


def single_solver(effort: float) -> CpSolver:
    """One strategy with the whole linear relaxation: eight in turns took eight times as long on these."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False  # Ctrl-C would pass for the end of the search
    return solver
