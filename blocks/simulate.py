"""Replay one way to run a block, op by op, and return its exact bytes and nanoseconds.

The judge of every option: it knows nothing of the solver's model, only the rules of memory. A value is one
storage; every run of its producer makes a new version, which dies after its last reader. Outputs and released
step outputs live to the end of the block's forward. An op may write its output over a version that dies with
it; of backward steps, what they overwrite is not in their bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hybridremat.blocks.types import BlockProblem, Option


def simulate_option(
    problem: BlockProblem,
    saved: Collection[int],
    optional_forward: Collection[int],
    recompute: Sequence[Sequence[int]],
    *,
    solo: bool = False,
) -> Option:
    """Replay one option of ``problem``.

    Parameters
    ----------
    problem
        The block.
    saved
        Local values kept from the forward for the backward. Outputs are always saved and need not be named;
        a value that the backward never reads from the forward is not kept, whether named or not.
    optional_forward
        Optional ops that run in the forward.
    recompute
        For each backward step, the local ops that run before it, in order.
    solo
        The block's forward has run before and left nothing: only the recomputations and the backward run,
        and the outputs are not needed.

    Returns
    -------
    Option
        With exact figures: saved bytes, forward and backward peak (bytes), time (nanoseconds).

    Raises
    ------
    ValueError
        If an op or step reads a value that is not alive, an op runs twice that must not, an index is out of
        range, a forward op is named as optional, a solo option saves something, or the backward reads what
        it must not read as the forward left it.
    """
    _check_choice(problem, saved, optional_forward, recompute, solo)
    simulation = _Simulation(problem, frozenset(saved) | problem.outputs)
    if not solo:
        for c, op in enumerate(problem.ops):
            if not op.optional or c in optional_forward:
                simulation.run(c, gradient=0)
    split = simulation.close_forward()
    gradient = problem.gradient_in
    for j, step in enumerate(problem.steps):
        for c in recompute[j]:
            simulation.run(c, gradient=gradient)
        simulation.step(j)
        gradient = step.after
    levels = simulation.levels()
    crossing = sorted(v.value for v in simulation.versions if v.birth < split <= v.last)
    if not problem.never_saved.isdisjoint(crossing):
        raise ValueError(f"values {sorted(problem.never_saved.intersection(crossing))} must not be saved")
    kept = sorted(set(crossing) | (frozenset() if solo else problem.outputs))
    again = [c for cs in recompute for c in cs] + ([] if solo else sorted(set(optional_forward)))
    return Option(
        saved_bytes=sum(problem.value_bytes[d] for d in kept),
        forward_peak=max(levels[:split], default=0),
        backward_peak=max(levels[split:], default=problem.gradient_in),
        time=sum(problem.ops[c].time for c in again),
        saved=tuple(kept),
        optional_forward=tuple(sorted(set(optional_forward))),
        recompute=tuple(tuple(cs) for cs in recompute),
        idle=frozenset() if solo else problem.skip_values.difference(crossing),
    )


def _check_choice(
    problem: BlockProblem,
    saved: Collection[int],
    optional_forward: Collection[int],
    recompute: Sequence[Sequence[int]],
    solo: bool,
) -> None:
    if len(recompute) != len(problem.steps):
        raise ValueError(f"{len(recompute)} lists of recomputations for {len(problem.steps)} backward steps")
    for d in saved:
        if not 0 <= d < len(problem.value_bytes):
            raise ValueError(f"saved value {d} does not exist")
    for c in (*optional_forward, *(c for cs in recompute for c in cs)):
        if not 0 <= c < len(problem.ops):
            raise ValueError(f"op {c} does not exist")
    for c in optional_forward:
        if not problem.ops[c].optional:
            raise ValueError(f"op {c} is not optional")
    if solo and (saved or optional_forward):
        raise ValueError("a solo option saves nothing and runs no op in the forward")
    _check_runs_once(problem, optional_forward, recompute)


def _check_runs_once(
    problem: BlockProblem, optional_forward: Collection[int], recompute: Sequence[Sequence[int]]
) -> None:
    """A solo option comes after the block's first forward, so a forward op counts as run there too."""
    once = [c for c, op in enumerate(problem.ops) if not op.recomputable]
    again = [c for cs in recompute for c in cs]
    for c in once:
        runs = again.count(c) + (not problem.ops[c].optional or c in optional_forward)
        if runs > 1:
            raise ValueError(f"op {c} must not run more than once, but would run {runs} times")


@dataclass(slots=True)
class _Version:
    """One run's copy of a value, alive at events ``birth`` to ``last``; ``stays``: to the forward's end."""

    value: int
    birth: int
    last: int
    stays: bool = False


@dataclass
class _Simulation:
    """Events so far (their bytes beside the block's values) and the versions of the values."""

    problem: BlockProblem
    saved: frozenset[int]
    extra: list[int] = field(default_factory=list)
    tails: dict[int, int] = field(default_factory=dict)
    versions: list[_Version] = field(default_factory=list)
    candidates: dict[int, list[_Version]] = field(default_factory=dict)
    split: int = 0
    current: dict[int, _Version] = field(default_factory=dict)

    def _read(self, values: Sequence[int], reader: str) -> None:
        for d in values:
            if d not in self.current:
                raise ValueError(f"{reader} reads value {d}, which is not alive")
            self.current[d].last = len(self.extra)

    def run(self, c: int, gradient: int) -> None:
        """Run forward op ``c`` while ``gradient`` bytes of gradients are alive."""
        op = self.problem.ops[c]
        self._read(op.reads, f"op {c}")
        self.candidates[len(self.extra)] = [self.current[d] for d in op.overwrites]
        for d in op.writes:
            self.current[d] = _Version(d, len(self.extra), len(self.extra))
            self.versions.append(self.current[d])
        self.extra.append(op.temp + gradient)

    def step(self, j: int) -> None:
        """Run backward step ``j``."""
        step = self.problem.steps[j]
        self._read(step.reads, f"backward step {j}")
        self.tails[len(self.extra)] = step.tail
        self.extra.append(step.during)

    def close_forward(self) -> int:
        """End the forward: what is not saved is gone. Returns the number of forward events."""
        stay = self.problem.outputs | self.problem.held_forward
        for version in self.versions:
            if version.value in stay:
                version.last = len(self.extra) - 1
                version.stays = True
        self.current = {d: version for d, version in self.current.items() if d in self.saved}
        self.split = len(self.extra)
        return self.split

    def _overwritten(self) -> dict[int, int]:
        """Bytes of what each event writes over."""
        sizes = self.problem.value_bytes
        found = {}
        for now, versions in self.candidates.items():
            dying = [v for v in versions if v.last == now and not v.stays]
            if dying:
                found[now] = sizes[dying[0].value]
        return found

    def levels(self) -> list[int]:
        """Bytes at every event; a step's tail runs when the values that only it still needed are gone."""
        born = [0] * len(self.extra)  # bytes of versions that are alive from an event on
        dying = [0] * len(self.extra)  # of those that are alive up to it
        for version in self.versions:
            size = self.problem.value_bytes[version.value]
            born[version.birth] += size
            dying[version.last] += size
        alive = list(accumulate(born[now] - (dying[now - 1] if now else 0) for now in range(len(born))))
        levels = [a + e for a, e in zip(alive, self.extra, strict=True)]
        for now, size in self._overwritten().items():
            levels[now] -= size
        for now, tail in self.tails.items():
            levels[now] = max(levels[now], alive[now] - dying[now] + tail)
        return levels
