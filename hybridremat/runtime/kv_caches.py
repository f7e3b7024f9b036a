"""Key/value caches of transformers models, which training does not need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def without_caches(configs: Sequence[Any]) -> Iterator[None]:
    """Switch ``use_cache`` off in these configurations until exit."""
    switched = [config for config in configs if config.use_cache is True]
    for config in switched:
        config.use_cache = False
    try:
        yield
    finally:
        for config in switched:
            config.use_cache = True


def caching_configs(model: nn.Module) -> list[Any]:
    """The distinct ``config`` objects with ``use_cache`` of the modules, as in transformers."""
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "use_cache")}
    return list(configs.values())
