"""The retention-interval model of one block (after Moccasin, ICML 2023, on a staged, fixed-order backward).

Forward ops c = 0…n−1 and backward steps b_0…b_{m−1} stand in fixed order. Recomputation is indexed by the
backward step before which it happens: stage j holds one slot for each op, one for b_j, and one for the ops
merged into b_j that need no forward value (its tail). With W = n + 2:

    pos(j, c) = jW + c        pos(b_j) = jW + n        pos(tail_j) = jW + n + 1

A value that is saved keeps memory over [0, E_d], each recomputed copy from its op to its last reader. The
three limits are integer variables whose domains are fixed before each solve, so the model is built once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ortools.sat.python import cp_model

from hybridremat.blocks.scale import Scale
from hybridremat.blocks.types import BlockProblem

Literal = cp_model.IntVar


@dataclass(frozen=True)
class _Copy:
    """The q-th recomputation of an op: whether it happens (r_cq), where it starts, where its outputs end."""

    present: Literal
    stage: cp_model.IntVar
    start: cp_model.LinearExprT
    ends: dict[int, cp_model.IntVar]


class BlockModel:
    """CP-SAT variables and constraints of one block.

    Parameters
    ----------
    problem, scale
        The block and its units.
    copies
        C, the most recomputations of one op.
    solo
        Model the solo family: nothing saved, no forward, outputs not needed.

    Attributes
    ----------
    saved
        s_d for every value that the backward can use. Outputs are saved in any case: theirs says whether the
        backward reads the saved copy, which otherwise is gone when the backward begins.
    optional
        p_c for every optional op.
    copies
        r_cq with its stage t_cq, for every op that the backward can need.
    saved_limit, forward_limit, backward_limit
        M_save, M_fwd and M_bwd in units.
    time
        The objective, in time units.
    """

    def __init__(self, problem: BlockProblem, scale: Scale, copies: int = 2, *, solo: bool = False) -> None:
        self.problem, self.scale, self.solo = problem, scale, solo
        self.model = cp_model.CpModel()
        self.n, self.m = len(problem.ops), len(problem.steps)
        self.width = self.n + 2
        self.horizon = self.m * self.width
        self.producer = problem.producers()
        self.stages = self._stages()
        self.useful = {d for d, c in self.producer.items() if self.stages[c]} - problem.never_saved
        self.outputs = frozenset() if solo else problem.outputs
        most = scale.most_units
        self.saved_limit = self.model.new_int_var(0, most, "M_save")
        self.forward_limit = self.model.new_int_var(0, most, "M_fwd")
        self.backward_limit = self.model.new_int_var(0, most, "M_bwd")
        self.intervals: list[cp_model.IntervalVar] = []
        self.demands: list[int] = []
        self.saved: dict[int, Literal] = {}
        self.saved_end: dict[int, cp_model.IntVar] = {}
        self.optional: dict[int, Literal] = {}
        if not solo:
            self._add_saved()
            self._add_forward_peak()
        self.copies = {c: self._add_copies(c, copies) for c in range(self.n)}
        self._add_saved_before_copies()
        self._add_readers()
        self._add_gradients()
        self.model.add_cumulative(self.intervals, self.demands, self.backward_limit)
        cost = self._time()
        self.slowest = copies * sum(scale.time_units)
        self.time = self.model.new_int_var(0, self.slowest, "time")
        self.model.add(self.time == cost)
        self.model.minimize(self.time)

    def _stages(self) -> list[list[int]]:
        """For every op, the stages j such that it is an ancestor of what b_j reads (or reads itself)."""
        stages: list[list[int]] = [[] for _ in range(self.n)]
        for j in range(self.m):
            for c in self.problem.ancestors(j):
                stages[c].append(j)
        return stages

    def _last_read(self, d: int) -> int:
        """Last position at which a step or a recomputation can read value d."""
        steps = [j * self.width + self.n for j, step in enumerate(self.problem.steps) if d in step.reads]
        again = [
            self.stages[u][-1] * self.width + u
            for u, op in enumerate(self.problem.ops)
            if d in op.reads and self.stages[u]
        ]
        return max(steps + again, default=0)

    def _add_saved(self) -> None:
        """s_d and p_c: saving an optional op's output makes it run in the forward, with what it reads."""
        model, ops = self.model, self.problem.ops
        for c, op in enumerate(ops):
            if op.optional:
                self.optional[c] = model.new_bool_var(f"p{c}")
        for d in sorted(self.useful):
            self.saved[d] = model.new_bool_var(f"s{d}")
            self.saved_end[d] = model.new_int_var(0, self._last_read(d), f"E{d}")
            size = model.new_int_var(1, self.horizon, "")
            self._occupy(0, size, self.saved_end[d] + 1, self.saved[d], self.scale.value_units[d])
            if self.producer[d] in self.optional:
                model.add_implication(self.saved[d], self.optional[self.producer[d]])
        for c, runs in self.optional.items():
            for source in {self.producer[d] for d in ops[c].reads} & self.optional.keys():
                model.add_implication(runs, self.optional[source])
        free = [d for d in self.saved if d not in self.outputs]
        self.saved_units = sum(self.scale.value_units[d] * self.saved[d] for d in free)
        fixed = sum(self.scale.value_units[d] for d in self.outputs)
        model.add(self.saved_units + fixed <= self.saved_limit)

    def _occupy(
        self,
        start: cp_model.LinearExprT,
        size: cp_model.LinearExprT,
        end: cp_model.LinearExprT,
        present: Literal,
        demand: int,
    ) -> None:
        if demand:
            self.intervals.append(self.model.new_optional_interval_var(start, size, end, present, ""))
            self.demands.append(demand)

    def _add_forward_peak(self) -> None:
        """Exact and linear: at op k, what was made and is still read, its workspace, and what is saved."""
        ops, units = self.problem.ops, self.scale
        for k, op in enumerate(ops):
            fixed, terms = 0, []
            if op.optional:
                terms.append(units.temp_units[k] * self.optional[k])
            else:
                fixed += units.temp_units[k]
            for d, c in self.producer.items():
                if c > k:
                    continue
                alive = self._alive_in_forward(d, k)
                if alive is True:
                    fixed += units.value_units[d]
                elif alive is not False:
                    terms.append(units.value_units[d] * alive)
            self.model.add(sum(terms) + fixed <= self.forward_limit)

    def _alive_in_forward(self, d: int, k: int) -> Literal | bool:
        """Whether value d, made at or before op k, is alive at op k."""
        c = self.producer[d]
        readers = [u for u, op in enumerate(self.problem.ops) if d in op.reads and u >= k]
        stays = d in self.outputs or d in self.problem.held_forward
        if c == k:
            return self.optional.get(c, True)
        if c not in self.optional and (stays or any(u not in self.optional for u in readers)):
            return True
        causes = [self.optional[u] for u in readers if u in self.optional]
        if c in self.optional and stays:
            causes.append(self.optional[c])
        if d in self.saved:
            causes.append(self.saved[d])
        if len(causes) <= 1:
            return causes[0] if causes else False
        alive = self.model.new_bool_var("")
        for cause in causes:
            self.model.add_implication(cause, alive)
        return alive

    def _add_copies(self, c: int, copies: int) -> list[_Copy]:
        """r_cq and t_cq: one copy after the other, in later stages."""
        op, stages, model = self.problem.ops[c], self.stages[c], self.model
        if not op.recomputable and not op.optional:
            return []
        made: list[_Copy] = []
        for _ in range(min(copies if op.recomputable else 1, len(stages))):
            present = model.new_bool_var(f"r{c}_{len(made)}")
            stage = model.new_int_var_from_domain(cp_model.Domain.from_values(stages), f"t{c}_{len(made)}")
            start = stage * self.width + c
            ends = {}
            for d in op.writes:
                last = max(self._last_read(d), stages[-1] * self.width + c)
                ends[d] = model.new_int_var(c, last, f"e{d}_{len(made)}")
                size = model.new_int_var(1, self.horizon, "")
                self._occupy(start, size, ends[d] + 1, present, self.scale.value_units[d])
            if self.scale.temp_units[c]:
                self._occupy(start, 1, start + 1, present, self.scale.temp_units[c])
            if made:
                before = made[-1]
                model.add_implication(present, before.present)
                model.add(stage >= before.stage + 1).only_enforce_if(present)
                for d in op.writes:
                    model.add(before.ends[d] < start).only_enforce_if(present)
            made.append(_Copy(present, stage, start, ends))
        if not op.recomputable and c in self.optional:
            model.add_bool_or([self.optional[c].negated(), made[0].present.negated()])
        return made

    def _add_saved_before_copies(self) -> None:
        for d, saved in self.saved.items():
            for copy in self.copies[self.producer[d]][:1]:
                self.model.add(self.saved_end[d] < copy.start).only_enforce_if([saved, copy.present])

    def _add_readers(self) -> None:
        """Every reader finds a copy: steps always, recomputations if they happen."""
        for j, step in enumerate(self.problem.steps):
            for d in step.reads:
                self._add_reader(d, j * self.width + self.n, None)
        for c, copies in self.copies.items():
            for copy in copies:
                for d in self.problem.ops[c].reads:
                    self._add_reader(d, copy.start, copy.present)

    def _add_reader(self, d: int, position: cp_model.LinearExprT, reads: Literal | None) -> None:
        model = self.model
        found: list[cp_model.LiteralT] = [] if reads is None else [reads.negated()]
        if d in self.saved:
            use = model.new_bool_var("")
            model.add_implication(use, self.saved[d])
            model.add(self.saved_end[d] >= position).only_enforce_if(use)
            found.append(use)
        for copy in self.copies[self.producer[d]]:
            use = model.new_bool_var("")
            model.add_implication(use, copy.present)
            model.add(copy.start <= position).only_enforce_if(use)
            model.add(copy.ends[d] >= position).only_enforce_if(use)
            found.append(use)
        model.add_bool_or(found)

    def _add_gradients(self) -> None:
        """Fixed demand: gradients alive before b_j, while it runs, and while its tail runs."""
        before = self.scale.gradient_in_units
        for j, step in enumerate(self.scale.steps):
            place = j * self.width
            for start, size, demand in (
                (place, self.n, before),
                (place + self.n, 1, step.during),
                (place + self.n + 1, 1, max(step.tail, step.after)),
            ):
                if demand and size:
                    self.intervals.append(self.model.new_fixed_size_interval_var(start, size, ""))
                    self.demands.append(demand)
            before = step.after

    def _time(self) -> cp_model.LinearExprT:
        """Σ cost_c r_cq + Σ cost_c p_c."""
        terms = [
            self.scale.time_units[c] * copy.present for c, copies in self.copies.items() for copy in copies
        ]
        terms += [self.scale.time_units[c] * runs for c, runs in self.optional.items()]
        return sum(terms)


def fix(model: cp_model.CpModel, variable: cp_model.IntVar, values: Iterable[int]) -> None:
    """Replace a variable's domain by ``values`` (lowest and highest)."""
    domain = model.proto.variables[variable.index].domain
    domain.clear()
    domain.extend(values)
