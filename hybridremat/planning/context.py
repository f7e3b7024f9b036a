"""What planning a step depends on beside the step itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hybridremat.planning.plan import Plan
from hybridremat.planning.plan_cache import PlanCache
from hybridremat.planning.plan_store import PlanStore
from hybridremat.planning.rank_agreement import RankAgreement
from hybridremat.planning.ranks import ALONE, Ranks
from hybridremat.planning.settings import Settings
from hybridremat.planning.timings import Progress, no_progress
from hybridremat.plans.origin import Origin


@dataclass(frozen=True)
class PlanContext:
    """The request for one wrapped model, and the context of one call that plans.

    Attributes
    ----------
    settings
        The validated request.
    store
        The model's plans, shared by all its steps.
    agreement
        What ranks with the same step agree on.
    disk
        Where plans are kept between runs, if they are.
    given
        The plan that the first step is to run, if the caller passed one.
    origin
        What the step at hand belongs to.
    progress
        Called with (stage, done, total).
    """

    settings: Settings
    store: PlanStore
    agreement: RankAgreement
    disk: PlanCache | None
    given: Plan | None = None
    origin: Origin = field(default_factory=Origin)
    progress: Progress = no_progress

    @staticmethod
    def of(settings: Settings, *, given: Plan | None = None, ranks: Ranks = ALONE) -> PlanContext:
        """The context of a model that has no plans yet."""
        return PlanContext(
            settings,
            PlanStore(settings.max_plans),
            RankAgreement(settings, ranks),
            PlanCache.for_settings(settings),
            given,
        )

    def at(self, origin: Origin, progress: Progress = no_progress) -> PlanContext:
        """The context of one step of the same model."""
        return replace(self, origin=origin, progress=progress)
