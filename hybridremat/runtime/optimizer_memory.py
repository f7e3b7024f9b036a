"""What an optimizer will take: its state and a step's temporaries, by steps of a twin on meta tensors."""

from __future__ import annotations

import ast
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from hybridremat.errors import OptionsError
from hybridremat.graph.private_torch import TorchDispatchMode, tree_leaves

SCALARS = 64
"""Bytes, at most, that kernels take for numbers among their arguments, and allocate on the CPU."""

Rounded = Callable[[int], int]
FORMS = 'give "adamw", "sgd,momentum=0.9", "adamw,foreach=False", or "module:Class"'


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of the state that an optimizer keeps, and the most that its step holds beside it."""

    state: int
    step: int


class _Live(TorchDispatchMode):
    """Counts the bytes of meta tensors that ops make, while they live; ``peak`` is the most at one time."""

    def __init__(self, rounded: Rounded) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded, self.now, self.peak = rounded, 0, 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {id(_storage(item)) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        made = func(*args, **(kwargs or {}))
        for item in tree_leaves(made):
            if isinstance(item, Tensor) and item.is_meta and id(_storage(item)) not in known:
                self._count(_storage(item))
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = self.rounded(storage.nbytes())
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def optimizer_memory(
    kind: str, parameters: Iterable[nn.Parameter], *, device: str, rounded: Rounded, alone: bool = False
) -> OptimizerMemory:
    """What an optimizer will take for the parameters that are trained.

    Parameters
    ----------
    kind
        A name of ``torch.optim`` in any case, or ``module:Class``, and after commas its arguments.
    device
        The kind of device: on ``cuda`` PyTorch takes the ``foreach`` forms where nothing else is asked.
    rounded
        Bytes that the device's allocator takes for so many.
    alone
        Whether it steps for one parameter at a time, as in the backward.

    Raises
    ------
    OptionsError
        If there is no such optimizer, it does not take the arguments, or its step cannot be tried.
    """
    if not isinstance(kind, str):
        raise OptionsError(f"optimizer is a name, and got an object of {type(kind).__name__}: {FORMS}")
    make, given = _read(kind)
    shadows = [nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters if p.requires_grad]
    options = dict(given)
    takes = inspect.signature(make).parameters
    if "foreach" in takes:
        fused = bool(options.pop("fused", None))  # writes in place, and runs on no meta tensor
        wanted = options.pop("foreach", None)
        options["foreach"] = (device == "cuda" if wanted is None else wanted) and not (fused or alone)
    if "lr" in takes and takes["lr"].default is inspect.Parameter.empty:
        options.setdefault("lr", 0.1)
    try:
        twin = make(shadows, **options)
    except Exception as error:
        raise OptionsError(f"optimizer {kind!r} cannot be made ({error}): {FORMS}") from error
    try:
        step = _tried(twin, shadows, rounded)
    except Exception as error:
        raise OptionsError(
            f"optimizer {kind!r} takes no step on tensors without values ({type(error).__name__}: {error}): "
            f"{FORMS} of an optimizer whose step reads none and takes no closure"
        ) from error
    step = 0 if given.get("fused") else step
    return OptimizerMemory(_state_bytes(twin, device, rounded), step + (SCALARS if device == "cpu" else 0))


def _tried(twin: torch.optim.Optimizer, shadows: list[nn.Parameter], rounded: Rounded) -> int:
    """The most bytes that a second step holds, when the state is there."""
    for shadow in shadows:
        shadow.grad = torch.empty_like(shadow)
    twin.step()
    with _Live(rounded) as live:
        twin.step()
    return int(live.peak)


def _state_bytes(twin: torch.optim.Optimizer, device: str, rounded: Rounded) -> int:
    """Counts of steps are kept on the CPU, where they count if that is the device."""
    items = [item for state in twin.state.values() for item in tree_leaves(state) if isinstance(item, Tensor)]
    storages = {id(_storage(item)): _storage(item) for item in items if item.is_meta or device == "cpu"}
    return sum(rounded(storage.nbytes()) for storage in storages.values())


def _read(kind: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    name, *pairs = kind.split(",")
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip().isidentifier():
            raise OptionsError(f"optimizer {kind!r}: {pair!r} is no KEY=VALUE; {FORMS}")
        try:
            given[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            given[key.strip()] = value.strip()
    return _class(kind, name.strip()), given


def _class(kind: str, name: str) -> type[torch.optim.Optimizer]:
    place, colon, below = name.rpartition(":")
    if colon:
        try:
            found = getattr(import_module(place), below, None)
        except ImportError as error:
            raise OptionsError(f"optimizer {kind!r}: {error}; {FORMS}") from error
    else:
        known = {each.lower(): each for each in dir(torch.optim)}
        found = getattr(torch.optim, known.get(name.lower(), ""), None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise OptionsError(f"optimizer {kind!r}: there is no such optimizer; {FORMS}")
    return found
