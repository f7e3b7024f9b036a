"""Gradients that leave in the backward: added to ``.grad``, with the parameter's hooks, as soon as possible.

The compiled graph gets aliases of the parameters, to which autograd passes nothing, and calls
:func:`deliver`, which does to the parameters what ``AccumulateGrad`` would do at the end of the backward
(``torch/csrc/autograd/functions/accumulate_grad.h``).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.errors import EarlyGradientError, KeptGradientWarning, warn_caller
from hybridremat.graph.private_torch import (
    hooks_before_and_after,
    inside_distributed_data_parallel,
    is_traceable_wrapper_subclass,
    will_run_in_this_backward,
)
from hybridremat.units import format_bytes

_DROPPED: list[frozenset[int]] = []  # identities of parameters that trial runs, in any thread, give nothing
_HERE = threading.local()  # ``deliveries``: of the backward that runs in this thread


def deliver(gradient: Tensor, index: int) -> None:
    """Called by emitted graphs: the gradient of an input is final, and the input is read no more."""
    _HERE.deliveries.take(gradient, index)


@contextmanager
def gradients_dropped(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Drop gradients of these parameters that leave early, in trial runs, and run none of their hooks."""
    dropped = frozenset(map(id, parameters))
    _DROPPED.append(dropped)
    try:
        yield
    finally:
        _DROPPED.remove(dropped)


def hook_workspace(parameter: Tensor) -> int:
    """Bytes that the hooks on a parameter say they allocate when its gradient leaves (``workspace``)."""
    known = [getattr(hook, "workspace", None) for hook in hooks_before_and_after(parameter)[1]]
    return max((count(parameter) for count in known if count is not None), default=0)


STANDS_FOR = "_hybridremat_stands_for"
"""Attribute of a parameter that takes the place of another in a trial run: a weak reference to that one."""


def original(parameter: Tensor) -> Tensor:
    """The model's own parameter, for one that stands for it in a trial run."""
    found = getattr(parameter, STANDS_FOR, None)
    own: Tensor | None = found() if found is not None else None
    return parameter if own is None else own


def leaving_inputs(inputs: Sequence[object], known: Mapping[int, int] | None = None) -> dict[int, int]:
    """The inputs of a graph whose gradients may leave: trained parameters, with their hooks' workspace.

    ``known``: by identity of the parameter, the workspace as it was before a trial run took the hooks off.
    Not those that share memory with another input: what changes one would change what the other is read for.

    Raises
    ------
    EarlyGradientError
        For inputs that are made of others (a DTensor): their gradients exist only once these are together.
    """
    if split := [value for value in inputs if is_traceable_wrapper_subclass(value)]:
        raise EarlyGradientError(
            'gradients="in_backward" takes gradients out of the graph, where that of a '
            f"{type(split[0]).__name__} is in parts: leave gradients= out for a model whose tensors are split"
        )
    shared = Counter(_address(value) for value in inputs if isinstance(value, Tensor))
    return {
        index: (known or {}).get(id(original(value)), hook_workspace(value))
        for index, value in enumerate(inputs)
        if isinstance(value, nn.Parameter)
        and value.requires_grad
        and value.is_leaf
        and shared[_address(value)] == 1
    }


def _address(tensor: Tensor) -> int:
    """Where a tensor's memory begins; its own number if it has none."""
    dense = tensor.layout is torch.strided and tensor.numel() > 0
    return tensor.untyped_storage().data_ptr() if dense else -id(tensor)


