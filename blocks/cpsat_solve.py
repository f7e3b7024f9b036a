"""Solve the model of one block within given limits and return the option, replayed exactly."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ortools.sat.python import cp_model

from hybridremat.blocks.cpsat_model import BlockModel, fix
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import Option


@dataclass(frozen=True)
class Answer:
    """What one solve said.

    Attributes
    ----------
    option
        The best option found, or None.
    bound
        Time units that no option of the model can undercut.
    proved
        Whether the search ended: the option is the fastest, or there is none.
    effort
        Deterministic seconds spent.
    """

    option: Option | None
    bound: int
    proved: bool
    effort: float

    @property
    def infeasible(self) -> bool:
        """Proved that nothing fits the limits."""
        return self.proved and self.option is None


def minimize_time(model: BlockModel, saved: int, peak: int, *, floor: int, effort: float) -> Answer:
    """Least recomputation time within ``saved`` bytes and ``peak`` bytes at the peak of either phase.

    ``floor`` is a known lower bound in time units: a solution that reaches it needs no further proof.
    ``effort`` limits the search in CP-SAT's deterministic time, so that the answer is reproducible.
    """
    limits = ((model.saved_limit, saved), (model.forward_limit, peak), (model.backward_limit, peak))
    for variable, limit in limits:
        units = model.scale.floor(limit)
        fix(model.model, variable, (units, units))
    fix(model.model, model.time, (floor, model.slowest))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    # Blocks are tiny: the linear relaxation, probing and symmetry detection cost more than they save.
    solver.parameters.linearization_level = 0
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.max_deterministic_time = effort
    # Ctrl-C would end the search early, pass for a result, and be lost to the program.
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(model.model)
    spent = solver.response_proto.deterministic_time
    proved = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, 0, proved, spent)
    option = _option(model, solver)
    return Answer(option, max(floor, ceil(solver.best_objective_bound - 0.5)), proved, spent)


def _option(model: BlockModel, solver: cp_model.CpSolver) -> Option:
    recompute: list[list[int]] = [[] for _ in range(model.m)]
    for c, copies in model.copies.items():
        for copy in copies:
            if solver.value(copy.present):
                recompute[solver.value(copy.stage)].append(c)
    return simulate_option(
        model.problem,
        [d for d, saved in model.saved.items() if solver.value(saved)],
        [c for c, runs in model.optional.items() if solver.value(runs)],
        recompute,
        solo=model.solo,
    )
