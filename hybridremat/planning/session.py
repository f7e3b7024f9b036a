"""Planning inside a compile: a traced step comes in, a schedule goes out, the plan is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.errors import InfeasibleLimitError, PlanError
from hybridremat.graph.costs.cost_models import with_footprints, with_times
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import distinct_kernels
from hybridremat.graph.joint import JointGraph, Schedule, plain_schedule
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.apply import applied
from hybridremat.planning.choose import chosen_plan
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.other_device import costs_there
from hybridremat.planning.plan import Plan
from hybridremat.planning.plan_cache import PlanCache, plan_key
from hybridremat.planning.planner import Progress, plan_graph
from hybridremat.planning.port import named_here
from hybridremat.planning.rank_agreement import Agreement
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.origin import Origin
from hybridremat.plans.outside_memory import Demands, PhasePeaks, needed_bytes
from hybridremat.plans.policy import require_matches, resolve_policy, under_policy

logger = logging.getLogger(__name__)

OPTIONS = OptionCache()


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass


class Session:
    """Plans every step of one wrapped model; a :class:`~hybridremat.compiler.backend.StepPlanner`.

    Attributes
    ----------
    plans
        By fingerprint of the joint graph, the latest used last, ``max_plans`` at most.
    only_frontier
        Whether to stop at the frontier and hand out the plain schedule.
    planning
        That frontier.
    agreement
        Where other ranks have a say.
    given
        The plan that the first step is to run, if the caller brought one.
    origin
        What the step that is compiled belongs to.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        only_frontier: bool = False,
        given: Plan | None = None,
    ) -> None:
        self.settings = settings
        self.given = given
        self.origin = Origin()
        self._cache = PlanCache.for_settings(settings)
        self.agreement = Agreement(settings)
        self.only_frontier = only_frontier
        self.progress: Progress = _silent
        self.plans: dict[str, Plan] = {}
        self.planning: StepFrontier | None = None
        self._latest: str | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the step that ran or was compiled last."""
        return self.plans.get(self._latest) if self._latest is not None else None

    def choose(self, step: TracedStep) -> tuple[TracedStep, Schedule, int | None]:
        """See :class:`~hybridremat.compiler.backend.StepPlanner`."""
        step = self.named(step)
        self.check_policy([step.graph])
        ready = None if self.only_frontier else self._ready(step)
        if ready is not None and ready.details is not None:
            self.adopt(ready)
            return replace(step, graph=ready.details.graph), ready.schedule, ready.memory_limit
        step, timings = self.with_costs(step)
        if self.only_frontier:
            self.planning = self._planning(step.graph, timings, reuse=False)
            return step, plain_schedule(step.graph), None
        plan = self.agreement.on_plan(lambda: ready or self._plan(step, timings))
        self._keep(plan)
        self.adopt(plan)
        return step, plan.schedule, plan.memory_limit

    def _ready(self, step: TracedStep) -> Plan | None:
        """A plan that need not be made: known to this session, given by the caller, or kept on disk."""
        known = self.plans.get(step.graph.fingerprint)
        if known is not None:
            return known
        if self.given is not None and not self.plans:
            return applied(self.given, step, self.origin, lambda: self.with_costs(step)[0])
        if self._cache is None or not self.agreement.alone:
            return None
        started = time.perf_counter()
        for reused in (False, True) if self.plans else (False,):
            found = self._cache.read(self._cache_key(step.graph.fingerprint, reused=reused))
            if found is not None and found.fingerprint == step.graph.fingerprint:
                timings = {"read the kept plan": time.perf_counter() - started}
                return replace(named_here(found, step.graph, self.origin), timings=timings)
        return None

    def _keep(self, plan: Plan) -> None:
        """Keep a plan that was made here alone for other runs."""
        if self._cache is not None and self.agreement.alone and plan.details is not None:
            self._cache.write(self._cache_key(plan.fingerprint, reused=plan.reused_options), plan)

    def _cache_key(self, fingerprint: str, *, reused: bool) -> str:
        return plan_key(fingerprint, self.settings, self.origin.device or "cpu", reused=reused)

    def adopt(self, plan: Plan) -> None:
        """Make a plan the current one; the least recently used is given up if there are too many."""
        self.plans.pop(plan.fingerprint, None)
        while len(self.plans) >= self.settings.max_plans:
            del self.plans[next(iter(self.plans))]
        self.plans[plan.fingerprint] = plan
        self._latest = plan.fingerprint

    def resume(self, plan: Plan) -> None:
        """Make a plan that was adopted before the current one, whether it was given up since or not."""
        self.adopt(self.plans.get(plan.fingerprint, plan))

    def forget(self, plan: Plan) -> None:
        """Give up a plan that another one takes the place of."""
        self.plans.pop(plan.fingerprint, None)

    def named(self, step: TracedStep) -> TracedStep:
        """A step as traced, with a fingerprint that tells plans under this session's policy apart."""
        return replace(step, graph=under_policy(step.graph, self.settings.policy))

    def check_policy(self, graphs: Sequence[JointGraph]) -> None:
        """Hold the policy against the graphs of a step, before anything is measured or planned.

        A pattern has to match in the first input shape; in another one it may find nothing to pin.

        Raises
        ------
        PolicyError
            If it cannot be kept.
        """
        if not self.plans:
            require_matches(graphs, self.settings.policy)
        for graph in graphs:
            resolve_policy(graph, self.settings.policy)

    def emitted(self, step: TracedStep, memory: EmittedMemory) -> None:
        """Hold the plan's figures against those of the emitted graphs, found by other means."""
        plan = self.plan
        if self.only_frontier or plan is None:
            return
        if memory.peak != plan.predicted_peak:
            raise PlanError(
                f"the emitted plan has not been run: its peak is {memory.peak} bytes, where "
                f"{plan.predicted_peak} were planned"
            )
        peaks = PhasePeaks(memory.forward_peak, memory.backward_peak, memory.saved)
        needed = needed_bytes(step.graph, peaks, Demands(plan.reserve, plan.forwards))
        if plan.memory_limit is not None and needed > plan.memory_limit:
            raise PlanError(
                f"the emitted plan has not been run: with what the caller does it takes {needed} bytes, "
                f"beyond the limit of {plan.memory_limit}"
            )

    def current(self) -> str | None:
        """Names the step compiled last, for :meth:`running`."""
        return self._latest

    def running(self, key: str | None) -> None:
        """Told which step runs: its plan is the current one."""
        if key is not None and key in self.plans:
            self.plans[key] = self.plans.pop(key)
            self._latest = key

    def note_total(self, seconds: float) -> None:
        """Record how long all of it took; what no stage accounts for is capture, emission and checking."""
        plan = self.plan
        if plan is not None and self._latest is not None:
            rest = max(0.0, seconds - plan.planning_seconds)
            self.plans[self._latest] = plan.with_timings({"capture and emit": rest})

    def begin(self) -> None:
        """A step of one graph needs no preparation."""

    @property
    def cost_model_name(self) -> str:
        """What the plans call their source of times."""
        return self.settings.costs().name

    def with_costs(self, step: TracedStep) -> tuple[TracedStep, dict[str, float]]:
        """The step with times, temporaries and real sizes, and how long it took to find them."""
        started = time.perf_counter()
        model, spec = self.settings.costs(), self.settings.spec
        if spec is not None:
            return costs_there(step, spec, model), {"costs": time.perf_counter() - started}
        device = distinct_kernels(step).device
        store = KernelStore.for_device(device) if self.settings.cache else KernelStore()
        step = self.agreement.on_memory(step, with_footprints(step, store))
        step = self.agreement.on_times(
            step,
            lambda: with_times(
                step, model, store, lambda done, total: self.progress("timing kernels", done, total)
            ),
        )
        store.save()
        return step, {"costs": time.perf_counter() - started}

    def planning_of(self, step: TracedStep, timings: dict[str, float]) -> StepFrontier:
        """The frontier of one graph of a step that comes in several."""
        return self._planning(step.graph, timings, reuse=bool(self.plans))

    def solved_anew(self, planning: StepFrontier) -> StepFrontier:
        """The frontier of the same graph, with no options of other shapes."""
        return self._planning(planning.graph, planning.timings, reuse=False)

    def _planning(self, graph: JointGraph, timings: Mapping[str, float], *, reuse: bool) -> StepFrontier:
        planning = plan_graph(
            graph,
            cache=OPTIONS,
            workers=self.settings.workers,
            progress=self.progress,
            reuse=reuse,
            pinned=resolve_policy(graph, self.settings.policy),
        )
        return replace(planning, timings={**timings, **planning.timings})

    def _plan(self, step: TracedStep, timings: dict[str, float]) -> Plan:
        """A plan for a step that has none.

        The first one of a session is made with care. Later ones come in the middle of training: they reuse
        the options of blocks that differ in sizes alone, unless nothing fits that way.
        """
        if self.plans:
            try:
                return self._chosen(self._planning(step.graph, timings, reuse=True), on_infeasible="error")
            except InfeasibleLimitError:
                logger.info("the options of other shapes do not fit this one; its blocks are solved anew")
        planning = self._planning(step.graph, timings, reuse=False)
        return self._chosen(planning, on_infeasible=self.settings.on_infeasible)

    def _chosen(self, planning: StepFrontier, *, on_infeasible: OnInfeasible) -> Plan:
        return chosen_plan(planning, self.settings, self.origin, on_infeasible=on_infeasible)
