"""One measurement beside the frontier: what was predicted, and what a real step took."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.plan_records import FrontierPoint

TOLERANCE = 0.001  # of the prediction: scalars of the measuring code itself are a few bytes


@dataclass(frozen=True)
class MeasuredPoint:
    """A step that was run and measured.

    Attributes
    ----------
    predicted
        The point of the frontier whose plan ran; None for the plain step, run by PyTorch without a plan.
    peak
        Bytes of step memory, with what a loss outside the model allocated.
    outside
        Most bytes that code outside the model allocated between forward and backward.
    seconds
        Wall time of a step.
    overhead
        Extra time as a fraction of the plain step's: median over pairs of steps taken in turn, less 1.
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
