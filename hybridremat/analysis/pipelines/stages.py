"""Stages planned exactly, and what is known of those that are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hybridremat.analysis.pipelines.estimates import Estimates, Place
from hybridremat.analysis.pipelines.pieces import StageInput, StageModule
from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import schedule_time
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import Settings
from hybridremat.plans.judging import plan_judge
from hybridremat.runtime.prepare import make_planned_call
from hybridremat.sequence.outside_memory import PhasePeaks, outside_phases
from hybridremat.sequence.pipeline.replay import StageTimes

_TRIES = 4  # limits of a stage, each lower by what its forward takes beside gradients of earlier microbatches


@dataclass(frozen=True)
class StagePlan:
    """A stage that is planned, or the least that it needs.

    Attributes
    ----------
    times
        Of its plan.
    plain, extra
        Nanoseconds of its plain step, for one microbatch, and what its plan takes more.
    limit
        ``memory_limit`` of its plan.
    resident
        Bytes that are there during the whole step, gradients apart.
    peak
        Most bytes that the stage takes, all in all.
    inputs
        What it is called with.
    least
        Where no plan fits: the fewest bytes, all in all, that one was found for.
    """

    times: StageTimes
    plain: int
    extra: int
    limit: int
    resident: int
    peak: int
    inputs: tuple[StageInput, ...]
    least: int | None = None


@dataclass
class Stages:
    """Stages of a model that is cut in pieces; what is alike is planned once.

    ``slower``: times what recomputation is estimated to take.
    """

    guess: Estimates
    slower: float = 1.0
    _plans: dict[tuple[object, ...], StagePlan] = field(default_factory=dict)

    def time(self, *place: int) -> int | None:
        """Nanoseconds of a microbatch in a stage, sending included; None if nothing is known to fit."""
        found = self._time(_place(place))
        return None if found is None else found + self.guess.sending_time(_place(place))

    def _time(self, place: Place) -> int | None:
        planned = self._plans.get(self._key(place))
        if planned is not None:
            return None if planned.least is not None else planned.times.forward + planned.times.backward
        extra, loss = self.guess.extra_time(place), self.guess.loss_of(place)
        if extra is None:
            return None
        return loss.forward + loss.backward + self.guess.plain_time(place) + round(self.slower * extra)

    def phase_times(self, *place: int) -> StageTimes:
        """The same by phases, of a stage that fits."""
        planned = self._plans.get(self._key(_place(place)))
        if planned is not None:
            return planned.times
        total = self._time(_place(place))
        assert total is not None
        return self.guess.times(_place(place), total)

    def missing(self, *place: int) -> int:
        """Bytes that are missing for the least that is known; 0 if it fits."""
        planned = self._plans.get(self._key(_place(place)))
        if planned is None:
            return self.guess.missing(_place(place))
        return max(0, (planned.least or 0) - self.guess.request.memory_of(place[0]))

    def planned(self, *place: int) -> StagePlan:
        """A stage, planned for its device."""
        key = self._key(_place(place))
        if key not in self._plans:
            self.guess.progress("planning stages", len(self._plans), len(self.guess.waiting))
            self._plans[key] = self._plan(_place(place))
        return self._plans[key]

    def correct(self, places: Iterable[Place]) -> None:
        """Scale estimates of recomputation by what it comes to in stages that have been planned."""
        estimated = found = 0
        for place in places:
            plan, extra = self.planned(*place), self.guess.extra_time(place)
            if plan.least is None and extra is not None:
                estimated += extra
                found += plan.extra
        if estimated > 0:
            self.slower = min(4.0, max(0.25, found / estimated))

    def _key(self, place: Place) -> tuple[object, ...]:
        stage, first, last = place
        kinds, request = self.guess.pieces.kinds[first:last], self.guess.request
        return kinds, self.guess.waiting[stage], request.memory_of(stage)

    def _plan(self, place: Place) -> StagePlan:
        request, made = self.guess.request, self.guess.pieces.stage(*place[1:])
        forwards, shape = self.guess.waiting[place[0]], request.shape
        sizes = self.guess.sizes_of(made, place)
        resident = sizes.resident(shape, forwards, request.slots)
        beside, room = sizes.beside_step(shape, forwards), request.memory_of(place[0]) - resident
        limit, peak = room - beside, 0
        settings = replace(self.guess.settings_of(place), forwards=forwards)
        none = StagePlan(StageTimes(0, 0), 0, 0, 0, resident, 0, made.inputs)
        for _ in range(_TRIES):
            try:
                plan = self._planned_under(made, replace(settings, memory_limit=max(1, limit)))
            except InfeasibleLimitError as error:
                return replace(none, least=resident + beside + error.least + max(0, room - beside - limit))
            peak = sizes.peak(*_phases(plan), shape, forwards)
            if peak <= room:
                times, plain, extra = self._times(plan, request.send_time(sizes.sent), place)
                return StagePlan(times, plain, extra, limit, resident, resident + peak, made.inputs)
            limit = min(limit, plan.needed) - (peak - room)
        return replace(none, least=resident + peak)

    def _planned_under(self, made: StageModule, settings: Settings) -> Plan:
        args = made.args(self.guess.pieces.device)
        call = make_planned_call(made.module, args, None, settings, build=False)
        assert call.plan is not None
        return call.plan

    def _times(self, plan: Plan, sent: int, place: Place) -> tuple[StageTimes, int, int]:
        """With the loss; nanoseconds of the plain step and of recomputation, without it."""
        assert plan.details is not None
        graph, schedule, loss = plan.details.graph, plan.schedule, self.guess.loss_of(place)
        forward = sum(graph.op_times[op] for op in schedule.steps[: schedule.num_forward])
        total = schedule_time(graph, schedule)
        times = StageTimes(forward + loss.forward, total - forward + loss.backward, sent)
        plain = schedule_time(graph, plain_schedule(graph))
        return times, plain, total - plain


def _place(place: tuple[int, ...]) -> Place:
    stage, first, last = place
    return stage, first, last


def _phases(plan: Plan) -> tuple[PhasePeaks, int]:
    """Bytes of each phase of a plan, with what is alive around it; and what a forward holds."""
    assert plan.details is not None
    judge = plan_judge(plan, plan.details)
    own = judge.phases(plan.schedule)
    beside = outside_phases(judge.graph, own.between, judge.outside)
    phases = PhasePeaks(
        own.forward + beside.forward, own.backward + beside.backward, own.between + beside.between
    )
    return phases, own.between
