"""Published ways to choose what is recomputed, on the same graph, chain, options and simulator."""

from __future__ import annotations

from typing import Final

from hybridremat.sequence.strategies.checkmate import CHECKMATE
from hybridremat.sequence.strategies.checkmate_lp import CHECKMATE_LP
from hybridremat.sequence.strategies.hybrid import HYBRID
from hybridremat.sequence.strategies.min_peak import MIN_PEAK
from hybridremat.sequence.strategies.plain import PLAIN
from hybridremat.sequence.strategies.rockmate import ROCKMATE
from hybridremat.sequence.strategies.rotor import ROTOR
from hybridremat.sequence.strategies.segments import EVERY_BLOCK, SQRT
from hybridremat.sequence.strategies.strategy import Strategy
from hybridremat.sequence.strategies.whole_graph import WholeGraph, WholeGraphPoints

_ALL: Final[tuple[Strategy | WholeGraph, ...]] = (
    HYBRID,
    PLAIN,
    SQRT,
    EVERY_BLOCK,
    MIN_PEAK,
    ROTOR,
    ROCKMATE,
    CHECKMATE,
    CHECKMATE_LP,
)

STRATEGIES: Final = {each.name: each for each in _ALL}
"""By name."""

__all__ = ["STRATEGIES", "Strategy", "WholeGraph", "WholeGraphPoints"]
