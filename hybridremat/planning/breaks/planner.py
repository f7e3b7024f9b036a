"""Steps that come in several graphs (``graph_breaks="plan"``): one plan for all of them together.

A :mod:`~hybridremat.planning.breaks.survey` finds the graphs, and one point of each frontier is chosen so
that the whole step keeps the limit (:mod:`hybridremat.sequence.joined_graphs`). All outputs of a graph are
assumed to be held to the end of the step, and to carry gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from hybridremat.compiler.backend import CapturedGraph, SurveyNeededError
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.forward_start import ForwardStart
from hybridremat.errors import InfeasibleLimitError, PlanError, UnsurveyedPathWarning, warn_caller
from hybridremat.graph.private_torch import next_node_number
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.accept import with_policy_fingerprint
from hybridremat.planning.breaks.eager_nodes import EagerNodes
from hybridremat.planning.breaks.graphs import StepGraphs
from hybridremat.planning.breaks.paths import GraphPath, Paths, SurveyedPath
from hybridremat.planning.breaks.survey import Survey, path_frontier
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.plan import Plan
from hybridremat.planning.plan_store import Refusals
from hybridremat.planning.planner import stores_for
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.planning.step_costs import costed
from hybridremat.sequence.outside_memory import PhasePeaks

_OTHER_PATH: Final = (
    "a step took a path through its graph breaks that was not surveyed: the code between and after "
    "its graphs has not been measured, and is counted as the most of what was measured on other "
    "paths."
)
_MORE_BETWEEN: Final = (
    "code between the graphs of a step ran more operations than when it was measured (more turns of a loop, "
    "for one), and is counted as what was measured then."
)


_Ending = TypeVar("_Ending", bound=BaseException)


@dataclass
class _Run:
    """One run of the step.

    Attributes
    ----------
    path
        The path that it is expected to take.
    ran
        The graphs that have run.
    taken
        The variants in which they ran.
    start
        What the forward was when it started, if it can be run again from there. None: it may not be.
    growing
        Whether the path was extended during this run.
    entered
        Whether the graph that starts next is in ``ran`` already.
    ending
        What the forward ends in, if it does not return.
    """

    path: GraphPath
    ran: list[str] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    start: ForwardStart | None = None
    growing: bool = False
    entered: bool = False
    ending: BaseException | None = None

    def ends_in(self, error: _Ending) -> _Ending:
        """To be raised: whatever the model makes of it, the forward ends in that."""
        self.ending = error
        return error


class PathPlanner:
    """Chooses the schedules of the graphs of one input shape.

    A graph that no survey has seen (the model took another path) is planned when it is compiled, together
    with the graphs that have run before it. If none has, the path is surveyed first and planned as a whole.
    """

    def __init__(self, survey: Survey) -> None:
        self._context = survey.context
        self.paths = Paths(self._context.settings.max_plans)
        self._graphs = StepGraphs(self._context, survey.frontiers, survey.traced)
        self._last = ""
        self._calling: CapturedGraph | None = None
        self._warned = False
        self._nodes = EagerNodes()
        self._writes_unseen = survey.writes_unseen
        self._refused_alone = Refusals()
        self._added: SurveyedPath | None = None
        surveyed = SurveyedPath.of(survey)
        self._run = _Run(surveyed.order)
        self.paths.surveyed.append(surveyed)
        if self._context.given is not None and not len(self._context.store):
            self._graphs.follow(self._context.given, surveyed.order)
        self._adopt(surveyed.order, self._context.settings)

    def begin(self) -> None:
        """Start a run, expecting the path of the last one, or the longest that starts with its first graph.

        On a shorter path graphs may keep more than fits beside those that would come on a longer one.
        """
        last = self._run.path
        self._nodes.stop()
        self._run = _Run(last)
        self._follow(max((last, *self._planned(last[:1])), key=len))

    def begin_unmeasured(self) -> None:
        """Start a run that takes more than was measured, as it cannot be measured now."""
        self._warn_once(_MORE_BETWEEN)
        self.begin()

    def enter(self, start: ForwardStart, *, counting: bool) -> None:
        """Start the forward, which the caller runs again, once, if it ends in a ``SurveyNeededError``.

        ``counting``: whether the autograd nodes of code between graphs are those that a survey counts.
        """
        self._run.start = None if self._writes_unseen else start
        self._added = None
        if counting:
            self._nodes.begin(next_node_number())

    def compiled(self) -> None:
        """Something has been compiled, which makes autograd nodes, too: they are not counted any more."""
        self._nodes.stop()

    def graph_starts(self, number: int) -> None:
        """A graph is about to run: autograd nodes have numbers from this one on."""
        if self._nodes.note(number):
            self._look_again(self._run.path)

    def graph_ran(self, number: int) -> None:
        """It has run: autograd nodes have numbers from this one on."""
        self._nodes.go_on(number)

    def select(self, graph: CapturedGraph) -> CapturedGraph:
        """The variant in which a graph runs that is called now; one that is not planned yet is its first."""
        self._calling = graph
        if graph.key not in self._graphs.variants:
            return graph
        self._advance(graph.key)
        self._run.entered = True
        return graph.variant(self._variant)

    def has_variants(self, key: str) -> bool:
        """Whether a graph runs in several ways."""
        return len(self._graphs.variants.get(key, ())) > 1

    @property
    def _variant(self) -> int:
        """That of the graph that has been called last."""
        return self._graphs.places[self._run.path][len(self._run.ran) - 1]

    def choose(self, traced: TracedStep) -> Chosen:
        """The schedule of a graph, planned before or now.

        Raises
        ------
        SurveyNeededError
            If the path should be surveyed, and then be given to :meth:`add_path`.
        InfeasibleLimitError
            If what has run leaves no room for the graph.
        """
        self.compiled()
        step = with_policy_fingerprint(traced, self._context)
        self._last = key = step.graph.fingerprint
        if key not in self._graphs.variants:
            known = key in self._graphs.frontiers  # of a path that was refused
            if not known or not self._context.keeps_refusals:
                step, timings = costed(step, self._context)
                self._graphs.steps[key] = step
                self._graphs.frontiers[key] = path_frontier(step, timings, self._context)
            start = self._run.start
            if start is not None and not self._run.ran and start.has_changed_nothing:
                raise self._run.ends_in(SurveyNeededError())
            order = (*self._run.ran, key)
            self._extend_as_far_as_fits(order, order)
        number = self._variant_to_compile(key)
        variant = self._graphs.variants[key][number]
        plan = variant.plan
        graph = self._graphs.frontiers[key].graph if plan.details is None else plan.details.graph
        return Chosen(
            replace(step, graph=graph),
            plan.schedule,
            plan.predicted_peak if plan.compiler == "eager" else None,
            accept=partial(_require_as_planned, plan) if plan.compiler == "eager" else lambda _: None,
            started=partial(self._started, key),
            accept_code=partial(_require_code_as_planned, variant.point.phases),
            lean=plan.lean,
            plain=plan.plain_code,
            stores=stores_for(plan, step, self._context, (key, number)) if plan.schedule.moves else None,
        )

    def _variant_to_compile(self, key: str) -> int:
        """The variant of the graph that is called; of one that is new here, that of its place on the path."""
        if self._run.entered:
            return self._variant
        self._advance(key)
        self._run.entered = True
        if (graph := self._calling) is not None:
            graph.key, graph.number = key, self._variant
            if not self.has_variants(key):
                graph.settle()
        return self._variant

    def add_path(self, survey: Survey | None, on_infeasible: OnInfeasible) -> None:
        """Plan one more path together, or one again by the most that was measured on it.

        Graphs that other paths run keep their points.

        Parameters
        ----------
        survey
            Of that path; None if it is the one graph that was compiled last.
        on_infeasible
            As in :class:`~hybridremat.planning.settings.Settings`.

        Raises
        ------
        InfeasibleLimitError
            If it does not fit with the points that other paths have fixed.
        """
        self._added = path = SurveyedPath((self._last,)) if survey is None else SurveyedPath.of(survey)
        self._nodes.stop()
        self._run = _Run(self._run.path)
        if survey is not None:
            self._writes_unseen |= survey.writes_unseen
            self._graphs.add(survey.frontiers, survey.traced)
        known = self.paths.surveyed_as(path.order)
        if known is not None and survey is not None:
            path = known.with_most_of(path)
        if known is not None and path.order in self.paths.plans and (survey is None or path == known):
            self._follow(path.order)
            return
        with self.paths.replacing(known, path):
            self._adopt(path.order, replace(self._context.settings, on_infeasible=on_infeasible))

    @contextmanager
    def unless_refused_alone(self) -> Iterator[None]:
        """Around planning the path alone that :meth:`add_path` was given last, and that does not fit so.

        Raises
        ------
        InfeasibleLimitError
            If it does not fit alone either, or did not.
        """
        kept = self._added is not None and self._context.keeps_refusals
        with self._refused_alone.unless_known((self._added, self._context.store.granted), kept=kept):
            yield

    def ended(self) -> None:
        """End the forward: the plan of the step is that of the graphs that ran.

        Raises what the forward should have ended in, if the model has caught it.
        """
        if self._run.ending is not None:
            raise self._run.ending
        ran = tuple(self._run.ran)
        if self._nodes.note(next_node_number()):
            self._look_again(ran)
        self._run.start = None
        if not self.paths.is_surveyed(ran):
            self._warn_once(_OTHER_PATH)
        if ran in self._planned(ran):
            self._follow(ran)
        else:
            with suppress(InfeasibleLimitError):  # the step has run; its plan stays
                self._adopt(ran, replace(self._context.settings, on_infeasible="error"), self._run.taken)

    def let_go(self) -> None:
        """Keep nothing that the forward has made, once it has ended: what it ended in has its frames."""
        self._run.ending = None

    def _started(self, key: str) -> None:
        """Follow the path that the step takes, when a graph starts."""
        if not self._run.entered:
            self._advance(key)
        self._run.entered = False

    def _advance(self, key: str) -> None:
        """Follow the path that the step takes with one graph more."""
        run = self._run
        run.ran.append(key)
        ran = tuple(run.ran)
        if run.path[: len(ran)] != ran:
            if known := self._planned(ran):
                self._follow(max(known, key=len))
            else:
                self._extend_as_far_as_fits(self.paths.starting(ran) or ran, ran)
        run.taken.append(self._graphs.places[run.path][len(ran) - 1])

    def _planned(self, ran: GraphPath) -> list[GraphPath]:
        """Paths with a plan that start with these graphs, as they have run in this step."""
        agreeing = self._graphs.agreeing(ran, self._run.taken)
        return [path for path in agreeing if path in self.paths.plans]

    def _look_again(self, path: GraphPath) -> None:
        """Ask for a survey if code between graphs has made more autograd nodes than when it was measured.

        ``path``: the one that the step takes, as far as is known. If the forward cannot be run again, this is
        warned of.
        """
        if not self._nodes.exceed(self.paths, path):
            return
        start = self._run.start
        if start is not None and not start.has_written:
            raise self._run.ends_in(SurveyNeededError(needed=False))
        self._nodes.accept(path)
        self._warn_once(_MORE_BETWEEN)

    def _warn_once(self, what: str) -> None:
        if self._warned:
            return
        self._warned = True
        warn_caller(
            f"{what} If it takes more, the step passes its limit. hybridremat.prepare(model, …) with inputs "
            "that take this path measures it.",
            UnsurveyedPathWarning,
        )

    def _follow(self, path: GraphPath) -> None:
        """Expect a path that has a plan."""
        self._run.path = path
        self.paths.remember(path, self.paths.plans[path])
        self._context.store.resume(self.paths.plans[path])

    def _extend_as_far_as_fits(self, known: GraphPath, ran: GraphPath) -> None:
        """Adopt a known path, or only what has run of it.

        Raises
        ------
        SurveyNeededError
            If that would exceed the limit already, by what is known of this path: the forward can be run
            again from its start, once more is known.
        InfeasibleLimitError
            If it cannot.
        """
        try:
            self._extend(known)
        except InfeasibleLimitError as error:
            if known != ran:
                self._extend_as_far_as_fits(ran, ran)
                return
            start = self._run.start
            if start is None or start.has_written:
                raise self._run.ends_in(error) from None
            raise self._run.ends_in(SurveyNeededError(error)) from None

    def _extend(self, order: GraphPath) -> None:
        """Adopt a path found during a step, in place of its shorter beginning."""
        run, before = self._run, self._run.path
        self._adopt(order, self._context.settings, run.taken)
        beginning = len(before) < len(order) and before == order[: len(before)]
        if run.growing and beginning and before in self.paths.plans:
            self._context.store.drop(self.paths.plans.pop(before))
        run.growing = True

    def _adopt(self, order: GraphPath, settings: Settings, taken: Sequence[int] = ()) -> None:
        """Plan a path, which may take what earlier ones were granted, and expect it.

        ``taken``: the variants in which its first graphs have run in this step.
        """
        store = self._context.store
        granted = replace(settings, granted=store.granted)
        whole = self._graphs.plan(order, self.paths, granted, tuple(taken))
        self._run.path = order
        self.paths.remember(order, whole)
        store.add(whole)


def _require_code_as_planned(planned: PhasePeaks, memory: EmittedMemory) -> None:
    """Compare the memory of a graph's code with that of the lowering by which it was chosen."""
    found = memory.forward_peak, memory.backward_peak, memory.saved
    most = planned.forward, planned.backward, planned.between
    if any(here > there for here, there in zip(found, most, strict=True)):
        raise PlanError(
            f"a part of the emitted plan has not been run: its code takes {found} bytes in forward, backward "
            f"and between them, where {most} were planned"
        )


def _require_as_planned(plan: Plan, memory: EmittedMemory) -> None:
    """Compare a graph's figures with those counted on its emitted graphs."""
    if memory.peak != plan.predicted_peak:
        raise PlanError(
            f"a part of the emitted plan has not been run: its peak is {memory.peak} bytes, where "
            f"{plan.predicted_peak} were planned"
        )
    if memory.host != plan.host_bytes:
        raise PlanError(
            f"a part of the emitted plan has not been run: it takes {memory.host} bytes of host memory, "
            f"where {plan.host_bytes} were planned"
        )
