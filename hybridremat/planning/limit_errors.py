"""The errors for limits that no plan keeps: what was asked, what is possible, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph.joint import Op
from hybridremat.plans.records import PinRecord
from hybridremat.sequence.outside_memory import OutsideMemory
from hybridremat.units import format_bytes, format_overhead_up, format_share_up

HEAVY: Final = 0.8
"""The share of the least limit from which one op is named as what sets it."""


def infeasible(
    limit: int,
    least: int,
    plain_peak: int,
    outside: OutsideMemory,
    pins: Sequence[PinRecord],
    *,
    workspace: int = 0,
    searched: bool = False,
    heaviest: tuple[Op, int] | None = None,
) -> InfeasibleLimitError:
    """The error for a limit below the ``least`` feasible one (bytes).

    ``workspace``: what an optimizer in the backward takes at most. ``searched``: whether there may be less
    than the least that was found. ``heaviest``: the op that takes most, whatever else is alive.
    """
    share = format_share_up(least, plain_peak)
    under = f" under policy= ({', '.join(pin.pattern for pin in pins)})" if pins else ""
    less = ", pin less" if pins else ""
    kept = f", {format_bytes(outside.reserve)} of it kept free by reserve=" if outside.reserve else ""
    if outside.forwards > 1:
        kept += f", for {outside.forwards} forwards at a time"
    if 0 < limit <= 100:
        kept += f"; did you mean {limit}%?"
    early = ""
    if workspace:
        early = (
            f" The optimizer that steps in the backward takes up to {format_bytes(workspace)} of it "
            '(fused=True takes less), which the plain step does not count; gradients="at_end" leaves it out.'
        )
    if heaviest is not None and heaviest[1] >= HEAVY * least:
        early += _named(*heaviest)
    return InfeasibleLimitError(
        f"no plan fits memory_limit {format_bytes(limit)} ({limit} bytes{kept}): "
        f"the least feasible limit{' that was found' if searched else ''} for this model and "
        f"input{under} is {format_bytes(least)} "
        f"({least} bytes, {share} of the plain step's {format_bytes(plain_peak)}). "
        f"Raise the limit to that, make the batch or the input smaller{less} (hybridremat.max_batch_size "
        f"finds the largest batch), or pass "
        f'on_infeasible="least" to run the plan of least memory.{early}',
        limit=limit,
        least=least,
    )


def _named(op: Op, alone: int) -> str:
    """Of an op that no plan can make smaller."""
    where = f" ({op.source})" if op.source else ""
    return (
        f" One op, {op.name}{where}, takes {format_bytes(alone)} of it alone, with what it reads, writes and "
        "works in: no plan goes below that."
    )


def too_slow(limit: int, max_overhead: float, *, takes: float, least: int) -> InfeasibleLimitError:
    """The error for a feasible limit that no plan keeps within an overhead.

    ``takes`` is the overhead of the fastest plan under the limit, and ``least`` the least feasible limit
    (bytes) within ``max_overhead``.
    """
    return InfeasibleLimitError(
        f"no plan keeps both memory_limit {format_bytes(limit)} and max_overhead {max_overhead:.1%}: "
        f"the fastest plan under that limit takes {format_overhead_up(takes)} more time, and the least limit "
        f"with that overhead is {format_bytes(least)} ({least} bytes). Raise one of the two, or give only "
        "one.",
        limit=limit,
        least=least,
    )
