"""The first step of each input shape in a loop that computes its loss outside of the model.

Which outputs get gradients, and what the loss allocates, is known once its backward has come back to the
model. So the first forward of a shape runs plain and saves nothing but its inputs, and what is allocated
from then on is measured, up to the end of a backward that ends at the model's outputs. Then the step is
planned for what was seen, and its forward, with the same random numbers, and its backward run from the
gradients that have come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hybridremat.compiler.capture import model_device
from hybridremat.compiler.sample_inputs import input_leaves
from hybridremat.errors import DoubleBackwardError, InfeasibleLimitError
from hybridremat.graph.private_torch import (
    hooks_before_and_after,
    inside_distributed_data_parallel,
    tree_flatten,
    tree_unflatten,
)
from hybridremat.runtime.deferred import Again, Gradients, can_be_deferred, deferred, differentiable
from hybridremat.runtime.moments import Moment
from hybridremat.runtime.outside import NextBackward, OutsideMemory
from hybridremat.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SeenLoss:
    """What a backward brought.

    ``beyond_scalars``: whether a gradient came to an output that is no scalar. ``outside``: most bytes that
    were allocated since the forward and alive at one time; None where they are not known.
    """

    beyond_scalars: bool
    outside: int | None


class FirstSteps:
    """Runs the first forward of each shape of a wrapped model so that its step is planned after the backward.

    Parameters
    ----------
    model
        The wrapped model.
    seen
        Takes what the first backward of a shape brought, before its step is planned.
    planned
        The planned forward; ``held`` are bytes that the loop holds meanwhile.
    """

    def __init__(
        self, model: nn.Module, seen: Callable[[SeenLoss], None], planned: Callable[..., Any]
    ) -> None:
        self._model, self._seen, self._planned = model, seen, planned
        self._device = model_device(model)
        self._done: set[Hashable] = set()
        self._outside = OutsideMemory(self._device)
        self._next_backward = NextBackward(self._backward, self.give_up)
        self._came: list[tuple[Hashable, Again, Gradients]] = []
        self._warned = False

    def give_up(self) -> None:
        """Wait for no backward any more: the step is over, or has failed."""
        self._next_backward.forget()
        self._outside.give_up()
        self._came.clear()

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The outputs of a forward: planned, or plain for the first one of its shape."""
        shapes = _shapes(args, kwargs)
        if shapes in self._done:
            return self._planned(args, kwargs)
        why = self._why_not(args, kwargs)
        if why is None:
            leaves, structure, moment = self._plain(args, kwargs)
            if moment.stored():
                why = "keeps tensors on its modules"
            elif not can_be_deferred(leaves, self._held(args, kwargs)):
                why = "returns inputs, parameters, or objects of its own"
            if why is not None:
                moment.restore()
        if why is not None:
            return self._at_once(shapes, args, kwargs, why)
        places = differentiable(leaves)
        came = partial(self._gradients_came, shapes, Again(moment, args, kwargs, places))
        results = deferred([leaves[place] for place in places], came, _reached(self._model))
        made = {id(leaves[place]): result for place, result in zip(places, results, strict=True)}
        leaves = [made.get(id(leaf), leaf) for leaf in leaves]
        self._outside.go_on()
        self._next_backward.await_it()
        return tree_unflatten(leaves, structure)

    def _why_not(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Why the model cannot run without saving anything first; None if it can."""
        if inside_distributed_data_parallel():
            return "runs in DistributedDataParallel"
        given = input_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in given):
            return "takes inputs that need gradients"
        return None

    def _plain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any, Moment]:
        """Leaves and structure of the outputs of a forward that saves nothing, and the moment before."""
        self._outside.pause()
        moment = Moment(self._model)
        with torch.no_grad(), _casts_uncached(self._device):
            leaves, structure = tree_flatten(self._model._call_impl(*args, **kwargs))
        moment.forget_unchanged()
        return leaves, structure, moment

    def _gradients_came(self, shapes: Hashable, again: Again, gradients: Gradients) -> None:
        if not self._next_backward.running:
            raise DoubleBackwardError(
                "a second backward, one of another thread, or one for some gradients alone "
                "(torch.autograd.grad, inputs=) came through the first step of "
                f"{type(self._model).__name__} for these shapes, which takes one loss.backward(). Add the "
                'losses, or say grad_outputs="all" and reserve=: the step is then planned before its loss is '
                "seen."
            )
        self._came.append((shapes, again, gradients))

    def _backward(self) -> bool:
        """Plan and run the steps that a backward has come to; returns whether there are any."""
        if not self._came:
            return False
        outside, left = self._outside.end()
        while self._came:
            shapes, again, gradients = self._came.pop(0)
            held = max(left, sum(gradient.nbytes for gradient in gradients if gradient is not None))
            if shapes not in self._done:
                self._done.add(shapes)
                if outside is None:
                    self._warn("meets a new shape while a profiler runs, so that its loss cannot be measured")
                beyond = any(gradient is not None and gradient.dim() > 0 for gradient in gradients)
                self._seen(SeenLoss(beyond, outside))
            with _naming_the_loss(outside):
                again.run(partial(self._planned, held=held), gradients)
            del gradients
        return True

    def _at_once(self, shapes: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any], why: str) -> Any:
        """Plan before the loss is known: any output may take part in it."""
        self._done.add(shapes)
        self._warn(f"{why}, so that it is planned before its loss is seen")
        self._seen(SeenLoss(beyond_scalars=True, outside=None))
        return self._planned(args, kwargs)

    def _held(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        given = [leaf for leaf in input_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return [*given, *self._model.parameters(), *self._model.buffers()]

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s %s: what the loop allocates outside of it has to be given as reserve=, or the limit may "
                "be passed by that much.",
                type(self._model).__name__,
                what,
            )


def _reached(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that a backward may ask for: not those with hooks, which would be called with None."""
    trained = (each for each in model.parameters() if each.requires_grad)
    return [each for each in trained if not any(hooks_before_and_after(each))]


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Names, shapes and dtypes of the tensors of a call."""
    leaves, structure = input_leaves((list(args), dict(kwargs))), tree_flatten((list(args), dict(kwargs)))[1]
    sizes = ((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    return str(structure), tuple(sizes)


@contextmanager
def _naming_the_loss(outside: int | None) -> Iterator[None]:
    """Say, where no plan fits, what of the limit is kept for the loss."""
    try:
        yield
    except InfeasibleLimitError as error:
        if not outside:
            raise
        raise InfeasibleLimitError(
            f"{error} (The loop's loss was seen to allocate {format_bytes(outside)} outside of the model, "
            "which are reserved.)",
            limit=error.limit,
            least=error.least,
        ) from None


@contextmanager
def _casts_uncached(device: str) -> Iterator[None]:
    """Autocast as it is, but for its cache: what it casts without gradients must not meet a later forward."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield
