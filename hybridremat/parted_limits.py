"""What a step of several graphs is asked to keep to, and the errors where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridremat.errors import InfeasibleLimitError
from hybridremat.limits import format_bytes
from hybridremat.planner import too_slow
from hybridremat.sequence.parts import PartedStep, choose_points
from hybridremat.settings import Settings


@dataclass(frozen=True)
class Asked:
    """The limits of one step: ``limit`` and ``reserve`` in bytes, ``overhead`` a fraction; None: any.

    ``plain_peak`` (bytes) and ``plain_time`` (nanoseconds) are those of the step with each graph plain.
    """

    limit: int | None
    reserve: int
    overhead: float | None
    plain_peak: int
    plain_time: int

    @staticmethod
    def of(plain: PartedStep, settings: Settings) -> Asked:
        """What settings ask of the step whose plain figures are given."""
        first = (0,) * len(plain.parts)
        peak = plain.peak(first)
        return Asked(
            settings.limit_bytes(peak),
            settings.reserve_bytes(),
            settings.overhead_limit(),
            peak,
            plain.time(first),
        )

    @property
    def memory(self) -> int | None:
        """Most bytes of the step itself."""
        return None if self.limit is None else self.limit - self.reserve

    @property
    def most_time(self) -> int | None:
        """Most nanoseconds of the step."""
        return None if self.overhead is None else int(self.plain_time * (1 + self.overhead))

    def takes(self, step: PartedStep, points: Sequence[int]) -> float:
        """Extra time of some points, as a fraction of the plain step's."""
        return step.time(points) / self.plain_time - 1.0 if self.plain_time else 0.0


def refusal(step: PartedStep, asked: Asked, least: int) -> InfeasibleLimitError:
    """The error for a step of which no points keep to what was asked; ``least`` bytes are feasible."""
    if asked.limit is not None and asked.limit < least:
        return _no_memory(asked.limit, least, asked.plain_peak, len(step.order))
    assert asked.overhead is not None, "a step that fits in memory can only take too long"
    within = choose_points(step, most_time=asked.most_time)
    fastest = choose_points(step, limit=step.loosest() if asked.memory is None else asked.memory)
    assert fastest is not None, "a step that fits in memory has a fastest way to run"
    takes = asked.takes(step, fastest)
    if within is None:
        return _no_time(asked.overhead, takes, least)
    assert asked.limit is not None, "only a limit can exclude points within the overhead"
    return too_slow(asked.limit, asked.overhead, takes=takes, least=step.peak(within) + asked.reserve)


def _no_memory(limit: int, least: int, plain_peak: int, count: int) -> InfeasibleLimitError:
    return InfeasibleLimitError(
        f"no plan fits memory_limit {format_bytes(limit)} ({limit} bytes) for this step of {count} graphs: "
        f"the least feasible limit is {format_bytes(least)} ({least} bytes, "
        f"{100 * least / max(1, plain_peak):.1f} % of the plain step's {format_bytes(plain_peak)}). Raise "
        "the limit, or remove graph breaks: what crosses one is kept to the end of the step, and nothing is "
        "recomputed across it.",
        limit=limit,
        least=least,
    )


def _no_time(overhead: float, takes: float, least: int) -> InfeasibleLimitError:
    return InfeasibleLimitError(
        f"no plan keeps max_overhead {overhead:.1%} on this path of the model: graphs that it shares with "
        f"other paths run as was chosen for those, and the fastest plan takes {takes:.1%} more time. Raise "
        "max_overhead, or wrap with inputs that take this path.",
        limit=0,
        least=least,
    )
