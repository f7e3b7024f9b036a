"""Which calls of a model stay one op of its joint graph (:mod:`hybridremat.graph.opaque`).

Dynamo traces into none of them: fused losses of known libraries, and what :func:`opaque` was told. Recurrent
kernels are found in its graphs (``recurrent.py``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, fx

from hybridremat.errors import UsageError
from hybridremat.graph.private_torch import dynamo_config, functions_in_graph, is_traced, tree_leaves

F = TypeVar("F", bound=Callable[..., Any])
Function = type[torch.autograd.Function]

_FUSED_LOSSES: Final = (
    ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"),
    ("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"),
    ("trl.kernels.logprob_entropy", "_LogProbEntropyFunction"),
    ("liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction"),
    ("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"),
    ("liger_kernel.ops.fused_linear_jsd", "LigerFusedLinearJSDFunction"),
)
"""Module and class of each known ``autograd.Function``."""

_told: Final[WeakSet[Function]] = WeakSet()


def opaque(function: F) -> F:
    """Let a function or a ``torch.autograd.Function`` be one op of every planned step.

    It keeps its own forward and backward, bit for bit; what it keeps for the backward and what it allocates
    meanwhile is measured at planning, on made-up numbers. Needed where PyTorch cannot trace what is inside
    (``out=``, kernels of other libraries), or decomposes it into more than it is.

    Parameters
    ----------
    function
        A function of tensors and constants (numbers, texts, types, None; in tuples, lists, dicts). Which ops
        it runs, and the shapes of what it returns and of what its backward keeps, do not depend on the
        numbers in the tensors. Whatever needs a gradient is an argument. It changes none of them, and returns
        no view of one; for random numbers it takes PyTorch's generator.

    Returns
    -------
    function
        A class as it is; in place of a function what to call. Outside of captured steps it is the function.

    Raises
    ------
    UsageError
        If it is neither of both. For a module, write a function of its parameters and inputs that calls
        ``torch.func.functional_call``.
    """
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        _told.add(function)
        return function
    if isinstance(function, (type, torch.nn.Module)) or not callable(function):
        raise UsageError(
            f"opaque takes a function or a torch.autograd.Function, and got {function!r}. To make a module "
            "one op, write a function of its parameters and inputs that calls torch.func.functional_call."
        )

    named = OpaqueCall(function.__qualname__, function)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (named if is_traced((args, kwargs)) else function)(*args, **kwargs)

    called.__module__ = function.__module__ or __name__  # a graph names it by its module
    called.opaque = named  # type: ignore[attr-defined]
    return torch.compiler.allow_in_graph(called)  # type: ignore[no-any-return]


@contextmanager
def opaque_while_capturing() -> Iterator[None]:
    """Let Dynamo write opaque calls into its graphs."""
    with dynamo_config.patch(allow_rnn=True), functions_in_graph([*_known(), *_told], _applied):
        yield


def _known() -> Iterator[Function]:
    """The known classes among what has been imported."""
    for module, name in _FUSED_LOSSES:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None:
            yield found


def _applied(function: Function) -> Callable[..., Any]:
    """What the node of a class calls."""
    return OpaqueCall(function.__name__.lstrip("_"), function.apply).as_function()


@dataclass(frozen=True)
class OpaqueCall:
    """A call in one of Dynamo's graphs that becomes one op; ``own``: which flat arguments are leaves."""

    name: str
    function: Callable[..., Any]
    own: tuple[int, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it while it is traced."""
        from hybridremat.graph.opaque.traced import call

        flat = tree_leaves((args, kwargs))
        return call(self.name, self.function, args, kwargs, [flat[place] for place in self.own])

    def as_function(self) -> Callable[..., Any]:
        """The call as a function, which a graph can name."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        called.__name__ = re.sub(r"\W+", "_", self.name)
        called.opaque = self  # type: ignore[attr-defined]
        return called


def note_leaves(module: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Tell the opaque calls of one of Dynamo's graphs which of their arguments are leaves."""
    placeholders = module.graph.find_nodes(op="placeholder")
    leaves = {n for n, i in zip(placeholders, inputs, strict=True) if isinstance(i, Tensor) and i.is_leaf}
    for node in module.graph.nodes:
        found = getattr(node.target, "opaque", None)
        if isinstance(found, OpaqueCall):
            flat = tree_leaves((tuple(node.args), dict(node.kwargs)))
            own = tuple(place for place, each in enumerate(flat) if each in leaves)
            node.target = replace(found, own=own).as_function()
    module.recompile()
