"""One block as integers: what solver, simulator and chain program exchange, and how much work to spend.

A :class:`BlockProblem` is canonical: it holds no global ids, so identical blocks (the layers of a
Transformer) are equal and hash alike. A :class:`BlockBinding` ties it to the ops of one place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal


@dataclass(frozen=True)
class ForwardOp:
    """Forward or optional op c: local value indexes it reads and writes, its time and workspace.

    ``overwrites``: what its one output may be written over, of the same size, where that dies with the op (of
    several the first one).
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    time: int
    temp: int
    optional: bool = False
    recomputable: bool = True
    overwrites: tuple[int, ...] = ()


@dataclass(frozen=True)
class BackwardStep:
    """Backward step b_j: adjacent backward ops merged, because they need the same forward values.

    Attributes
    ----------
    reads
        Local values that the step needs.
    during
        Most gradient bytes alive while ops that need ``reads`` run, workspace included, and without what they
        write over.
    tail
        Most gradient bytes alive while the merged ops that need no forward value run (0 if none):
        ``reads`` may be gone by then.
    after
        Gradient bytes alive when the step is over.
    """

    reads: tuple[int, ...]
    during: int
    tail: int
    after: int


@dataclass(frozen=True)
class BlockProblem:
    """One block in canonical form.

    ``value_bytes[d]`` are the bytes of local value d; ``ops`` are the forward and optional ops in
    execution order; ``outputs`` are the local values that leave the block (kept with every ordinary
    option, dropped by solo options); ``held_forward`` live to the end of the block's first forward
    (released step outputs) without being saved; ``gradient_in`` are the gradient bytes that enter;
    ``skip_values`` are outputs that other blocks may free before this block's backward: to leave them unread
    there can pay; ``never_saved`` are values that the backward must not read as the forward left them.

    Values that are alive anyway (block inputs, the chain's ``always``) are not part of the block.
    """

    value_bytes: tuple[int, ...]
    ops: tuple[ForwardOp, ...]
    steps: tuple[BackwardStep, ...]
    outputs: frozenset[int]
    gradient_in: int
    held_forward: frozenset[int] = frozenset()
    skip_values: frozenset[int] = frozenset()
    never_saved: frozenset[int] = frozenset()

    def producers(self) -> dict[int, int]:
        """For each value the op that writes it."""
        return {d: c for c, op in enumerate(self.ops) for d in op.writes}

    def ancestors(self, step: int) -> set[int]:
        """Ops whose outputs backward step ``step`` reads, and those that rebuilding them needs."""
        producer = self.producers()
        needed = {producer[d] for d in self.steps[step].reads}
        for c in reversed(range(len(self.ops))):
            if c in needed:
                needed |= {producer[d] for d in self.ops[c].reads}
        return needed

    @property
    def for_rerun(self) -> BlockProblem:
        """The block where its forward runs again within the backward: what it saves there may be anything."""
        return replace(self, never_saved=frozenset())

    def rerun_only(self, option: Option) -> bool:
        """Whether an ordinary option saves what must not be saved: it is only for a block that runs again."""
        return not self.never_saved.isdisjoint(option.saved)


@dataclass(frozen=True)
class BlockBinding:
    """A problem at one place of the chain: global ids of its ops, values and backward ops."""

    problem: BlockProblem
    ops: tuple[int, ...]
    values: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Option:
    """One way to run a block, with exact figures from the simulator (bytes, nanoseconds).

    Attributes
    ----------
    saved_bytes
        Alive after the block's forward: saved values and outputs.
    forward_peak, backward_peak
        Peak of each phase, without the block's input; the backward one with saved values and
        gradients (``gradient_in`` and those produced, without parameter gradients already counted
        for later blocks).
    time
        Extra time: recomputations, and optional ops in either phase.
    saved
        Local values saved (outputs included; for a solo option empty).
    optional_forward
        Optional ops that run in the forward.
    recompute
        For each backward step, the local ops run before it, in order.
    idle
        Outputs among the problem's ``skip_values`` that its backward does not read as the forward left them.
    """

    saved_bytes: int
    forward_peak: int
    backward_peak: int
    time: int
    saved: tuple[int, ...]
    optional_forward: tuple[int, ...]
    recompute: tuple[tuple[int, ...], ...]
    idle: frozenset[int] = frozenset()


@dataclass(frozen=True)
class OptionSet:
    """Pareto set of one block: ordinary options, and solo options (nothing saved, output not made).

    Some of the ordinary ones may be for reruns only (:meth:`BlockProblem.rerun_only`).

    ``solves`` counts the solves (or the peak limits, where one sweep solves for all saved sizes) and
    ``unproved`` those that ended without a proof of optimality.
    """

    options: tuple[Option, ...]
    solo: tuple[Option, ...]
    solves: int = 0
    unproved: int = 0


LOADING: Final = 1e-4
"""Seconds of a nominal core that CP-SAT takes before it searches, for each pair of an op and a step."""

BlockSolver = Literal["auto", "cp-sat", "exact"]
"""What solves blocks: the exact program over sets of values, CP-SAT, or for each block what does better."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How fine to look. Counts and deterministic time only: the result must not depend on the machine.

    Attributes
    ----------
    solves, solo_solves
        Most solves for the ordinary and the solo family.
    resolution, limit_resolution
        Smallest side of a rectangle, and smallest distance of two peak limits of a lattice, as a share of the
        whole range.
    tolerance
        Time difference not worth a solve, as a share of the block's forward time.
    deterministic_time, family_time
        Limits of one solve, and of all solves of a family, in CP-SAT's deterministic seconds.
    limits, least_limits
        Most and least peak limits that a lattice is swept for.
    entries
        Array entries that all sweeps of a lattice may touch once they are more than the least limits.
    fused_above
        Array entries of one sweep beyond which ops that work for the next one alone run together with it.
    solved_above, most_values
        Array entries of one sweep, and values of a lattice, beyond which more ops run together, and CP-SAT
        solves where that does not suffice. The largest block of T5 with dropout, nearly at both, takes 5 s
        and 320 MB.
    exact_above, exact_values
        The same where the exact program is asked for: beyond these it is not tried.
    """

    solves: int = 240
    solo_solves: int = 40
    resolution: float = 0.01
    tolerance: float = 0.001
    deterministic_time: float = 0.3
    family_time: float = 3.0
    limit_resolution: float = 0.00001
    limits: int = 128
    least_limits: int = 16
    entries: int = 500_000_000
    fused_above: int = 300_000
    solved_above: int = 130_000_000
    most_values: int = 22
    exact_above: int = 260_000_000
    exact_values: int = 23
