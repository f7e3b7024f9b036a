"""Which of several schedules runs in which step, until the best is known: successive halving.

K. Jamieson, A. Talwalkar: Non-stochastic best arm identification and hyperparameter optimization, 2016. Steps
are real ones, so the schedule that was planned (number 0) is in every round, to be compared with at the end.
In a round each schedule has its turns in rotation, so that what drifts hits all alike; the slower half of the
others is out at its end. A schedule's time is the least of its turns: what disturbs a step only adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MOST: Final = 8
"""Schedules that take turns at most."""

LEAST_TURNS: Final = 2
"""Turns of a schedule in each round: the first one of all may be slower, as caches are cold."""

MOST_STEPS: Final = 10_000
"""Steps that are given to a comparison at most."""

LEAST_STEPS: Final = 2 * LEAST_TURNS
"""Steps in which two schedules can be compared."""


@dataclass(frozen=True)
class Figure:
    """Seconds of a schedule: the least of its turns, and how far the next is from it (the noise)."""

    seconds: float
    noise: float

    @staticmethod
    def of(turns: Sequence[float]) -> Figure:
        """The figure of what its turns took."""
        least, *others = sorted(turns)
        return Figure(least, min(others, default=least) - least)


def round_sizes(count: int) -> list[int]:
    """How many of so many schedules are in each round: about half of them in each next one, at last two."""
    sizes = [count]
    while sizes[-1] > 2:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes


def contestants(steps: int) -> int:
    """How many schedules can take turns in so many steps."""
    fitting = (n for n in range(MOST, 2, -1) if LEAST_TURNS * sum(round_sizes(n)) <= steps)
    return next(fitting, 2)


def turns_of_rounds(count: int, steps: int) -> list[int]:
    """The turns of each schedule in each round: as equal in steps as they can be."""
    sizes = round_sizes(count)
    turns = [LEAST_TURNS] * len(sizes)
    left = steps - LEAST_TURNS * sum(sizes)
    while fitting := [n for n, size in enumerate(sizes) if size <= left]:
        shortest = min(fitting, key=lambda n: sizes[n] * turns[n])
        turns[shortest] += 1
        left -= sizes[shortest]
    return turns


@dataclass
class Halving:
    """Turns of ``count`` schedules, at least two, in ``steps`` steps.

    Attributes
    ----------
    times
        Seconds of the turns of each schedule.
    figures
        Of each schedule, at the end of the last round that it was in.
    running
        The schedules that are not out.
    winner
        The schedule that stays; None as long as that is not known.
    """

    count: int
    steps: int
    times: list[list[float]] = field(init=False)
    figures: dict[int, Figure] = field(default_factory=dict)
    running: list[int] = field(init=False)
    winner: int | None = None
    _turns: list[int] = field(init=False)
    _order: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.times = [[] for _ in range(self.count)]
        self.running = list(range(self.count))
        self._turns = turns_of_rounds(self.count, self.steps)
        self._order = self._rotation()

    def _rotation(self) -> list[int]:
        """The order of the round's turns.

        An even number of schedules is rotated from pass to pass, so that none has every second step of a loop
        that adds up the gradients of two.
        """
        size = len(self.running)
        shift = 1 - size % 2
        passes = range(self._turns.pop(0))
        return [self.running[(place + shift * each) % size] for each in passes for place in range(size)]

    @property
    def next(self) -> int:
        """The schedule whose turn it is."""
        return self._order[0]

    def note(self, seconds: float) -> bool:
        """Note what its turn took; whether the round is over, and :meth:`halve` is next."""
        self.times[self._order.pop(0)].append(seconds)
        return not self._order

    def own_figures(self) -> list[Figure]:
        """The figures of the schedules that are not out, by what was noted here."""
        return [Figure.of(self.times[number]) for number in self.running]

    def halve(self, figures: Sequence[Figure]) -> None:
        """End a round: the slower schedules are out, or one of the last two stays.

        ``figures``: of each that is :attr:`running`. The planned one stays unless the other is faster by more
        than the noise of both.
        """
        self.figures |= zip(self.running, figures, strict=True)
        planned, *others = sorted(self.running, key=lambda n: (n > 0, self.figures[n].seconds))
        if self._turns:
            kept = {planned, *others[: (len(self.running) + 1) // 2 - 1]}
            self.running = [number for number in self.running if number in kept]
            self._order = self._rotation()
            return
        one, other = self.figures[planned], self.figures[others[0]]
        self.winner = others[0] if other.seconds + max(one.noise, other.noise) < one.seconds else planned
