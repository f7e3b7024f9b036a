"""Steps that come in several graphs (``graph_breaks="plan"``): one plan for all of them together.

A :mod:`~hybridremat.graph_breaks.survey` finds the graphs, one point of each graph's frontier is chosen so
that the whole step keeps the limit (:mod:`hybridremat.sequence.joined_graphs`), and each graph then runs its
point. All outputs of a graph are taken to be held to the end of the step, and to carry gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.errors import HybridRematError, InfeasibleLimitError, PlanError, UnsurveyedPathWarning
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.graph_breaks.graphs import StepGraphs
from hybridremat.graph_breaks.paths import Path, Paths, SurveyedPath
from hybridremat.graph_breaks.survey import Survey, frontier_of
from hybridremat.planning.one_graph import with_policy_fingerprint
from hybridremat.planning.pipeline import Chosen, costed
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import OnInfeasible, Settings


class SurveyNeededError(HybridRematError):
    """A step starts with a graph that no survey saw, and nothing of it has run. Never leaves hybridremat.

    An error is the only way out of the compilation in which this shows.
    """


@dataclass
class _Run:
    """One run of the step.

    Attributes
    ----------
    path
        The path that it takes, as far as is known.
    ran
        The graphs that have run of it.
    unchanged
        Until the first graph runs: whether the model's own code has changed nothing yet. None: it may have.
    growing
        Whether the path was extended in the middle of this run.
    """

    path: Path
    ran: list[str] = field(default_factory=list)
    unchanged: Callable[[], bool] | None = None
    growing: bool = False


class GraphBreakPlanner:
    """Chooses the schedules of the graphs of one input shape.

    A graph that no survey saw (the model took another path) is planned when it comes, beside what has run of
    this step by then; where nothing has, the path is surveyed first, and its graphs are planned together.
    """

    def __init__(self, survey: Survey) -> None:
        self._context = survey.context
        self.paths = Paths(self._context.settings.max_plans)
        self._graphs = StepGraphs(self._context, survey.frontiers)
        self._last = ""
        self._warned = False
        surveyed = SurveyedPath.of(survey)
        self._run = _Run(surveyed.order)
        self.paths.surveyed.append(surveyed)
        self._adopt(surveyed.order, self._context.settings)

    def begin(self) -> None:
        """Start a run: take the path of the last one until the graphs show another."""
        self._run = _Run(self._run.path)
        self._follow(self._run.path)

    def enter(self, unchanged: Callable[[], bool]) -> None:
        """Start the forward; ``unchanged`` says whether the model's own code has changed nothing since."""
        self._run.unchanged = unchanged

    def choose(self, traced: TracedStep) -> Chosen:
        """The schedule of a graph, planned before or now.

        Raises
        ------
        SurveyNeededError
            If the path had better be surveyed; :meth:`add_path` is to follow.
        """
        step, timings = costed(with_policy_fingerprint(traced, self._context), self._context)
        self._last = key = step.graph.fingerprint
        if key not in self._graphs.plans:
            self._graphs.frontiers[key] = frontier_of(step.graph, timings, self._context)
            if self._run.unchanged is not None and self._run.unchanged():
                raise SurveyNeededError
            self._extend((*self._run.ran, key))
        plan = self._graphs.plans[key]
        return Chosen(
            step,
            plan.schedule,
            plan.predicted_peak,
            accept=partial(_require_as_planned, plan),
            started=partial(self._started, key),
        )

    def add_path(self, survey: Survey | None, on_infeasible: OnInfeasible) -> None:
        """Plan one more path together; graphs that other paths run keep their points.

        Parameters
        ----------
        survey
            Of that path; None if it is the graph that came last, alone.
        on_infeasible
            As in :class:`~hybridremat.planning.settings.Settings`.

        Raises
        ------
        InfeasibleLimitError
            If it does not fit beside the other paths.
        """
        self._run.unchanged = None
        path = SurveyedPath((self._last,)) if survey is None else SurveyedPath.of(survey)
        if survey is not None:
            self._graphs.frontiers = {**survey.frontiers, **self._graphs.frontiers}
        if self.paths.is_surveyed(path.order) and path.order in self.paths.plans:
            self._follow(path.order)
            return
        self.paths.surveyed.append(path)
        try:
            self._adopt(path.order, replace(self._context.settings, on_infeasible=on_infeasible))
        except InfeasibleLimitError:
            self.paths.surveyed.remove(path)
            raise

    def ended(self) -> None:
        """The forward is over: the plan of the step is that of the graphs that ran."""
        self._run.unchanged = None
        ran = tuple(self._run.ran)
        if ran and not self.paths.is_surveyed(ran):
            self._warn_once()
        if ran in self.paths.plans:
            self._follow(ran)
        elif ran:
            with suppress(InfeasibleLimitError):  # it has run; the plan of the longer path stays
                self._adopt(ran, replace(self._context.settings, on_infeasible="error"))

    def _started(self, key: str) -> None:
        """A graph starts: follow the path that the step takes."""
        run = self._run
        run.unchanged = None
        run.ran.append(key)
        ran = tuple(run.ran)
        if run.path[: len(ran)] == ran:
            return
        known = self.paths.starting(ran) or ran
        if known in self.paths.plans:
            self._follow(known)
        else:
            self._extend(known)  # another path: refused here if the step would pass the limit

    def _warn_once(self) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            "a step took a path through its graph breaks that was not surveyed: the code between and after "
            "its graphs has not been measured, and is counted as the most of what was measured on other "
            "paths. If it takes more, the step passes its limit. hybridremat.prepare(model, …) with inputs "
            "that take this path measures it.",
            UnsurveyedPathWarning,
            stacklevel=2,
        )

    def _follow(self, path: Path) -> None:
        """Take a path that has a plan for the one of this step."""
        self._run.path = path
        self.paths.remember(path, self.paths.plans[path])
        self._context.store.resume(self.paths.plans[path])

    def _extend(self, order: Path) -> None:
        """Adopt a path found in the middle of a step, in place of what was found of it before."""
        run, before = self._run, self._run.path
        self._adopt(order, self._context.settings)
        if run.growing and len(before) < len(order) and before == order[: len(before)]:
            self._drop(before)
        run.growing = True

    def _drop(self, path: Path) -> None:
        if path in self.paths.plans:
            self._context.store.drop(self.paths.plans.pop(path))

    def _adopt(self, order: Path, settings: Settings) -> None:
        """Plan a path, and take it for the one of this step."""
        whole = self._graphs.plan(order, self.paths, settings)
        self._run.path = order
        self.paths.remember(order, whole)
        self._context.store.add(whole)


def _require_as_planned(plan: Plan, memory: EmittedMemory) -> None:
    """Hold a graph's figures against those of its emitted graphs."""
    if memory.peak != plan.predicted_peak:
        raise PlanError(
            f"a part of the emitted plan has not been run: its peak is {memory.peak} bytes, where "
            f"{plan.predicted_peak} were planned"
        )
