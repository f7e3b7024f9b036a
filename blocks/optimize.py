"""Solve the model of one block within given limits and return the option, replayed exactly."""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from hybridremat.blocks.model import BlockModel, fix
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
        Nanoseconds that no option of the model can undercut (up to the rounding of times to units).
    proved
        Whether the search ended: the option is the fastest, or there is none.
    """

    option: Option | None
    bound: int
    proved: bool

    @property
    def infeasible(self) -> bool:
        """Proved that nothing fits the limits."""
        return self.proved and self.option is None


def minimize_time(model: BlockModel, saved: int, peak: int, *, effort: float) -> Answer:
    """Least recomputation time within ``saved`` bytes and ``peak`` bytes at the peak of either phase.

    ``effort`` limits the search in CP-SAT's deterministic time, so that the answer is reproducible.
    """
    limits = ((model.saved_limit, saved), (model.forward_limit, peak), (model.backward_limit, peak))
    for variable, limit in limits:
        units = model.scale.floor(limit)
        fix(model.model, variable, (units, units))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    # Blocks are tiny: the linear relaxation, probing and symmetry detection cost more than they save.
    solver.parameters.linearization_level = 1
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model.model)
    proved = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, 0, proved)
    option = _option(model, solver)
    if status == cp_model.OPTIMAL:
        return Answer(option, option.time, True)
    return Answer(option, int(solver.best_objective_bound * model.scale.tick), False)


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
