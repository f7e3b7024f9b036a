"""The frontier as data: step memory against overhead."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridremat.limits import format_bytes, parse_overhead, resolve_limit
from hybridremat.plan_making import frontier_point, frontier_points
from hybridremat.plan_records import FrontierPoint
from hybridremat.planner import Planning


@dataclass(frozen=True)
class Frontier:
    """Pareto points by rising peak; each is the exact figure of a schedule.

    Attributes
    ----------
    points
        The curve.
    plain_peak
        Step memory of the plain step in bytes.
    """

    points: tuple[FrontierPoint, ...]
    plain_peak: int
    _planning: Planning = field(repr=False, compare=False)

    @property
    def least(self) -> FrontierPoint:
        """The point of least memory."""
        return self.points[0]

    def at(
        self, *, memory_limit: int | str | None = None, max_overhead: float | str | None = None
    ) -> FrontierPoint:
        """The fastest point under a limit, or the smallest within an overhead.

        Raises
        ------
        InfeasibleLimitError
            If no point satisfies what was asked.
        LimitError
            If it cannot be read.
        """
        limit = None if memory_limit is None else resolve_limit(memory_limit, self.plain_peak)
        overhead = None if max_overhead is None else parse_overhead(max_overhead)
        return frontier_point(self._planning, self._planning.choose(limit, overhead).point)

    def __str__(self) -> str:
        lines = [f"plain step {format_bytes(self.plain_peak)}; {len(self.points)} points"]
        for point in self.points:
            share = 100 * point.peak / self.plain_peak
            lines.append(
                f"{format_bytes(point.peak):>12} {share:6.1f} %  overhead {100 * point.overhead:6.1f} %"
            )
        return "\n".join(lines)


def make_frontier(planning: Planning) -> Frontier:
    """The curve of a planning run."""
    return Frontier(frontier_points(planning), planning.plain.peak, planning)
