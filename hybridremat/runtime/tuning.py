"""Schedules that take turns in real training steps: which runs next, what it took, and which one stays."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace

import torch

from hybridremat.errors import HybridRematError
from hybridremat.planning.plan import Plan
from hybridremat.planning.plan_store import PlanStore
from hybridremat.planning.progress import say
from hybridremat.planning.ranks import ALONE, Ranks
from hybridremat.plans.records import TriedSchedule, TuningRecord
from hybridremat.runtime.halving import Figure, Halving

logger = logging.getLogger(__name__)


def clock_of(device: str) -> Callable[[], float]:
    """A clock of seconds on which all that was started on a device counts as over."""
    if not device.startswith("cuda"):
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


@dataclass
class Tuning:
    """Schedules of one step that take turns (:func:`hybridremat.tune`). ``print(tuning)`` says how far it is.

    Attributes
    ----------
    steps
        The training steps in which they do.
    plans
        The plans of the schedules: first the one that was made, then the others, by predicted time.
    record
        What was found; None until the last of the steps is over.
    """

    steps: int
    plans: tuple[Plan, ...] = field(repr=False)
    _store: PlanStore = field(repr=False)
    _waiting: Callable[[], int] = field(repr=False)
    _clock: Callable[[], float] = field(repr=False)
    _ranks: Ranks = field(default=ALONE, repr=False)
    _over: Callable[[int], None] = field(default=lambda _: None, repr=False)
    _show: bool = field(default=False, repr=False)
    record: TuningRecord | None = None
    _halving: Halving | None = field(init=False, default=None, repr=False)
    _number: int = field(init=False, default=0, repr=False)
    _started: float | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if len(self.plans) > 1:
            self._halving = Halving(len(self.plans), self.steps)
        else:
            self._end(0, [Figure(0.0, 0.0)])

    @property
    def done(self) -> bool:
        """Whether the schedule that stays is known."""
        return self.record is not None

    @property
    def plan(self) -> Plan:
        """The plan of the schedule that stays; the one that was made, as long as that is not known."""
        return self.plans[0] if self.record is None else self._with_record(self.record)

    def begin(self) -> int:
        """A forward starts: the number of its schedule, whose plan becomes the current one.

        While another forward waits for its backward it is the same one as then, since the limit is kept by
        what one schedule saves for all of them; they are one step.
        """
        halving = self._halving
        if halving is None or self.done:
            return self._number
        counts = not self._waiting()
        if counts:
            self._number = halving.next
        self._store.add(self.plans[self._number])
        self._started = self._clock() if counts else self._started
        return self._number

    def end(self) -> None:
        """A backward has run. The step is over when no forward waits for one any more."""
        if self._waiting():
            return
        started, self._started = self._started, None
        if started is None or self._halving is None:
            return
        if self._halving.note(self._clock() - started):
            self._end_round(self._halving)

    def stop(self) -> None:
        """Compare no further: the planned schedule stays, if which one does is not known yet.

        For a loop that has changed: its steps are of another shape now, or parameters are frozen. Where ranks
        tune together, all of them have to call it after the same step.
        """
        if not self.done and self._halving is not None:
            self._end(0, [Figure.of(turns or [0.0]) for turns in self._halving.times])

    def _end_round(self, halving: Halving) -> None:
        try:
            halving.halve(self._agreed(halving.own_figures()))
        except HybridRematError:
            # as planned: no rank knows what the others have measured
            self._end(0, [Figure.of(turns or [0.0]) for turns in halving.times])
            raise
        if halving.winner is not None:
            self._end(halving.winner, [halving.figures[n] for n in range(halving.count)])

    def _agreed(self, figures: Sequence[Figure]) -> list[Figure]:
        """The figures of the slowest rank for each schedule."""
        texts = self._ranks.group("round", json.dumps([astuple(each) for each in figures])).texts
        every = [[Figure(*each) for each in json.loads(text)] for text in texts]
        return [max(group, key=lambda each: each.seconds) for group in zip(*every, strict=True)]

    def _end(self, winner: int, figures: Sequence[Figure]) -> None:
        turns = [len(each) for each in self._halving.times] if self._halving is not None else [0]
        tried = tuple(
            TriedSchedule(plan.overhead, plan.predicted_peak, count, figure.seconds, figure.noise)
            for plan, count, figure in zip(self.plans, turns, figures, strict=True)
        )
        self.record, self._number, self._ranks = TuningRecord(self.steps, tried, winner), winner, ALONE
        self._store.add(self.plan)
        self._over(winner)
        say(str(self), show=self._show)

    def _with_record(self, record: TuningRecord) -> Plan:
        return replace(self.plans[record.winner], tuning=record)

    def __str__(self) -> str:
        if self.record is not None:
            return str(self.record)
        halving = self._halving
        assert halving is not None
        ran = sum(map(len, halving.times))
        return (
            f"{ran} of {self.steps} steps have run; {len(halving.running)} of {len(self.plans)} schedules "
            "take turns"
        )
