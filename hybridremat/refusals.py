"""Errors for an overhead that cannot be kept."""

from __future__ import annotations

from hybridremat.errors import InfeasibleLimitError, PolicyError
from hybridremat.limits import format_bytes


def too_slow(limit: int, max_overhead: float, *, takes: float, least: int) -> InfeasibleLimitError:
    """The error for a limit that can be kept, but not within an overhead.

    Parameters
    ----------
    takes
        Overhead of the fastest plan under the limit.
    least
        Bytes of the least limit that can be kept within ``max_overhead``.
    """
    return InfeasibleLimitError(
        f"no plan keeps both memory_limit {format_bytes(limit)} and max_overhead {max_overhead:.1%}: "
        f"the fastest plan under that limit takes {takes:.1%} more time, and the least limit with that "
        f"overhead is {format_bytes(least)} ({least} bytes). Raise one of the two, or give only one.",
        limit=limit,
        least=least,
    )


def too_slow_policy(max_overhead: float, takes: float) -> PolicyError:
    """The error for a policy that takes more time (fractions of the plain step's) than was allowed."""
    return PolicyError(
        f"policy: what it says must_recompute takes {takes:.1%} more time than the plain step, which is more "
        f"than max_overhead {max_overhead:.1%}. Raise max_overhead, or recompute less."
    )
