"""The limits of a step of several graphs, and the errors if they cannot be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from hybridremat.errors import InfeasibleLimitError
from hybridremat.planning.limit_errors import too_slow
from hybridremat.planning.settings import Settings
from hybridremat.sequence.joined_graphs import MultiGraphStep, choose_points
from hybridremat.units import format_bytes, format_overhead_up, format_share_up

NOTHING: Final = 0.98
"""The share of the plain step from which a least limit saves nothing."""


@dataclass(frozen=True)
class StepLimits:
    """The limits of one step: ``limit`` and ``reserve`` in bytes, ``overhead`` as a fraction; None: any.

    ``plain_peak`` (bytes) and ``plain_time`` (ns) are the plain step's; ``pinned``: there is a policy;
    ``instead``: what would help.
    """

    limit: int | None
    reserve: int
    overhead: float | None
    plain_peak: int
    plain_time: int
    pinned: bool = False
    instead: str = "remove graph breaks"

    @staticmethod
    def of(plain: MultiGraphStep, settings: Settings) -> StepLimits:
        """The limits of settings for a step; ``plain`` is the plain step."""
        first = (0,) * len(plain.parts)
        peak = plain.peak(first)
        return StepLimits(
            settings.limit_bytes(peak),
            settings.reserve_bytes(),
            settings.overhead_limit(),
            peak,
            plain.time(first),
            bool(settings.policy),
            "make the units larger" if settings.graph_breaks != "plan" else "remove graph breaks",
        )

    @property
    def memory(self) -> int | None:
        """Most bytes of the step itself."""
        return None if self.limit is None else self.limit - self.reserve

    def with_limit(self, limit: int) -> StepLimits:
        """The same with another limit."""
        return replace(self, limit=limit)

    @property
    def most_time(self) -> int | None:
        """Most nanoseconds of the step."""
        return None if self.overhead is None else int(self.plain_time * (1 + self.overhead))

    def overhead_of(self, step: MultiGraphStep, points: Sequence[int]) -> float:
        """Extra time of some points, as a fraction of the plain step's."""
        return step.time(points) / self.plain_time - 1.0 if self.plain_time else 0.0


def infeasible_error(
    step: MultiGraphStep, asked: StepLimits, least: int, graphs: int
) -> InfeasibleLimitError:
    """The error for a step with no points within its limits.

    ``least`` is the least feasible limit; the step has so many ``graphs``, beside the code between them.
    """
    if asked.limit is not None and asked.limit < least:
        return _no_memory(asked, asked.limit, least, graphs)
    assert asked.overhead is not None, "a step that fits in memory can only take too long"
    within = choose_points(step, most_time=asked.most_time)
    fastest = choose_points(step, limit=step.peak_bound() if asked.memory is None else asked.memory)
    assert fastest is not None, "a step that fits in memory has a fastest way to run"
    takes = asked.overhead_of(step, fastest)
    if within is None:
        return _no_time(asked, asked.overhead, takes, least)
    assert asked.limit is not None, "only a limit can exclude points within the overhead"
    return too_slow(asked.limit, asked.overhead, takes=takes, least=step.peak(within) + asked.reserve)


def _no_memory(asked: StepLimits, limit: int, least: int, count: int) -> InfeasibleLimitError:
    graphs = f"{count} graphs" if count > 1 else "one graph"
    under, plain_peak = " under policy=" if asked.pinned else "", asked.plain_peak
    nothing = "nothing can be saved here: " if least - asked.reserve >= NOTHING * plain_peak else ""
    return InfeasibleLimitError(
        f"no plan fits memory_limit {format_bytes(limit)} ({limit} bytes) for this step of {graphs}: "
        f"{nothing}the least feasible limit{under} is {format_bytes(least)} ({least} bytes, "
        f"{format_share_up(least, plain_peak)} of the plain step's {format_bytes(plain_peak)}). Raise "
        f"the limit, or {asked.instead}: what goes from one graph to another, and what code between them "
        "saves, is kept as in plain training, and nothing is recomputed across it.",
        limit=limit,
        least=least,
    )


def _no_time(asked: StepLimits, overhead: float, takes: float, least: int) -> InfeasibleLimitError:
    recomputed = "what policy= says is recomputed in any case, and " if asked.pinned else ""
    return InfeasibleLimitError(
        f"no plan keeps max_overhead {overhead:.1%} on this path of the model: {recomputed}graphs that it "
        "shares with other paths run as was chosen for those, and the fastest plan takes "
        f"{format_overhead_up(takes)} more time. Raise max_overhead, or wrap with inputs that take this "
        "path.",
        limit=0,
        least=least,
    )
