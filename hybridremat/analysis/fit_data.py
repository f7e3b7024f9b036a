"""What training takes on a device beside what the device has: the figures."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from hybridremat.analysis.batch_size import BatchSize
from hybridremat.analysis.needs import TrainingNeeds
from hybridremat.planning.plan import Plan

Fits = Literal["plain", "planned", "no"]


@dataclass(frozen=True, kw_only=True)
class FitData(TrainingNeeds):
    """The fields of :class:`hybridremat.Fit`, which explains them."""

    device: str
    memory: int
    margin: int
    plain_step: int
    least_step: int
    reserve: int = 0
    memory_limit: int | None = None
    plan: Plan | None = field(default=None, repr=False)
    largest: BatchSize | None = None

    @property
    def room(self) -> int:
        """Bytes that are left for the step."""
        inside = self.optimizer_step if self.early_gradients else 0
        return self.memory - self.margin - self.resident - inside

    @property
    def fits(self) -> Fits:
        """Whether it fits without a plan, with one, or not."""
        if self.memory_limit is None:
            return "no"
        return "planned" if self.plan is not None else "plain"

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types; of the plan, its overhead."""
        left_out = ("plan", "largest")
        figures = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in left_out}
        return {
            **figures,
            "resident": self.resident,
            "room": self.room,
            "fits": self.fits,
            "overhead": None if self.plan is None else self.plan.overhead,
            "largest": None if self.largest is None else self.largest.to_dict(),
        }
