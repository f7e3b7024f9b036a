"""What a sweep of a lattice does with its arrays, worked out once for all sweeps of the lattice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridremat.blocks.lattice import Lattice, at

Index = tuple[slice, ...]
"""A part of an array with an axis of length 2 for each value (1 where it is fixed), and one of limits."""


@dataclass(frozen=True)
class DropProgram:
    """The value of an axis stays (``kept``) or goes (``dropped``)."""

    axis: int
    kept: Index
    dropped: Index

    @staticmethod
    def of(bits: int, axis: int) -> DropProgram:
        """The drop of one of so many values."""
        return DropProgram(axis, at(bits, {axis: 1}), at(bits, {axis: 0}))


@dataclass(frozen=True)
class OpProgram:
    """An op that runs again.

    Attributes
    ----------
    time
        Its time units.
    level
        What is alive with all that it reads and makes.
    room
        How far that may be over the limit (units; below zero).
    takeovers
        Where a value that it writes its output over is gone, and the units that this saves.
    drops
        What may go afterwards.
    """

    op: int
    time: int
    level: Index
    room: int
    takeovers: tuple[tuple[Index, int], ...]
    drops: tuple[DropProgram, ...]


@dataclass(frozen=True)
class RowProgram:
    """Ops that run in a row before a step.

    ``reads`` and ``writes`` are axes. The row takes the sets ``before`` (all read alive, nothing written) to
    those ``after``, where its only output is alive; ``ops`` are its ops, the last one first.
    """

    row: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    before: Index
    after: Index
    ops: tuple[OpProgram, ...]


@dataclass(frozen=True)
class StepProgram:
    """A backward step, and the rows that may run before it, the last one first.

    Attributes
    ----------
    within
        The sets of this step among all sets.
    fresh
        How many leading axes are of no use after it.
    stays
        The sets that can be left by it, among its own.
    during, tail
        How far what is alive may be over the limit in the step and after it (units; at most zero).
    drops
        What it may free.
    missing
        The sets where something that it reads is missing, a part for each value.
    """

    within: tuple[int, ...]
    fresh: int
    stays: tuple[int | slice, ...]
    during: int
    tail: int
    drops: tuple[DropProgram, ...]
    missing: tuple[Index, ...]
    rows: tuple[RowProgram, ...]


def sweep_programs(lattice: Lattice) -> tuple[StepProgram, ...]:
    """The program of each step of a lattice."""
    return tuple(_step(lattice, j) for j in range(len(lattice.members)))


def _step(lattice: Lattice, j: int) -> StepProgram:
    step, bits = lattice.scale.steps[j], lattice.width[j]
    fresh = bits - (lattice.width[j + 1] if j + 1 < len(lattice.width) else 0)
    reads = lattice.axes(j, step.reads)
    return StepProgram(
        within=(0,) * (len(lattice.values) - bits),
        fresh=fresh,
        stays=tuple(int(axis in reads) for axis in range(fresh)),
        during=-step.during,
        tail=-step.tail,
        drops=tuple(DropProgram.of(bits, axis) for axis in reads if axis >= fresh),
        missing=tuple(at(bits, {axis: 0}) for axis in reads),
        rows=tuple(_row(lattice, j, row) for row in reversed(lattice.members[j])),
    )


def _row(lattice: Lattice, j: int, row: tuple[int, ...]) -> RowProgram:
    bits, writes = lattice.width[j], lattice.axes(j, lattice.problem.ops[row[-1]].writes)
    reads: dict[int, int] = {}
    ops = tuple(_ops(lattice, j, row, writes, reads))
    return RowProgram(
        row=row,
        reads=tuple(reads),
        writes=writes,
        before=at(bits, reads | dict.fromkeys(writes, 0)),
        after=at(bits, {writes[0]: 1} if len(writes) == 1 else {}),
        ops=ops,
    )


def _ops(
    lattice: Lattice, j: int, row: tuple[int, ...], writes: tuple[int, ...], reads: dict[int, int]
) -> Iterator[OpProgram]:
    """The ops of a row, the last one first; what they read is added to ``reads``, each axis with a 1."""
    bits = lattice.width[j]
    for c in reversed(row):
        fresh = [axis for axis in lattice.axes(j, lattice.problem.ops[c].reads) if axis not in reads]
        last = c == row[-1]
        reads |= dict.fromkeys(fresh, 1)
        yield OpProgram(
            op=c,
            time=lattice.scale.time_units[c],
            level=at(bits, reads | dict.fromkeys(writes, int(last))),
            room=_room(lattice, j, row, c),
            takeovers=tuple(_takeovers(lattice, j, c, fresh)),
            drops=tuple(
                DropProgram.of(bits, axis) for axis in (*(writes if last and len(writes) > 1 else ()), *fresh)
            ),
        )


def _room(lattice: Lattice, j: int, row: tuple[int, ...], c: int) -> int:
    scale, ops = lattice.scale, lattice.problem.ops
    units = scale.value_units
    inner = {d for k in row[:-1] for d in ops[k].writes if not lattice.has_axis(d)}
    aside = sum(units[d] for d in ops[c].writes if not lattice.axes(j, (d,)))
    aside += sum(units[d] for d in ops[c].reads if d in inner)
    aside -= max((units[d] for d in ops[c].overwrites if d in inner), default=0)  # it dies here
    return -(scale.steps[j - 1].after if j else scale.gradient_in_units) - scale.temp_units[c] - aside


def _takeovers(lattice: Lattice, j: int, c: int, fresh: list[int]) -> Iterator[tuple[Index, int]]:
    """What op c may write its output over, if that goes with it.

    That it dies there is taken for granted: the simulator knows.
    """
    for d in lattice.problem.ops[c].overwrites:
        for axis in lattice.axes(j, (d,)):
            if axis in fresh:
                yield at(lattice.width[j], {axis: 0}), lattice.scale.value_units[d]
