"""What planning a step depends on, besides the step itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hybridremat.planning.disk_cache import DiskCache
from hybridremat.planning.plan import Plan
from hybridremat.planning.plan_cache import plans_on_disk
from hybridremat.planning.plan_store import PlanStore
from hybridremat.planning.progress import Progress, no_progress
from hybridremat.planning.rank_agreement import RankAgreement
from hybridremat.planning.ranks import ALONE, Ranks
from hybridremat.planning.settings import Settings
from hybridremat.plans.origin import Origin

if TYPE_CHECKING:
    from hybridremat.graph.costs.collectives import GatherRate


@dataclass(frozen=True)
class PlanContext:
    """The request for one wrapped model, and the planning call at hand.

    Attributes
    ----------
    settings
        The validated request.
    store
        The model's plans, shared by all its steps.
    agreement
        Costs and plans shared with ranks that have the same step.
    disk
        The plan cache on disk, if it is used.
    given
        The caller's plan for the first step, if any.
    origin
        Model, inputs and device of the step.
    progress
        Called with (stage, done, total).
    build
        Whether the step is going to run: otherwise it is planned, and not compiled.
    """

    settings: Settings
    store: PlanStore
    agreement: RankAgreement
    disk: DiskCache[Plan] | None
    given: Plan | None = None
    origin: Origin = field(default_factory=Origin)
    progress: Progress = no_progress
    build: bool = True

    @staticmethod
    def of(
        settings: Settings,
        *,
        given: Plan | None = None,
        ranks: Ranks = ALONE,
        build: bool = True,
        gathers: Mapping[str, GatherRate] | None = None,
    ) -> PlanContext:
        """The context of a model that has no plans yet; ``gathers``: see :class:`RankAgreement`."""
        store = PlanStore(settings.max_plans)
        if given is not None and given.coverage is not None:
            store.granted = given.asked_limit or 0
        return PlanContext(
            settings,
            store,
            RankAgreement(settings, ranks, gathers),
            plans_on_disk(settings),
            given,
            build=build,
        )

    @property
    def keeps_refusals(self) -> bool:
        """Whether what did not fit is not tried again: nothing else may change, and no other rank waits."""
        return self.settings.budget_seconds() is None and self.agreement.alone

    def at(self, origin: Origin, progress: Progress = no_progress) -> PlanContext:
        """The context of one step of the same model, which may take what earlier ones were granted."""
        settings = replace(self.settings, granted=self.store.granted)
        return replace(self, settings=settings, origin=origin, progress=progress)
