"""Judges that allow less than what was asked for does."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.graph.joint import Schedule
from hybridremat.sequence.judge import Judge


@dataclass(frozen=True)
class AllowsOne(Judge):
    """Allows a single schedule."""

    allowed: Schedule | None = None

    def allows(self, schedule: Schedule) -> bool:
        """Whether it is that one."""
        return schedule == self.allowed