class EarlyGradients:
    """Takes the gradients of one compiled graph.

    Attributes
    ----------
    leaving
        The graph's inputs whose gradients may leave, with the workspace of whoever takes them.
    indices
        The graph's inputs whose gradients leave; set once it is planned.
    """

    def __init__(self, leaving: Mapping[int, int]) -> None:
        self.leaving = leaving
        self.indices: tuple[int, ...] = ()
        self._parameters: dict[int, weakref.ref[nn.Parameter]] = {}
        self._aliases: list[weakref.ref[Tensor]] = []  # one of each forward whose graph is alive
        self._unreached: Collection[int] = ()
        self._warned = False

    def aliases(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inputs of a forward, with aliases in place of parameters whose gradients leave.

        Raises
        ------
        EarlyGradientError
            Under DistributedDataParallel, which waits for gradients that never reach it.
        """
        if not self.indices:
            return inputs
        if inside_distributed_data_parallel():
            raise EarlyGradientError(
                'gradients="in_backward" cannot be used under DistributedDataParallel, which averages the '
                'gradients of all ranks before they are used. Wrap with gradients="at_end". Nothing has run.'
            )
        given = list(inputs)
        for index in self.indices:
            parameter = given[index]
            self._parameters[index] = weakref.ref(parameter)
            given[index] = parameter.detach().requires_grad_()
        self._aliases = [found for found in self._aliases if found() is not None]
        self._aliases.append(weakref.ref(given[self.indices[0]]))
        return given

    def watch(self, outputs: Iterable[object]) -> None:
        """Refuse, when their gradients arrive, a backward that is not to compute all gradients."""
        if not self.indices:
            return
        for output in outputs:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(lambda _: self._require_whole_backward())

    def wrapped(
        self, run: Callable[[list[Any]], Any], unreached: Callable[[], Collection[int]]
    ) -> Callable[[list[Any]], Any]:
        """``run``, a backward that takes its arguments boxed, delivering gradients.

        ``unreached`` returns the inputs whose gradients are undefined, at the time.
        """

        def call(args: list[Any]) -> Any:
            if not self.indices:
                return run(args)
            self._require_whole_backward()
            had = {index for index, parameter in self._present() if parameter.grad is not None}
            with self._running(unreached()):
                results = run(args)
            self._warn_of_kept(had)
            return results

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def take(self, gradient: Tensor, index: int) -> None:
        """Do to a parameter what ``AccumulateGrad`` does, hooks included."""
        parameter = self._parameters[index]()
        if parameter is None or index in self._unreached:
            return
        if any(id(original(parameter)) in each for each in _DROPPED):
            return
        before, after = hooks_before_and_after(parameter)
        for hook in before:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        for hook in after:
            hook(parameter)

    def _present(self) -> Iterator[tuple[int, nn.Parameter]]:
        for index, found in self._parameters.items():
            if (parameter := found()) is not None:
                yield index, parameter

    @contextmanager
    def _running(self, unreached: Collection[int]) -> Iterator[None]:
        outer = getattr(_HERE, "deliveries", None)
        self._unreached, _HERE.deliveries = unreached, self
        try:
            with torch.no_grad():
                yield
        finally:
            _HERE.deliveries = outer

    def _require_whole_backward(self) -> None:
        """Refuse a backward that is to compute other gradients than ours, before anything has changed."""
        aliases = [alias for found in self._aliases if (alias := found()) is not None]
        running = sum(map(will_run_in_this_backward, aliases))
        if not running:
            raise EarlyGradientError(
                'gradients="in_backward" hands every gradient to its parameter, and this backward asks for '
                "some alone (backward(inputs=…) or torch.autograd.grad). Nothing has changed. Wrap with "
                'gradients="at_end", or call model.forward(…) in place of model(…) for such a step.'
            )
        outside = [p for _, p in self._present() if will_run_in_this_backward(p)]
        if outside or running > 1:
            raise EarlyGradientError(
                "parameters take part in this loss outside the wrapped model as well, or in several forwards "
                'of it, or of one of its graphs, so that gradients="in_backward" does not know when their '
                "gradients are final"
                f"{_named(outside)}. No gradient of this graph has been handed out. Call "
                "backward() for one forward at a time, wrap "
                'the model that computes the whole loss, or wrap with gradients="at_end".'
            )

    def _warn_of_kept(self, had: Collection[int]) -> None:
        kept = [p.grad for index, p in self._present() if index not in had]
        size = sum(grad.untyped_storage().nbytes() for grad in kept if grad is not None)
        if size and not self._warned:
            self._warned = True
            warn_caller(
                f"{format_bytes(size)} of gradients stay in .grad, which the plan takes to be used and "
                "dropped in the backward: the step takes up to that much more than planned. Drop them in a "
                "hook (hybridremat.optimizer_in_backward does), or, to add up several backwards, keep .grad "
                'between steps (optimizer.zero_grad(set_to_none=False)), or wrap with gradients="at_end".',
                KeptGradientWarning,
            )


def _named(parameters: Sequence[Tensor]) -> str:
    """The shapes of the first of some parameters, in brackets."""
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in parameters[:3])
    return f" (of shape {shapes})" if shapes else ""
