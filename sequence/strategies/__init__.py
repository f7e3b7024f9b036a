"""Published ways to choose what is recomputed, on the same chain, options and simulator."""

from __future__ import annotations

from typing import Final

from hybridremat.sequence.strategies.hybrid import HYBRID
from hybridremat.sequence.strategies.min_peak import MIN_PEAK
from hybridremat.sequence.strategies.plain import PLAIN
from hybridremat.sequence.strategies.rockmate import ROCKMATE
from hybridremat.sequence.strategies.rotor import ROTOR
from hybridremat.sequence.strategies.segments import EVERY_BLOCK, SQRT
from hybridremat.sequence.strategies.strategy import Strategy

STRATEGIES: Final = {
    each.name: each for each in (HYBRID, PLAIN, SQRT, EVERY_BLOCK, MIN_PEAK, ROTOR, ROCKMATE)
}
"""By name."""

__all__ = ["STRATEGIES", "Strategy"]
