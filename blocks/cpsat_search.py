"""CP-SAT solves of one block: least time within given limits, with as few solves as possible.

Least time falls as limits grow. So what is proved at one pair of limits says much about others: an option
that fits tighter limits and is no slower than a bound proved at looser ones is optimal there too, and what is
infeasible stays infeasible when limits tighten. Only questions left open by that go to CP-SAT, and what it
finds is replayed exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf
from typing import Final

from ortools.sat.python import cp_model

from hybridremat.blocks.cpsat_model import BlockModel, fix
from hybridremat.blocks.scale import scale_block
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import LOADING, BlockProblem, Option

COPIES = (2, 3)
"""C, the most recomputations of one op: the second only where the first leaves no option."""

MOST_LOADING: Final = 4.0
"""The same of all solves of a family: a block of very many ops has few solves."""

Limits = tuple[int, int]
"""Most saved bytes, and most bytes at the peak of either phase."""


@dataclass(frozen=True)
class SolveResult:
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


def minimize_time(model: BlockModel, saved: int, peak: int, *, floor: int, effort: float) -> SolveResult:
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
        return SolveResult(None, 0, proved, spent)
    option = _option(model, solver)
    return SolveResult(option, max(floor, ceil(solver.best_objective_bound - 0.5)), proved, spent)


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


@dataclass
class BlockSearch:
    """One block's models, its answers so far and the options found.

    Attributes
    ----------
    tolerance
        Nanoseconds by which an option may miss the least time before it is worth a solve.
    seconds
        Of a nominal core: once they are spent, what is known answers all that is asked.
    """

    problem: BlockProblem
    solo: bool = False
    tolerance: int = 0
    effort: float = 1.0
    seconds: float = inf
    options: list[Option] = field(default_factory=list)
    solves: int = 0
    unproved: int = 0
    spent: float = 0.0

    def __post_init__(self) -> None:
        self.scale = scale_block(self.problem)
        self._models: dict[int, BlockModel] = {}
        self._asked: set[Limits] = set()
        self._bounds: dict[int, list[tuple[Limits, int]]] = {copies: [] for copies in COPIES}
        self._infeasible: dict[int, list[Limits]] = {copies: [] for copies in COPIES}

    @property
    def exhausted(self) -> bool:
        """Whether nothing more is to be solved: there is an option, and the time is up."""
        loaded = self.solves * LOADING * len(self.problem.ops) * len(self.problem.steps)
        return bool(self.options) and (loaded > MOST_LOADING or loaded + self.spent > self.seconds)

    def best(self, limits: Limits) -> Option | None:
        """The fastest known option within ``limits`` (bytes)."""
        fitting = [o for o in self.options if _fits(o, limits)]
        return min(fitting, key=lambda o: (o.time, o.saved_bytes, o.backward_peak), default=None)

    def query(self, limits: Limits) -> Option | None:
        """The fastest option within ``limits``; None if there is none (or none was found in time)."""
        if limits in self._asked or self.exhausted:
            # The search may have ended without a proof: asking again would end alike.
            return self.best(limits)
        self._asked.add(limits)
        for copies in COPIES:
            if any(_within(limits, known) for known in self._infeasible[copies]):
                continue
            best = self.best(limits)
            floor = max((time for known, time in self._bounds[copies] if _within(limits, known)), default=0)
            if best is not None and best.time <= floor * self.scale.tick + self.tolerance:
                return best
            answer = self._solve(limits, copies, floor)
            if answer.option is not None or best is not None:
                break
        return self.best(limits)

    def _solve(self, limits: Limits, copies: int, floor: int) -> SolveResult:
        if copies not in self._models:
            self._models[copies] = BlockModel(self.problem, self.scale, copies, solo=self.solo)
        answer = minimize_time(self._models[copies], *limits, floor=floor, effort=self.effort)
        self.solves += 1
        self.unproved += not answer.proved
        self.spent += answer.effort
        if answer.option is not None:
            self.options.append(answer.option)
            self._bounds[copies].append((limits, answer.bound))
        elif answer.proved:
            self._infeasible[copies].append(limits)
        return answer


def _fits(option: Option, limits: Limits) -> bool:
    return option.saved_bytes <= limits[0] and max(option.forward_peak, option.backward_peak) <= limits[1]


def _within(limits: Limits, looser: Limits) -> bool:
    return limits[0] <= looser[0] and limits[1] <= looser[1]
