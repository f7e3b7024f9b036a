"""The choices at one sub-chain, in columns: options of its first block, and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridremat.sequence.skip_liveness import Ending

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of one block, one entry each.

    Option ``number`` needs ``least`` slots, leaves all but ``saved`` of them (below zero: more) to the blocks
    after it, where the values ``rest`` end, and takes ``time`` nanoseconds, the block's forward included.
    """

    number: Integers
    saved: Integers
    least: Integers
    time: Integers
    rest: tuple[Ending, ...]


@dataclass(frozen=True, slots=True)
class Splits:
    """Checkpoints of one sub-chain (s,t), one entry each.

    A checkpoint at boundary ``at`` (j) needs ``least`` slots; (j,t) has ``carried`` slots less and the values
    ``later`` end there; (s,j−1) has ``grown`` less (below zero: more), and ``earlier`` end; running s…j−1
    takes ``time`` nanoseconds.
    """

    at: Integers
    least: Integers
    carried: Integers
    grown: Integers
    time: Integers
    later: tuple[Ending, ...]
    earlier: tuple[Ending, ...]


class Kind(NamedTuple):
    """What an option does with far values, by rank: leaves those it made alone, touches those that enter."""

    idle: frozenset[int]
    touched: frozenset[int]

    def covers(self, other: Kind) -> bool:
        """Whether it lets go of as much as another."""
        return self.idle >= other.idle and self.touched <= other.touched
