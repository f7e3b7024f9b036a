"""Several schedules of one step that take turns behind what AOTAutograd has compiled of one of them.

As in :mod:`hybridremat.compiler.dispatch`, AOTAutograd saves whatever a forward returns between its outputs
and the tensors at the end that it must not watch. Of these there are as many as in the graphs that it was
given, so another schedule saves all of its own before them, those on which it must not look as aliases of
their own, and fills up the end. Which schedule ran is told to the backward of the same forward by the first
saved tensor, by its shape: it has no bytes. A forward without that mark is of before there were turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hybridremat.compiler.dispatch import Emitted
from hybridremat.compiler.emit import unwatched
from hybridremat.graph.private_joint import Compiled
from hybridremat.graph.tracing.fx_nodes import joint_outputs

MARK: Final = 0x68726D
"""The second size of a mark, which no tensor of a model has beside a first size of 0."""


@dataclass(frozen=True)
class Member:
    """One schedule.

    ``saved``: how many tensors its forward saves; ``aliased``: the places among its results of those that
    autograd must not watch; ``filled``: how many tensors without bytes are there in their place.
    """

    forward: Compiled
    backward: Compiled
    saved: int = 0
    aliased: tuple[int, ...] = ()
    filled: int = 0


class Turns:
    """The schedules of a step; the first one is what was compiled.

    Attributes
    ----------
    choose
        The number of the schedule that the next forward runs. Called when it starts.
    ended
        Called when a backward has run.
    latest
        The number of the schedule that :meth:`keep` has named last.
    """

    def __init__(self, forward: Compiled, backward: Compiled, num_outputs: int, unwatched: int) -> None:
        """What runs the compiled schedule; ``unwatched``: how much it saves that autograd must not watch."""
        self.choose: Callable[[], int] = lambda: 0
        self.ended: Callable[[], None] = lambda: None
        self.latest = 0
        self._num_outputs = num_outputs
        self._members = [Member(forward, backward)]
        self._unwatched = unwatched

    def add(self, emitted: Emitted) -> int:
        """The number of one more schedule."""
        forward, backward = emitted.compiled
        graph = emitted.lifted.forward
        saved, aliased = len(joint_outputs(graph)) - self._num_outputs, unwatched(graph, self._num_outputs)
        self._members.append(Member(forward, backward, saved, aliased, self._unwatched))
        return len(self._members) - 1

    def keep(self, number: int) -> None:
        """Run one schedule from now on."""
        self.latest = number
        self.choose, self.ended = lambda: number, lambda: None

    def forward(self, args: list[Any]) -> list[Any]:
        """Run the forward of the schedule whose turn it is."""
        number = self.choose()
        member = self._members[number]
        outputs: list[Any] = [*member.forward(args)]
        for place in member.aliased:
            outputs[place] = outputs[place].data
        outputs.insert(self._num_outputs, torch.empty(0, MARK, number))
        return outputs + [torch.empty(0)] * member.filled

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """Run the backward of the schedule that its forward has run."""
        number = _marked(args[0])
        if number is not None:
            del args[0]
        member = self._members[number or 0]
        if member.filled:
            del args[member.saved : member.saved + member.filled]
        result: Sequence[Any] = member.backward(args)
        self.ended()
        return result


def _marked(tensor: object) -> int | None:
    """The number that a tensor is the mark of; None if it is none."""
    if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.shape[:2] == (0, MARK):
        return int(tensor.shape[2])
    return None
