"""A backward that hands gradients over as they become final, so that their exchange overlaps with it.

DistributedDataParallel exchanges a bucket once the nodes of its parameters that accumulate have run, which
the engine of autograd runs as soon as the one that makes their gradients has ended. A planned backward is one
node, so they would all wait for its end. Here the parameters go into the compiled graph through nodes in a
chain, one for each of its sections (:mod:`hybridremat.compiler.sections`)::

    compiled graph --> section 1 --> section 2 --> …
        |                  |             |
    parameters          parameters    parameters

The compiled graph's own node runs the first section, each of the others the next one, and the engine runs
what accumulates in between: it always comes first. So each parameter has the one node that it has anyway, and
all else (sums with other gradients, hooks, ``no_sync``, a search for unused parameters) is autograd's and
DistributedDataParallel's own. Where no sections run, the nodes pass on what they get.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx
from torch.profiler import record_function

from hybridremat.compiler.final_gradients import FINAL
from hybridremat.graph.private_joint import Compiled
from hybridremat.graph.private_torch import (
    exchanges_gradients,
    next_nodes_in_backward,
    not_traced,
    without_autocast,
)
from hybridremat.graph.tracing.fx_nodes import joint_outputs

if TYPE_CHECKING:
    from hybridremat.compiler.sections import Section


class _Rest:
    """What is left to run of the backward of one forward."""

    def __init__(self, sections: Sequence[Section], place: int, first: Tensor) -> None:
        """``first``: the parameter at a place among the inputs whose gradient the second section makes."""
        self.sections, self.place, self.first = sections, place, first
        self.values: list[Any] | None = None
        self.unreached: Collection[int] = ()

    def run(self, number: int) -> list[Any]:
        """The gradients of a section; those that are undefined are None."""
        values, self.values = self.values or [], None
        section, last = self.sections[number], number == len(self.sections) - 1
        made = list(section.run(values))
        count = len(section.gradients)
        if not last:
            self.values = made[count:]
        pairs = zip(section.gradients, made[:count], strict=True)
        return [None if index in self.unreached else gradient for index, gradient in pairs]


class _Handover(torch.autograd.Function):
    """Hands some parameters into a compiled graph, and over their gradients in the backward.

    ``_after``: of the section that runs after this one, an output without elements; None for the last.
    """

    @staticmethod
    def forward(
        ctx: Any, rest: _Rest, number: int, _after: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.hybridremat_rest, ctx.number = rest, number
        ctx.set_materialize_grads(False)
        return (parameters[0].new_empty(0), *(each.detach() for each in parameters))

    @staticmethod
    @not_traced
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rest: _Rest = ctx.hybridremat_rest
        if rest.values is None:
            return (None, None, None, *gradients)
        token = rest.first.new_empty(0) if ctx.needs_input_grad[2] else None
        with without_autocast(), record_function("##hybridremat:backward"):
            return (None, None, token, *rest.run(ctx.number))


class HandingOver:
    """Hands over the gradients of one compiled graph, where they are to be exchanged.

    ``leaving``: the inputs that are trained parameters, whose gradients may leave before the backward ends.
    """

    def __init__(self, leaving: Collection[int]) -> None:
        self._leaving = frozenset(leaving)
        self._backward: fx.GraphModule | None = None
        self._sections: tuple[Section, ...] = ()

    def plan(self, backward: fx.GraphModule) -> None:
        """Take the backward graph; one whose calls do not say which gradients are final runs as a whole."""
        self._backward = backward if any(FINAL in node.meta for node in backward.graph.nodes) else None

    def inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs of a forward, through nodes of autograd where later sections make their gradients.

        As they are if nothing is exchanged, or all gradients are final at the end.
        """
        if self._backward is None or not exchanges_gradients():
            return inputs
        from hybridremat.compiler.sections import sections_of  # not where nothing is exchanged

        self._sections = self._sections or sections_of(self._backward, self._leaving)
        later = [section.gradients for section in self._sections[1:]]
        own = [index for index in later[0] if index in self._leaving] if later else []
        if not own:
            return inputs
        given, token, through = list(inputs), None, cast("Any", _Handover.apply)
        rest = _Rest(self._sections, own[0], inputs[own[0]].detach())
        for number in reversed(range(1, len(self._sections))):
            indices = self._sections[number].gradients
            token, *results = through(rest, number, token, *(given[index] for index in indices))
            for index, result in zip(indices, results, strict=True):
                given[index] = result
        return given

    def wrapped(self, run: Compiled, unreached: Callable[[], Collection[int]]) -> Compiled:
        """``run``, the whole backward, or its first section if the inputs have been handed over.

        ``unreached`` returns the results that are undefined, at the time.
        """
        if self._backward is None:
            return run
        count = len(joint_outputs(self._backward))

        def call(args: list[Any]) -> Any:
            if (rest := _handed_to_this_backward()) is None:
                return run(args)
            rest.values, rest.unreached = args, unreached()
            results: list[Any] = [None] * count
            for index, gradient in zip(rest.sections[0].gradients, rest.run(0), strict=True):
                results[index] = gradient
            results[rest.place] = rest.first  # else what follows would run in the thread of no device
            return results

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _handed_to_this_backward() -> _Rest | None:
    """Called in the backward of a compiled graph: what its forward has handed the parameters in with."""
    found = (getattr(node, "hybridremat_rest", None) for node in next_nodes_in_backward())
    return next((rest for rest in found if rest is not None), None)
