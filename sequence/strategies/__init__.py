"""Published ways to choose what is recomputed, on the same graph, chain, options and simulator.

Each has a file, loaded when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Final

from hybridremat.sequence.strategies.strategy import Strategy
from hybridremat.sequence.strategies.whole_graph import WholeGraph, WholeGraphSearch

_FILES: Final = {
    "hybrid": "hybrid.HYBRID",
    "plain": "plain.PLAIN",
    "sqrt": "segments.SQRT",
    "every-block": "segments.EVERY_BLOCK",
    "min-peak": "min_peak.MIN_PEAK",
    "rotor": "rotor.ROTOR",
    "rockmate": "rockmate.ROCKMATE",
    "checkmate": "checkmate.CHECKMATE",
    "checkmate-lp": "checkmate_lp.CHECKMATE_LP",
    "layers-lp": "layers_lp.LAYERS_LP",
    "offload-all": "one_ahead.OFFLOAD_ALL",
    "offload-inputs": "one_ahead.OFFLOAD_INPUTS",
}
"""By name, as the user writes it: the file in this folder, and what it is called there."""


class _Strategies(MutableMapping[str, Strategy | WholeGraph]):
    """By name; one that is not there by its name in :data:`_FILES` is set."""

    def __init__(self) -> None:
        self._loaded: dict[str, Strategy | WholeGraph] = {}

    def __getitem__(self, name: str) -> Strategy | WholeGraph:
        if name not in self._loaded:
            file, called = _FILES[name].split(".")
            self._loaded[name] = getattr(import_module(f"{__name__}.{file}"), called)
        return self._loaded[name]

    def __setitem__(self, name: str, strategy: Strategy | WholeGraph) -> None:
        self._loaded[name] = strategy

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*_FILES, *self._loaded)))

    def __len__(self) -> int:
        return len({*_FILES, *self._loaded})


STRATEGIES: Final = _Strategies()
"""By name."""

__all__ = ["STRATEGIES", "Strategy", "WholeGraph", "WholeGraphSearch"]
