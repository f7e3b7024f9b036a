"""Stages planned exactly, and estimates for those that are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import nn

from hybridremat.analysis.pipelines.frontiers import phase_times, piece_frontier
from hybridremat.analysis.pipelines.likeness import Likeness
from hybridremat.analysis.pipelines.loss import LossCosts
from hybridremat.analysis.pipelines.pieces import Pieces, StageInput, StageModule
from hybridremat.analysis.pipelines.request import PipelineRequest
from hybridremat.analysis.resident import resident_bytes, rounding
from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import schedule_time
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import Settings
from hybridremat.plans.judging import plan_judge
from hybridremat.runtime.prepare import make_planned_call
from hybridremat.sequence.outside_memory import PhasePeaks, outside_phases
from hybridremat.sequence.pipeline.layer_ways import LayerWay, least_needed, least_time, on_hull, stage_ways
from hybridremat.sequence.pipeline.replay import StageTimes
from hybridremat.sequence.pipeline.stage_bytes import StageBytes

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
    """Stages of a model that is cut in pieces; what is alike is captured and planned once."""

    pieces: Pieces
    request: PipelineRequest
    loss: LossCosts
    _frontiers: dict[Likeness, GraphFrontier] = field(default_factory=dict)
    _ways: dict[tuple[Likeness, ...], tuple[LayerWay, ...]] = field(default_factory=dict)
    _plans: dict[tuple[object, ...], StagePlan] = field(default_factory=dict)
    slower: float = 1.0

    def __post_init__(self) -> None:
        self.waiting = self.request.shape.in_flight()
        sizes = [self._state(piece) for piece in self.pieces.modules]
        self._parameters = [0, *accumulate(size for size, _ in sizes)]
        self._trained = [0, *accumulate(size for _, size in sizes)]
        every = [self.pieces.stage(n, n + 1) for n in range(len(sizes))]
        self._inputs = [each.inputs for each in every]
        self._returned = every[-1].sent

    def _state(self, module: nn.Module) -> tuple[int, int]:
        rounded = rounding(module, self.request.settings.spec)
        trained = [each for each in module.parameters() if each.requires_grad]
        every = [*module.parameters(), *module.buffers()]
        return resident_bytes(every, rounded), resident_bytes(trained, rounded)

    # --- estimates

    def estimated(self, stage: int, first: int, last: int) -> int | None:
        """Nanoseconds of a microbatch in a stage, sending included; None if nothing is known to fit."""
        planned = self._plans.get(self._key(stage, first, last))
        sent = 2 * self.request.send_time(_received(self._inputs[first]))
        if planned is not None:
            taken = planned.times.forward + planned.times.backward + sent
            return None if planned.least is not None else taken
        ways, gradients = self._ways_of(first, last), self._trained[last] - self._trained[first]
        found = least_time(ways, self.waiting[stage], gradients, self._room(stage, first, last))
        if found is None:
            return None
        return sent + self._loss_time(last) + ways[0].time + round(self.slower * (found - ways[0].time))

    def overshoot(self, stage: int, first: int, last: int) -> int:
        """Bytes that are missing for the least that is known; 0 if it fits."""
        planned = self._plans.get(self._key(stage, first, last))
        if planned is not None:
            return max(0, (planned.least or 0) - self.request.memory_of(stage))
        ways, gradients = self._ways_of(first, last), self._trained[last] - self._trained[first]
        least = least_needed(ways, self.waiting[stage], gradients)
        return max(0, least - self._room(stage, first, last))

    def estimated_times(self, stage: int, first: int, last: int) -> StageTimes:
        """The same by phases: recomputation is in the backward."""
        planned = self._plans.get(self._key(stage, first, last))
        if planned is not None and planned.least is None:
            return planned.times
        total, sent = self.estimated(stage, first, last), self._sent(last)
        assert total is not None
        received = 2 * self.request.send_time(_received(self._inputs[first]))
        forward = sum(phase_times(self._frontier(n))[0] for n in range(first, last))
        forward += self.loss.forward if self._is_last(last) else 0
        return StageTimes(forward, total - received - forward, self.request.send_time(sent))

    def _room(self, stage: int, first: int, last: int) -> int:
        sizes = StageBytes(
            self._parameters[last] - self._parameters[first],
            self._trained[last] - self._trained[first],
            received=_received(self._inputs[first]),
            sent=self._sent(last),
            given=_given(self._inputs[first]) + (self.loss.target if self._is_last(last) else 0),
            returned=self._returned if self._is_last(last) else 0,
            loss_held=self.loss.held if self._is_last(last) else 0,
        )
        shape, forwards = self.request.shape, self.waiting[stage]
        taken = sizes.resident(shape, forwards, self.request.slots) + sizes.accumulated(shape)
        return self.request.memory_of(stage) - taken

    def _sent(self, last: int) -> int:
        return 0 if self._is_last(last) else _received(self._inputs[last])

    def _is_last(self, last: int) -> bool:
        return last == len(self.pieces.modules)

    def _loss_time(self, last: int) -> int:
        return self.loss.forward + self.loss.backward if self._is_last(last) else 0

    def _ways_of(self, first: int, last: int) -> tuple[LayerWay, ...]:
        kinds = self.pieces.kinds[first:last]
        if kinds not in self._ways:
            self._ways[kinds] = stage_ways([_layer_ways(self._frontier(n)) for n in range(first, last)])
        return self._ways[kinds]

    def _frontier(self, piece: int) -> GraphFrontier:
        """The ways to run one piece, where what is saved counts as often as forwards wait."""
        kind = self.pieces.kinds[piece]
        if kind not in self._frontiers:
            made = self.pieces.stage(piece, piece + 1)
            settings = replace(self._settings(made, piece + 1), forwards=max(2, *self.waiting))
            self._frontiers[kind] = piece_frontier(made.module, self._args(made), settings)
        return self._frontiers[kind]

    # --- exact plans

    def planned(self, stage: int, first: int, last: int) -> StagePlan:
        """A stage, planned for its device."""
        key = self._key(stage, first, last)
        if key not in self._plans:
            self._plans[key] = self._plan(stage, first, last)
        return self._plans[key]

    def correct(self, planned: Iterable[tuple[int, int, int]]) -> None:
        """Scale estimates of recomputation by what it comes to in stages that have been planned."""
        estimated = found = 0
        for stage, first, last in planned:
            plan = self.planned(stage, first, last)
            ways, gradients = self._ways_of(first, last), self._trained[last] - self._trained[first]
            guess = least_time(ways, self.waiting[stage], gradients, self._room(stage, first, last))
            if plan.least is None and guess is not None:
                estimated += guess - ways[0].time
                found += plan.extra
        if estimated > 0:
            self.slower = min(4.0, max(0.25, found / estimated))

    def _key(self, stage: int, first: int, last: int) -> tuple[object, ...]:
        return self.pieces.kinds[first:last], self.waiting[stage], self.request.memory_of(stage)

    def _plan(self, stage: int, first: int, last: int) -> StagePlan:
        made, forwards = self.pieces.stage(first, last), self.waiting[stage]
        sizes, shape = self._sizes(made, last), self.request.shape
        resident = sizes.resident(shape, forwards, self.request.slots)
        beside, room = sizes.beside_step(shape, forwards), self.request.memory_of(stage) - resident
        limit = room - beside
        settings = replace(self._settings(made, last), forwards=forwards)
        none = StagePlan(StageTimes(0, 0), 0, 0, 0, resident, 0, made.inputs)
        for _ in range(_TRIES):
            try:
                plan = self._planned_under(made, replace(settings, memory_limit=max(1, limit)))
            except InfeasibleLimitError as error:
                least = resident + beside + error.least + max(0, room - beside - limit)
                return replace(none, least=least)
            peak = sizes.peak(*_phases(plan), shape, forwards)
            if peak <= room:
                sent = self.request.send_time(sizes.sent)
                times, plain, extra = self._times(plan, sent, last)
                return StagePlan(times, plain, extra, limit, resident, resident + peak, made.inputs)
            limit = min(limit, plan.needed) - (peak - room)
        return replace(none, least=resident + peak)

    def _planned_under(self, made: StageModule, settings: Settings) -> Plan:
        call = make_planned_call(made.module, self._args(made), None, settings, build=False)
        assert call.plan is not None
        return call.plan

    def _times(self, plan: Plan, sent: int, last: int) -> tuple[StageTimes, int, int]:
        """With the loss; nanoseconds of the plain step and of recomputation, without it."""
        assert plan.details is not None
        graph, schedule = plan.details.graph, plan.schedule
        forward = sum(graph.op_times[op] for op in schedule.steps[: schedule.num_forward])
        total = plan_judge(plan, plan.details).time(schedule)
        loss = self.loss if self._is_last(last) else LossCosts()
        times = StageTimes(forward + loss.forward, total - forward + loss.backward, sent)
        plain = schedule_time(graph, plain_schedule(graph))
        return times, plain, total - plain

    def _sizes(self, made: StageModule, last: int) -> StageBytes:
        parameters, trained = self._state(made.module)
        is_last = self._is_last(last)
        return StageBytes(
            parameters,
            trained,
            received=_received(made.inputs),
            sent=0 if is_last else made.sent,
            given=_given(made.inputs) + (self.loss.target if is_last else 0),
            returned=made.sent if is_last else 0,
            loss_held=self.loss.held if is_last else 0,
        )

    def _settings(self, made: StageModule, last: int) -> Settings:
        """Of a stage: PyTorch holds its outputs, and gradients come for all that another stage reads."""
        is_last = self._is_last(last)
        return replace(
            self.request.settings,
            hold_outputs=True,
            grad_outputs="auto" if is_last else "all",
            reserve=self.loss.peak if is_last else 0,
        )

    def _args(self, made: StageModule) -> tuple[torch.Tensor, ...]:
        return tuple(each.made(self.pieces.device) for each in made.inputs)


def _layer_ways(frontier: GraphFrontier) -> tuple[LayerWay, ...]:
    points = [*frontier.counted.candidates, frontier.plain]
    return on_hull(LayerWay(each.phases.between, _above(each.phases), each.time) for each in points)


def _above(phases: PhasePeaks) -> int:
    return max(0, phases.peak - phases.between)


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


def _received(inputs: Iterable[StageInput]) -> int:
    return sum(each.bytes for each in inputs if each.received)


def _given(inputs: Iterable[StageInput]) -> int:
    return sum(each.bytes for each in inputs if not each.received)
