"""A call that stays one op of the joint graph: what is called, on which inputs, in which state of PyTorch."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridremat.errors import CaptureError
from hybridremat.graph.opaque.places import Layout
from hybridremat.graph.private_torch import as_in_eager, tree_flatten, tree_unflatten

_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.Size)


@dataclass(frozen=True)
class Input:
    """A tensor that a call is given, and what autograd knows of it; autocast keeps its casts of leaves."""

    layout: Layout
    requires_grad: bool
    leaf: bool

    def prepared(self, tensor: Tensor) -> Tensor:
        """A tensor as the call is to see it: alone in an autograd graph."""
        leaf = tensor.detach().requires_grad_(self.requires_grad)
        return leaf if self.leaf or not self.requires_grad else leaf.view_as(leaf)


@dataclass(frozen=True)
class Autocast:
    """The state of autocast for one kind of device."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def now(device: str) -> Autocast:
        """The current state."""
        return Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


@dataclass(frozen=True)
class Region:
    """A call of a function as the graph sees it.

    ``arguments`` are the leaves of its arguments, with None where ``inputs`` follow one another
    (``tensors`` says where), and ``structure`` puts them together. ``grad``: whether autograd is on, which
    kernels go by even where nothing needs a gradient. ``keeps_casts``: whether autocast keeps what it casts
    for further readers in the call; afterwards its cache is emptied.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    tensors: tuple[int, ...]
    structure: Any
    inputs: tuple[Input, ...]
    grad: bool
    autocast: tuple[Autocast, ...]
    keeps_casts: bool = True

    @property
    def key(self) -> str:
        """Names the call in any process: equal for what runs the same kernels."""
        parts = self.arguments, self.tensors, str(self.structure), self.inputs, self.grad, self.autocast
        text = repr((self.name, _code_of(self.function), *parts))
        readable = re.sub(r"\W+", "_", self.name).strip("_").lower()
        return f"{readable}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Call the function with autograd, in the state of autocast that it was captured in."""
        leaves = list(self.arguments)
        for place, tensor in zip(self.tensors, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        with self._state():
            return self.function(*args, **kwargs)

    @contextmanager
    def _state(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(as_in_eager())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for each in self.autocast:
                how = {"enabled": each.enabled, "cache_enabled": self.keeps_casts}
                stack.enter_context(torch.autocast(each.device, each.dtype, **how))
            if self.keeps_casts and any(each.enabled for each in self.autocast):
                stack.callback(torch.clear_autocast_cache)
            yield


def region_of(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    own: Sequence[Tensor] = (),
) -> tuple[Region, list[Tensor]]:
    """The region of a call, and the tensors that it is given.

    ``own``: those among them that are leaves of the step, as parameters are; a trace does not show it.

    Raises
    ------
    CaptureError
        If an argument is neither a tensor nor a constant.
    """
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    where = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    for leaf in constants:
        if not isinstance(leaf, _CONSTANTS):
            raise CaptureError(
                f"{name} is to stay one op of the graph, and is given a {type(leaf).__name__}. It can be "
                "given tensors, numbers, texts, types and None, in tuples, lists and dicts."
            )
    given = [leaves[place] for place in where]
    grad, leaf = torch.is_grad_enabled(), {id(each) for each in own}
    inputs = tuple(Input(Layout.of(t), grad and t.requires_grad, id(t) in leaf) for t in given)
    devices = sorted({t.device.type for t in given} - {"meta"}) or ["cpu"]
    autocast = tuple(map(Autocast.now, devices))
    return Region(name, function, constants, where, structure, inputs, grad, autocast), given


def _code_of(function: Callable[..., Any]) -> str:
    """A hash of the file that a function or class stands in, empty for what PyTorch brings."""
    owner = getattr(function, "__self__", None)
    subject = owner if inspect.isclass(owner) else function
    module = getattr(subject, "__module__", None) or ""
    if module.partition(".")[0] in ("torch", ""):
        return ""
    try:
        text = inspect.getsource(inspect.getmodule(subject) or subject)
    except (OSError, TypeError):
        code = getattr(subject, "__code__", None)
        text = repr((code.co_code, code.co_consts)) if code is not None else repr(subject)
    return hashlib.sha256(text.encode()).hexdigest()
