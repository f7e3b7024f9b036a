"""The result of the search for a batch size: as data, and in words."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from hybridremat.planning.plan import Plan
from hybridremat.units import format_bytes


class TriedBatch(NamedTuple):
    """Bytes that one batch needs, ``reserve`` and ``forwards`` included.

    ``least_peak`` is None if only the plain step was looked at. Within the limit it may be a few % above the
    least possible; beyond the limit it comes from blocks solved for this very batch.
    """

    batch: int
    least_peak: int | None
    plain_peak: int


@dataclass(frozen=True)
class BatchSize:
    """The largest batch whose step fits a limit.

    Attributes
    ----------
    batch_size
        It has a plan under the limit, and the next one has none (unless ``reached_most``).
    memory_limit
        Bytes of step memory.
    plan
        For that batch under that limit.
    plain_batch_size
        The largest batch whose plain step, as captured, fits without a plan; 0 if none does.
    overhead
        Extra time of the plan as a fraction of the plain step's at the same batch, by the cost model.
    per_sample
        Extra time for each sample as a fraction, against the plain step at ``plain_batch_size``: negative
        where the larger batch saves more than the plan costs. None if that is 0.
    tried
        Every batch that was tried, by size.
    reached_most
        Whether the search ended because ``most`` itself fits.
    """

    batch_size: int
    memory_limit: int
    plan: Plan = field(repr=False)
    plain_batch_size: int
    overhead: float
    per_sample: float | None
    tried: tuple[TriedBatch, ...]
    reached_most: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain JSON types, without the plan (:meth:`hybridremat.Plan.to_dict`)."""
        figures = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "plan"}
        return {**figures, "tried": [each._asdict() for each in self.tried]}

    def __str__(self) -> str:
        return "\n".join([self._found(), self._costs(), self._without()])

    def _found(self) -> str:
        limit = format_bytes(self.memory_limit)
        if self.reached_most:
            return f"batch {self.batch_size} fits {limit}; no larger one was asked for (most)"
        text = f"batch {self.batch_size} is the largest that fits {limit}"
        beyond = next((tried for tried in self.tried if tried.batch == self.batch_size + 1), None)
        if beyond is None or beyond.least_peak is None:
            return text
        return f"{text}: batch {beyond.batch} needs {format_bytes(beyond.least_peak)} at least"

    def _costs(self) -> str:
        return (
            f"its plan takes {format_bytes(self.plan.needed)} and {self.overhead:+.1%} time against the "
            f"plain step of that batch, which would take {format_bytes(self.plan.plain_peak)} "
            f"(cost model {self.plan.cost_model})"
        )

    def _without(self) -> str:
        if self.per_sample is None:
            return "without a plan not even batch 1 fits"
        times = self.batch_size / self.plain_batch_size
        return (
            f"without a plan the largest batch is {self.plain_batch_size}: {times:.3g} times the "
            f"samples a step, {self.per_sample:+.1%} time a sample"
        )
