"""The frontier of a step as plain data: its points, and what was measured beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridremat.plans.origin import Origin
from hybridremat.plans.records import FrontierPoint

TOLERANCE = 0.001  # of the prediction: scalars of the measuring code itself take a few bytes


@dataclass(frozen=True)
class MeasuredPoint:
    """A step that was run and measured.

    Attributes
    ----------
    predicted
        The point of the frontier whose plan ran; None for the plain step, run by PyTorch without a plan.
    peak
        Bytes of step memory, with what a loss outside the model allocates.
    outside
        Most bytes that code outside the model held between forward and backward.
    seconds
        Wall time of a step.
    overhead
        Extra time as a fraction of the plain step's: median of pairs of steps, planned and plain in turn.
    """

    predicted: FrontierPoint | None
    peak: int
    outside: int
    seconds: float
    overhead: float

    @property
    def agrees(self) -> bool:
        """Whether the peak is the predicted one (within 0.1 %). The plain step has no prediction."""
        if self.predicted is None:
            return True
        return abs(self.peak - self.predicted.peak) <= TOLERANCE * self.predicted.peak


@dataclass(frozen=True)
class OverheadBound:
    """No schedule of at most ``peak`` bytes has less ``overhead``: a fraction of the plain step's time."""

    peak: int
    overhead: float


@dataclass(frozen=True)
class FrontierData:
    """The fields of :class:`hybridremat.Frontier`, which explains them."""

    points: tuple[FrontierPoint, ...]
    plain_peak: int
    checkpointed: FrontierPoint | None = None
    measurements: tuple[MeasuredPoint, ...] = ()
    origin: Origin = field(default_factory=Origin)
    bounds: tuple[OverheadBound, ...] = ()
    least_bound: int | None = None
    cost_model: str = field(default="", compare=False, kw_only=True)

    @property
    def least(self) -> FrontierPoint:
        """The point of least memory."""
        return self.points[0]

    @property
    def plain(self) -> FrontierPoint:
        """The plain step."""
        return FrontierPoint(self.plain_peak, 0.0, 0.0)
