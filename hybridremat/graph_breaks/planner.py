"""Steps that come in several graphs (``graph_breaks="plan"``): one plan for all of them together.

A :mod:`~hybridremat.graph_breaks.survey` learns the graphs, one point of each graph's frontier is chosen so
that the whole step keeps the limit (:mod:`hybridremat.sequence.joined_graphs`), and each graph then
runs its point. All outputs of a graph are taken to be held to the end of the step, and to carry gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.errors import HybridRematError, InfeasibleLimitError, PlanError, UnsurveyedPathWarning
from hybridremat.graph.joint import Schedule
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.graph_breaks.graphs import PartedGraphs
from hybridremat.graph_breaks.paths import Path, Paths, SurveyedPath
from hybridremat.graph_breaks.survey import Survey
from hybridremat.planning.settings import OnInfeasible, Settings

if TYPE_CHECKING:
    from hybridremat.planning.session import Session


class UnknownFirstGraphError(HybridRematError):
    """A step starts with a graph that no survey saw, and nothing of it has run. Never leaves hybridremat."""


class PartedPlanner:
    """Hands out the part plans of one input shape; a :class:`~hybridremat.compiler.backend.StepPlanner`.

    A graph that no survey saw (the model took another path) is planned when it comes, beside what has run of
    this step by then; where nothing has, the path is surveyed first, and its graphs are planned together.

    Attributes
    ----------
    path
        The path that the step takes, as far as is known.
    ran
        The graphs that have run of it.
    unchanged
        Until the first graph runs: whether the model's own code has changed nothing yet. None: it may have.
    """

    def __init__(self, session: Session, survey: Survey) -> None:
        self.session = session
        self.graphs = PartedGraphs(session, survey.plannings)
        self.paths = Paths(session.settings.max_plans)
        self.path: Path = ()
        self.ran: list[str] = []
        self.unchanged: Callable[[], bool] | None = None
        self.latest: str | None = None
        self._growing = self._warned = False
        surveyed = SurveyedPath.of(survey)
        self.paths.surveyed.append(surveyed)
        self._adopt(surveyed.order, session.settings)

    def begin(self) -> None:
        """Forget what ran in the last step."""
        self.ran.clear()
        self._growing = False
        self._follow(self.path)

    def choose(self, step: TracedStep) -> tuple[TracedStep, Schedule, int | None]:
        """The schedule of a graph, planned before or now.

        Raises
        ------
        UnknownFirstGraphError
            If the path had better be surveyed; :meth:`learn` is to follow.
        """
        step, timings = self.session.with_costs(self.session.named(step))
        self.latest = key = step.graph.fingerprint
        if key not in self.graphs.parts:
            self.graphs.plannings[key] = self.session.planning_of(step, timings)
            if self.unchanged is not None and self.unchanged():
                raise UnknownFirstGraphError
            self._extend((*self.ran, key))
        plan = self.graphs.parts[key]
        return step, plan.schedule, plan.predicted_peak

    def learn(self, survey: Survey | None, on_infeasible: OnInfeasible) -> None:
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
        self.unchanged = None
        if survey is not None:
            path = SurveyedPath.of(survey)
            self.graphs.plannings = {**survey.plannings, **self.graphs.plannings}
        else:
            assert self.latest is not None
            path = SurveyedPath((self.latest,))
        if self.paths.is_surveyed(path.order) and path.order in self.paths.plans:
            self._follow(path.order)
            return
        self.paths.surveyed.append(path)
        try:
            self._adopt(path.order, replace(self.session.settings, on_infeasible=on_infeasible))
        except InfeasibleLimitError:
            self.paths.surveyed.remove(path)
            raise

    def emitted(self, step: TracedStep, memory: EmittedMemory) -> None:
        """Hold a part's figures against those of its emitted graphs."""
        assert self.latest is not None
        planned = self.graphs.parts[self.latest].predicted_peak
        if memory.peak != planned:
            raise PlanError(
                f"a part of the emitted plan has not been run: its peak is {memory.peak} bytes, where "
                f"{planned} were planned"
            )

    def current(self) -> str | None:
        """Names the graph compiled last."""
        return self.latest

    def running(self, key: str | None) -> None:
        """Follow the step."""
        assert key is not None
        self.unchanged = None
        self.ran.append(key)
        ran = tuple(self.ran)
        if self.path[: len(ran)] == ran:
            return
        known = self.paths.starting(ran) or ran
        if known in self.paths.plans:
            self._follow(known)
        else:
            self._extend(known)  # another path: refused here if the step would pass the limit

    def ended(self) -> None:
        """The forward is over: the plan of the step is that of the graphs that ran."""
        self.unchanged = None
        ran = tuple(self.ran)
        if ran and not self.paths.is_surveyed(ran):
            self._warn_once()
        if ran in self.paths.plans:
            self._follow(ran)
        elif ran:
            with suppress(InfeasibleLimitError):  # it has run; the plan of the longer path stays
                self._adopt(ran, replace(self.session.settings, on_infeasible="error"))

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
        self.path = path
        self.paths.remember(path, self.paths.plans[path])
        self.session.resume(self.paths.plans[path])

    def _extend(self, order: Path) -> None:
        """Adopt a path found in the middle of a step, in place of what was found of it before."""
        before = self.path
        self._adopt(order, self.session.settings)
        if self._growing and len(before) < len(order) and before == order[: len(before)]:
            self._give_up(before)
        self._growing = True

    def _give_up(self, path: Path) -> None:
        if path in self.paths.plans:
            self.session.forget(self.paths.plans.pop(path))

    def _adopt(self, order: Path, settings: Settings) -> None:
        """Plan a path, and take it for the one of this step."""
        whole = self.graphs.plan(order, self.paths, settings)
        self.path = order
        self.paths.remember(order, whole)
        self.session.adopt(whole)
