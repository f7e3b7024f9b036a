"""A linear program in integers, and a lower bound of its optimum that is exact arithmetic.

A first-order solver (PDLP, Applegate et al. 2021) finds dual values in seconds, to a few digits. Any dual
values prove a bound, good ones a good bound (Neumaier, Shcherbina: Safe bounds in linear and mixed-integer
linear programming, 2004): for the rows A x ≤ b, dual values λ ≥ 0 and variables between l and u,

    min c x ≥ −λ b + Σ_j min over x_j in [l_j, u_j] of (c + λ A)_j x_j.

The right side is computed in integers, from λ rounded to multiples of 2^−40, so nothing of the solver has to
be believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

ITERATIONS: Final = 10_000
"""Of the solver, at most: some seconds for 20,000 variables. A count, so that a bound can be reproduced."""

TOLERANCE: Final = 1e-5
_DUAL_BITS: Final = 40
_SCALED_TO: Final = 100.0
"""What the largest bound of a row and the cost of everything are to the solver."""

Term = tuple[int, int]
"""A variable and its coefficient."""


@dataclass
class LinearProgram:
    """Minimize costs of variables between integers, under rows of integers that are at most a limit."""

    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    cost: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _coefficients: list[int] = field(default_factory=list)

    def variable(self, lower: int = 0, upper: int = 1, cost: int = 0) -> int:
        """A new variable; returns its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.cost.append(cost)
        return len(self.cost) - 1

    def at_most(self, terms: Iterable[Term], limit: int) -> None:
        """A new row: the sum of ``terms``, each of another variable, is at most ``limit``.

        What holds for any values of the variables is left out: a solver whose accuracy is relative to all
        limits would take everything for accurate beside a large one. So bounds of variables may be tightened
        afterwards, and not loosened.
        """
        terms = [(at, int(each)) for at, each in terms]
        if sum(max(each * self.lower[at], each * self.upper[at]) for at, each in terms) <= limit:
            return
        for column, coefficient in terms:
            self._rows.append(len(self.limits))
            self._columns.append(column)
            self._coefficients.append(coefficient)
        self.limits.append(limit)

    def rows(self) -> Iterator[tuple[list[Term], int]]:
        """Each row: its terms, and what their sum is at most."""
        ends = np.searchsorted(self._rows, np.arange(len(self.limits) + 1)).tolist()
        terms = list(zip(self._columns, self._coefficients, strict=True))
        for row, limit in enumerate(self.limits):
            yield terms[ends[row] : ends[row + 1]], limit

    def lower_bound(self, iterations: int = ITERATIONS) -> int:
        """A number that no solution costs less than, fractional ones included; rounded down."""
        if not self.limits:
            return _least_product(np.array(self.cost, object), self.lower, self.upper)
        return self.proven_by(self._dual_values(iterations))

    def proven_by(self, dual: Sequence[int]) -> int:
        """The bound by these dual values, multiples of 2^−40; what is negative counts as zero."""
        weights = np.maximum(np.array(dual, object), 0)
        reduced = np.array([cost << _DUAL_BITS for cost in self.cost], object)
        np.add.at(reduced, self._columns, weights[self._rows] * np.array(self._coefficients, object))
        total = _least_product(reduced, self.lower, self.upper) - int(np.dot(weights, self.limits))
        return total >> _DUAL_BITS

    def values(self, iterations: int = ITERATIONS) -> list[float]:
        """Values of the variables that the solver found: near an optimum, to a few digits.

        Rows count alike here: an error is relative to all of them, and large ones would hide the others'.
        """
        row_scale, cost_scale = self._scales(scaled_to=1.0)
        found = np.asarray(self._solution(row_scale, cost_scale, iterations).primal_solution)
        lower, upper = np.array(self.lower, float), np.array(self.upper, float)
        within: list[float] = np.clip(np.nan_to_num(found), lower, upper).tolist()
        return within

    def _dual_values(self, iterations: int) -> list[int]:
        """Dual values that the solver found, as multiples of 2^−40."""
        row_scale, cost_scale = self._scales()
        found = self._solution(row_scale, cost_scale, iterations).dual_solution
        scaled = np.nan_to_num(-np.asarray(found) * row_scale / cost_scale, posinf=0.0, neginf=0.0)
        return [round(each) for each in np.ldexp(scaled, _DUAL_BITS).tolist()]

    def _solution(self, row_scale: NDArray[np.float64], cost_scale: float, iterations: int) -> Any:
        """What PDLP returns for the program in scaled numbers."""
        from ortools.pdlp import solvers_pb2
        from ortools.pdlp.python import pdlp

        parameters = solvers_pb2.PrimalDualHybridGradientParams()
        parameters.num_threads = 1  # sums of several threads have no order
        parameters.termination_criteria.iteration_limit = iterations
        accuracy = parameters.termination_criteria.simple_optimality_criteria
        accuracy.eps_optimal_relative = accuracy.eps_optimal_absolute = TOLERANCE
        program = pdlp.qp_from_mpmodel_proto(self._proto(row_scale, cost_scale), relax_integer_variables=True)
        return pdlp.primal_dual_hybrid_gradient(program, parameters)

    def _scales(self, scaled_to: float = _SCALED_TO) -> tuple[NDArray[np.float64], float]:
        """Factors that bring each row and the costs to numbers that a solver in floats likes."""
        largest = np.ones(len(self.limits))
        np.maximum.at(largest, self._rows, np.abs(np.array(self._coefficients, float)))
        sizes = np.maximum(largest, np.abs(np.array(self.limits, float)))
        rows = np.where(largest > 1, scaled_to / sizes, 1.0)
        return rows, _SCALED_TO / max(1.0, float(sum(map(abs, self.cost))))

    def _proto(self, row_scale: NDArray[np.float64], cost_scale: float) -> Any:
        from ortools.linear_solver import linear_solver_pb2

        proto = linear_solver_pb2.MPModelProto()
        for lower, upper, cost in zip(self.lower, self.upper, self.cost, strict=True):
            scaled = cost * cost_scale
            proto.variable.add(lower_bound=lower, upper_bound=upper, objective_coefficient=scaled)
        for (terms, limit), scale in zip(self.rows(), row_scale.tolist(), strict=True):
            proto.constraint.add(
                var_index=[column for column, _ in terms],
                coefficient=[coefficient * scale for _, coefficient in terms],
                lower_bound=float("-inf"),
                upper_bound=limit * scale,
            )
        return proto


def _least_product(costs: NDArray[Any], lower: Sequence[int], upper: Sequence[int]) -> int:
    """The least that variables between these bounds can cost."""
    at = np.where(costs > 0, np.array(lower, object), np.array(upper, object))
    return int(np.dot(costs, at))
