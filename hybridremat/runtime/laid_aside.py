"""What transformers does in a forward that a planned step does without, and trains with the same numbers.

Key/value caches are for generation. A hook that makes embeddings require a gradient
(``enable_input_require_grads``, for checkpointing of a model whose embeddings are frozen) breaks the graph,
and a planned step needs no checkpoints.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

_LOCK: Final = threading.Lock()
_off: Final[Counter[int]] = Counter()  # by identity of what is off: for how many forwards, of all threads

_HOOKS: Final = "make_inputs_require_grad", "make_inputs_require_grads"
"""As transformers and PEFT name it, in their modules."""


@dataclass(frozen=True)
class _Cache:
    """The switch of a configuration."""

    owner: Any

    @property
    def is_on(self) -> bool:
        return self.owner.use_cache is True

    def turn(self, *, on: bool) -> None:
        self.owner.use_cache = on


@dataclass(frozen=True)
class _Hook:
    """A forward hook of a module, by its number in ``hooks``."""

    owner: Any
    hooks: dict[int, Any]
    number: int

    @property
    def is_on(self) -> bool:
        return self.number in self.hooks

    def turn(self, *, on: bool) -> None:
        if not on:
            del self.hooks[self.number]
            return
        later = {number: self.hooks.pop(number) for number in list(self.hooks) if number > self.number}
        self.hooks.update({self.number: self.owner, **later})


LaidAside = Sequence[_Cache | _Hook]


@contextmanager
def without(found: LaidAside) -> Iterator[None]:
    """Switch these off until exit, of the last of all threads."""
    with _LOCK:
        mine = [each for each in found if each.is_on or id(each.owner) in _off]
        for each in mine:
            if each.is_on:
                each.turn(on=False)
        _off.update(id(each.owner) for each in mine)
    try:
        yield
    finally:
        with _LOCK:
            _off.subtract(id(each.owner) for each in mine)
            for each in mine:
                if not _off[id(each.owner)]:
                    del _off[id(each.owner)]
                    each.turn(on=True)


def laid_aside(model: nn.Module) -> LaidAside:
    """The switches of a model: each configuration with ``use_cache``, and those hooks."""
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "use_cache")}
    hooks = [
        _Hook(hook, module._forward_hooks, number)
        for module in model.modules()
        for number, hook in module._forward_hooks.items()
        if getattr(hook, "__name__", "") in _HOOKS and hook.__module__.startswith(("transformers.", "peft."))
    ]
    return [*map(_Cache, configs.values()), *hooks]
