"""Estimates of stages, from pieces that are captured and searched one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from hybridremat.analysis.pipelines.frontiers import phase_times, piece_frontier
from hybridremat.analysis.pipelines.likeness import Likeness
from hybridremat.analysis.pipelines.loss import LossCosts
from hybridremat.analysis.pipelines.pieces import Pieces, StageInput, StageModule
from hybridremat.analysis.pipelines.request import PipelineRequest
from hybridremat.analysis.resident import resident_bytes, rounding
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.progress import Progress, no_progress
from hybridremat.planning.settings import Settings
from hybridremat.sequence.pipeline.layer_ways import LayerWay, least_needed, least_time, on_hull, stage_ways
from hybridremat.sequence.pipeline.replay import StageTimes
from hybridremat.sequence.pipeline.stage_bytes import StageBytes

Place = tuple[int, int, int]
"""A stage, its first piece and the one behind its last."""


@dataclass
class Estimates:
    """Times and bytes of stages that have not been planned; what is alike is captured once."""

    pieces: Pieces
    request: PipelineRequest
    loss: LossCosts
    progress: Progress = no_progress
    _frontiers: dict[Likeness, GraphFrontier] = field(default_factory=dict)
    _ways: dict[tuple[Likeness, ...], tuple[LayerWay, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = self.request.shape.in_flight()
        every = [self.pieces.stage(n, n + 1) for n in range(len(self.pieces.modules))]
        sizes = [state_bytes(each, self.request) for each in every]
        self._parameters = [0, *accumulate(size for size, _ in sizes)]
        self._trained = [0, *accumulate(size for _, size in sizes)]
        self._inputs = [each.inputs for each in every]
        self._returned = every[-1].sent

    def is_last(self, place: Place) -> bool:
        """Whether a stage is the last one."""
        return place[2] == len(self.pieces.modules)

    def loss_of(self, place: Place) -> LossCosts:
        """The loss, for the last stage."""
        return self.loss if self.is_last(place) else LossCosts()

    def plain_time(self, place: Place) -> int:
        """Nanoseconds of the fastest way of a stage, without the loss."""
        return self._ways_of(place)[0].time

    def extra_time(self, place: Place) -> int | None:
        """Nanoseconds of recomputation in a stage; None if nothing is known to fit."""
        ways = self._ways_of(place)
        found = least_time(ways, self.waiting[place[0]], self._gradients(place), self._room(place))
        return None if found is None else found - ways[0].time

    def missing(self, place: Place) -> int:
        """Bytes that are missing for the way of least memory; 0 if it fits."""
        least = least_needed(self._ways_of(place), self.waiting[place[0]], self._gradients(place))
        return max(0, least - self._room(place))

    def sending_time(self, place: Place) -> int:
        """Nanoseconds of what a stage receives, and of its gradients back."""
        return 2 * self.request.send_time(received_bytes(self._inputs[place[1]]))

    def times(self, place: Place, total: int) -> StageTimes:
        """The phases of a stage of so many nanoseconds: recomputation is in the backward."""
        forward = sum(phase_times(self._frontier(n))[0] for n in range(*place[1:]))
        forward += self.loss_of(place).forward
        return StageTimes(forward, total - forward, self.request.send_time(self._sent(place)))

    def settings_of(self, place: Place) -> Settings:
        """Of a stage: PyTorch holds its outputs, and gradients come for all that another stage reads."""
        return replace(
            self.request.settings,
            hold_outputs=True,
            grad_outputs="auto" if self.is_last(place) else "all",
            reserve=self.loss_of(place).peak,
        )

    def sizes_of(self, made: StageModule, place: Place) -> StageBytes:
        """The bytes of a stage as one module."""
        parameters, trained = state_bytes(made, self.request)
        sent = 0 if self.is_last(place) else made.sent
        return self._sizes(place, parameters, trained, made.inputs, sent, made.sent)

    def _room(self, place: Place) -> int:
        _, first, last = place
        sizes = self._sizes(
            place,
            self._parameters[last] - self._parameters[first],
            self._gradients(place),
            self._inputs[first],
            self._sent(place),
            self._returned,
        )
        shape, forwards = self.request.shape, self.waiting[place[0]]
        taken = sizes.resident(shape, forwards, self.request.slots) + sizes.accumulated(shape)
        return self.request.memory_of(place[0]) - taken

    def _sizes(
        self,
        place: Place,
        parameters: int,
        trained: int,
        inputs: Iterable[StageInput],
        sent: int,
        returned: int,
    ) -> StageBytes:
        loss = self.loss_of(place)
        return StageBytes(
            parameters,
            trained,
            received=received_bytes(inputs),
            sent=sent,
            given=sum(each.bytes for each in inputs if not each.received) + loss.target,
            returned=returned if self.is_last(place) else 0,
            loss_held=loss.held,
        )

    def _gradients(self, place: Place) -> int:
        return self._trained[place[2]] - self._trained[place[1]]

    def _sent(self, place: Place) -> int:
        return 0 if self.is_last(place) else received_bytes(self._inputs[place[2]])

    def _ways_of(self, place: Place) -> tuple[LayerWay, ...]:
        _, first, last = place
        kinds = self.pieces.kinds[first:last]
        if kinds not in self._ways:
            self._ways[kinds] = stage_ways([_layer_ways(self._frontier(n)) for n in range(first, last)])
        return self._ways[kinds]

    def _frontier(self, piece: int) -> GraphFrontier:
        """The ways to run one piece, where what is saved counts as often as forwards wait."""
        kind = self.pieces.kinds[piece]
        if kind not in self._frontiers:
            self.progress("planning layers", len(self._frontiers), len(set(self.pieces.kinds)))
            made = self.pieces.stage(piece, piece + 1)
            settings = self.settings_of((piece, piece, piece + 1))
            settings = replace(settings, forwards=max(2, *self.waiting))
            self._frontiers[kind] = piece_frontier(made.module, made.args(self.pieces.device), settings)
        return self._frontiers[kind]


def state_bytes(made: StageModule, request: PipelineRequest) -> tuple[int, int]:
    """Bytes of all parameters and buffers of a stage, and of those that are trained."""
    rounded = rounding(made.module, request.settings.spec)
    trained = [each for each in made.module.parameters() if each.requires_grad]
    every = [*made.module.parameters(), *made.module.buffers()]
    return resident_bytes(every, rounded), resident_bytes(trained, rounded)


def received_bytes(inputs: Iterable[StageInput]) -> int:
    """Bytes of what the stage before sends."""
    return sum(each.bytes for each in inputs if each.received)


def _layer_ways(frontier: GraphFrontier) -> tuple[LayerWay, ...]:
    points = [*frontier.counted.candidates, frontier.plain]
    return on_hull(
        LayerWay(held := each.phases.between, max(0, each.phases.peak - held), each.time)
        for each in points
    )
