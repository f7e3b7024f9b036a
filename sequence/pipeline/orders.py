"""What each device of a pipeline runs, in order: the schedules of ``torch.distributed.pipelining``.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019: PipeDream) and interleaved 1F1B (Narayanan et al.
2021, arXiv:2104.04473), as PyTorch runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]
ScheduleName = Literal["1f1b", "gpipe", "interleaved1f1b"]


class Action(NamedTuple):
    """One forward or backward of a stage, for one microbatch."""

    kind: Kind
    stage: int
    microbatch: int


Order = tuple[Action, ...]


@dataclass(frozen=True)
class PipelineShape:
    """What decides the order of a pipeline.

    Attributes
    ----------
    schedule
        Its name.
    devices
        How many devices: P.
    microbatches
        How many microbatches a step has: n.
    per_device
        How many stages each device has: v. Stage i is on device i mod P.
    """

    schedule: ScheduleName
    devices: int
    microbatches: int
    per_device: int = 1

    @property
    def stages(self) -> int:
        """How many stages there are: P·v."""
        return self.devices * self.per_device

    @property
    def rounds(self) -> int:
        """In how many rounds interleaved 1F1B takes the microbatches."""
        return max(1, self.microbatches // self.devices)

    @property
    def max_weight(self) -> int:
        """How often the slowest stage counts beside the sum of all: a step takes about Σ τ/v + w/v · max τ.

        With v = 1 that is Σ τ + (n − 1)·max τ, exact for equal stages; with v stages on each device
        (n·v + P − 1)·τ for equal ones.
        """
        return self.per_device * (self.microbatches * self.per_device - 1)

    def orders(self) -> tuple[Order, ...]:
        """The actions of each device."""
        make = {"gpipe": _gpipe, "1f1b": _one_by_one, "interleaved1f1b": _interleaved}[self.schedule]
        return tuple(make(self, device) for device in range(self.devices))

    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the most forwards that wait for their backward at one time."""
        most = [0] * self.stages
        for order in self.orders():
            waiting = [0] * self.stages
            for action in order:
                waiting[action.stage] += 1 if action.kind == "forward" else -1
                most[action.stage] = max(most[action.stage], waiting[action.stage])
        return tuple(most)


def _gpipe(shape: PipelineShape, device: int) -> Order:
    every = range(shape.microbatches)
    return (*(Action("forward", device, m) for m in every), *(Action("backward", device, m) for m in every))


def _one_by_one(shape: PipelineShape, device: int) -> Order:
    count = shape.microbatches
    ahead = min(count, shape.devices - device)
    forwards = [Action("forward", device, m) for m in range(count)]
    backwards = [Action("backward", device, m) for m in range(count)]
    turns = zip(backwards, forwards[ahead:], strict=False)
    return (*forwards[:ahead], *_flat(turns), *backwards[count - ahead :])


def _interleaved(shape: PipelineShape, device: int) -> Order:
    """As ``ScheduleInterleaved1F1B``: so many microbatches of each of its stages in turn."""
    chunks, total = shape.per_device, shape.per_device * shape.microbatches
    each = shape.microbatches // shape.rounds
    ahead = min((chunks - 1) * each + 2 * (shape.devices - 1 - device), total)
    turns = [(step // each) % chunks for step in range(total)]
    forwards = _numbered("forward", turns, shape, device)
    backwards = _numbered("backward", [chunks - 1 - turn for turn in turns], shape, device)
    steady = zip(forwards[ahead:], backwards, strict=False)
    return (*forwards[:ahead], *_flat(steady), *backwards[total - ahead :])


def _numbered(kind: Kind, turns: Sequence[int], shape: PipelineShape, device: int) -> list[Action]:
    """Actions of a device's stages in turn, each stage's microbatches by rising number."""
    done = [0] * shape.per_device
    made = []
    for turn in turns:
        made.append(Action(kind, turn * shape.devices + device, done[turn]))
        done[turn] += 1
    return made


def _flat(pairs: Iterable[tuple[Action, Action]]) -> list[Action]:
    return [action for pair in pairs for action in pair]
