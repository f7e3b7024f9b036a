"""How much work the options of one block may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How fine to look. Counts and deterministic time only: the result must not depend on the machine.

    Attributes
    ----------
    solves, solo_solves
        Most solves for the ordinary and the solo family.
    resolution, limit_resolution
        Smallest side of a rectangle, and smallest distance of two peak limits of a lattice, as a share of the
        whole range.
    tolerance
        Time difference not worth a solve, as a share of the block's forward time.
    deterministic_time, family_time
        Limits of one solve, and of all solves of a family, in CP-SAT's deterministic seconds.
    limits, least_limits
        Most and least peak limits that a lattice is swept for.
    entries
        Array entries that all sweeps of a lattice may touch once they are more than the least limits.
    fused_above
        Array entries of one sweep beyond which ops that work for the next one alone run together with it.
    solved_above, most_values
        Array entries of one sweep, and values of a lattice, beyond which CP-SAT solves instead: 4 to 8 s and
        100 MB at the first, 170 MB at the second, on blocks whose every value can be alive at once.
    """

    solves: int = 240
    solo_solves: int = 40
    resolution: float = 0.01
    tolerance: float = 0.001
    deterministic_time: float = 0.3
    family_time: float = 3.0
    limit_resolution: float = 0.00001
    limits: int = 128
    least_limits: int = 48
    entries: int = 500_000_000
    fused_above: int = 300_000
    solved_above: int = 65_000_000
    most_values: int = 21
