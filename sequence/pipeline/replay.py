"""Replay of a pipeline on clocks: when each action starts and ends, on every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridremat.sequence.pipeline.orders import Action, Kind, Order


@dataclass(frozen=True)
class StageTimes:
    """Nanoseconds of one stage, for one microbatch.

    Attributes
    ----------
    forward, backward
        Of its two phases, recomputations in the backward.
    send
        Of its outputs to the next stage, and of their gradients back; 0 for the last.
    """

    forward: int
    backward: int
    send: int = 0


@dataclass(frozen=True)
class Span:
    """One action on a device's clock, in nanoseconds from the start of the step."""

    device: int
    start: int
    end: int
    stage: int
    microbatch: int
    kind: Kind


@dataclass(frozen=True)
class Replay:
    """A step of a pipeline on clocks."""

    spans: tuple[Span, ...]
    devices: int

    @property
    def time(self) -> int:
        """Nanoseconds until the last action has ended."""
        return max((each.end for each in self.spans), default=0)

    @property
    def bubble(self) -> float:
        """The part of all devices' time in which they wait."""
        busy = sum(each.end - each.start for each in self.spans)
        return 1.0 - busy / (self.time * self.devices) if self.time else 0.0


def replay(orders: Sequence[Order], times: Sequence[StageTimes]) -> Replay:
    """Run each device's actions in their order, each as soon as what it reads has come.

    What is sent takes no time of either device; the reader waits for it.

    Raises
    ------
    ValueError
        If the orders wait for each other.
    """
    ended: dict[Action, int] = {}
    clocks, places = [0] * len(orders), [0] * len(orders)
    spans: list[Span] = []
    total = sum(map(len, orders))
    while len(spans) < total:
        before = len(spans)
        for device, order in enumerate(orders):
            while places[device] < len(order):
                action = order[places[device]]
                ready = _ready(action, ended, times)
                if ready is None:
                    break
                start = max(clocks[device], ready)
                stage = times[action.stage]
                end = start + (stage.forward if action.kind == "forward" else stage.backward)
                clocks[device], ended[action] = end, end
                places[device] += 1
                spans.append(Span(device, start, end, action.stage, action.microbatch, action.kind))
        if len(spans) == before:
            raise ValueError("the orders of the devices wait for each other")
    return Replay(tuple(sorted(spans, key=lambda each: (each.device, each.start))), len(orders))


def _ready(action: Action, ended: dict[Action, int], times: Sequence[StageTimes]) -> int | None:
    """When all that an action reads is there; None if that is not known yet."""
    kind, stage, microbatch = action
    if kind == "forward":
        if stage == 0:
            return 0
        done = ended.get(Action("forward", stage - 1, microbatch))
        return None if done is None else done + times[stage - 1].send
    own = ended.get(Action("forward", stage, microbatch))
    if own is None or stage == len(times) - 1:
        return own
    after = ended.get(Action("backward", stage + 1, microbatch))
    return None if after is None else max(own, after + times[stage].send)
