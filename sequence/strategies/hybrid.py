"""``hybrid``, the default: all Pareto options of each block, composed by the chain's dynamic program.

docs/method.md describes it. In exact bytes no strategy with some of these options can be better; in slots of
memory the program takes some schedules for dominated that are not. So it runs once more with the options of
Rockmate's grid (for one plan only near the least memory): on the reference models these alone found something
that it had lost. Under the limit that is asked for, exchanges and polishing then go on without regard to
blocks (:mod:`hybridremat.sequence.exchange`, :mod:`hybridremat.sequence.polish`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from hybridremat.blocks.types import OptionSet
from hybridremat.sequence.exchange.improve import exchanges
from hybridremat.sequence.polish.improve import polishing
from hybridremat.sequence.strategies.rockmate import on_grid
from hybridremat.sequence.strategies.strategy import Strategy, every_option


def saving_little(share: float, options: OptionSet) -> OptionSet:
    """The options that save at most this share of the way from the least that any saves to the most."""
    saved = [each.saved_bytes for each in options.options]
    most = min(saved) + share * (max(saved) - min(saved))
    few = tuple(each for each in options.options if each.saved_bytes <= most)
    return replace(options, options=few)


THRIFTY: Final = tuple(partial(saving_little, share) for share in (0.0, 0.2, 0.5))

HYBRID: Final = Strategy(
    "hybrid", every_option, rivals=(on_grid,), waiting=THRIFTY, searches=(exchanges, polishing)
)
