"""What training takes on one of several devices: the figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hybridremat.analysis.fit_data import FitData, Fits


@dataclass(frozen=True, kw_only=True)
class OnDevices:
    """One number of devices; bytes of one of them.

    Attributes
    ----------
    gpus
        How many.
    resident
        What stays from step to step.
    plain_step, least_step
        Step memory without a plan, and with the one of least memory.
    room
        What is left for the step.
    fits
        ``"plain"``, ``"planned"`` or ``"no"``.
    overhead
        Extra time of its plan, as a fraction of the plain step's; None without one.
    sent
        What it sends, and receives, in a step.
    sending_time
        Nanoseconds of that on the link; None if the link is not known.
    """

    gpus: int
    resident: int
    plain_step: int
    least_step: int
    room: int
    fits: Fits
    overhead: float | None
    sent: int
    sending_time: int | None


@dataclass(frozen=True, kw_only=True)
class ShardedFitData(FitData):
    """The fields of :class:`hybridremat.ShardedFit`, which explains them."""

    gpus: int
    shard: str
    link: float | None
    units: tuple[str, ...]
    step_time: int
    table: tuple[OnDevices, ...]

    @property
    def least_gpus(self) -> int | None:
        """The fewest devices of the table on which it fits; None if it fits on none."""
        return min((each.gpus for each in self.table if each.fits != "no"), default=None)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types; of the plan, its overhead."""
        table = [asdict(each) for each in self.table]
        return {**super().to_dict(), "table": table, "least_gpus": self.least_gpus}
