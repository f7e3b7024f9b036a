"""Steps that come in several graphs (``graph_breaks="plan"``): one plan for all of them together.

The graphs are learnt by a :class:`~hybridremat.survey.Survey`, one point of each graph's frontier is chosen
so that the whole step keeps the limit (:mod:`hybridremat.sequence.parts`), and each graph then runs its
point. All outputs of a graph are taken to be held to the end of the step, and to carry gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridremat.demands import NOTHING
from hybridremat.emitted_memory import EmittedMemory
from hybridremat.errors import PlanError
from hybridremat.graph.joint import Schedule
from hybridremat.graph.trace import TracedStep
from hybridremat.parted_choice import PartedProblem, choose_parts
from hybridremat.planner import Candidate, Planning
from hybridremat.plans import GraphBreak, Plan, PlannedBlock, fingerprint, make_plan
from hybridremat.sequence.parts import Part, largest_part
from hybridremat.survey import Survey

if TYPE_CHECKING:
    from hybridremat.session import Session


class PartedPlanner:
    """Hands out the part plans of one input shape; a :class:`~hybridremat.backend.StepPlanner`.

    A graph that the survey did not see (the model took another path) is planned when it comes, beside what
    has run of this step by then.
    """

    def __init__(self, session: Session, survey: Survey) -> None:
        self.session = session
        self.plannings = dict(survey.plannings)
        self.joined_bytes = survey.joined_bytes
        self.endings, self.between = survey.breaks, tuple(survey.between)
        self.surveyed = list(survey.order)
        self.known: set[tuple[str, ...]] = set()
        self.ran: list[str] = []
        self.latest: str | None = None
        self.whole: str | None = None
        self.parts: dict[str, Plan] = {}
        self.chosen: dict[str, Candidate] = {}
        self._adopt(survey.order)

    def begin(self) -> None:
        """Forget what ran in the last step."""
        self.ran.clear()
        self.session.running(self.whole)

    def choose(self, step: TracedStep) -> tuple[TracedStep, Schedule, int | None]:
        """The schedule of a graph, planned before or now."""
        step, timings = self.session.with_costs(step)
        key = fingerprint(step.graph)
        if key not in self.parts:
            self.plannings[key] = self.session.planning_of(step, timings)
            self._adopt([*self.ran, key])
        self.latest = key
        plan = self.parts[key]
        return step, plan.schedule, plan.predicted_peak

    def emitted(self, step: TracedStep, memory: EmittedMemory) -> None:
        """Hold a part's figures against those of its emitted graphs."""
        assert self.latest is not None
        planned = self.parts[self.latest].predicted_peak
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
        self.ran.append(key)
        if tuple(self.ran) not in self.known:
            self._adopt(self.ran)  # another path: refused here if the step would pass the limit

    def _adopt(self, order: Sequence[str]) -> None:
        """Choose a point for each graph of a step that has none, and make the plan of the whole."""
        between = self._between(order)
        problem = PartedProblem.of(order, self.plannings, self.chosen, between, self.joined_bytes)
        name = self.session.cost_model_name
        chosen, whole = choose_parts(problem, self.session.settings, name)
        for key, candidate in chosen.items():
            if key not in self.parts:
                self.parts[key] = make_plan(
                    self.plannings[key], candidate, limit=None, asked=None, demands=NOTHING, cost_model=name
                )
        self.chosen.update(chosen)
        parts = tuple(self.parts[key] for key in problem.keys)
        self.known.update(tuple(order[:end]) for end in range(1, len(order) + 1))
        self.whole = whole.fingerprint
        self.session.adopt(
            replace(whole, parts=parts, breaks=self._breaks(order), blocks=_all_blocks(self.parts, order))
        )

    def _between(self, order: Sequence[str]) -> tuple[Part | None, ...]:
        """The code between the graphs as it was measured; on another path, the most of it everywhere."""
        if list(order) == self.surveyed[: len(order)]:
            return self.between
        found = [part for part in self.between if part is not None]
        return (largest_part(found),) * (len(order) + 1) if found else ()

    def _breaks(self, order: Sequence[str]) -> tuple[GraphBreak, ...]:
        return tuple(
            GraphBreak(*ending, crossing_bytes=_output_bytes(self.plannings[key]))
            for key, ending in zip(order, self.endings, strict=False)
            if ending is not None
        )


def _output_bytes(planning: Planning) -> int:
    graph = planning.graph
    return sum(graph.values[value].bytes for value in graph.held_outputs | graph.released_outputs)


def _all_blocks(parts: Mapping[str, Plan], order: Sequence[str]) -> tuple[PlannedBlock, ...]:
    """The blocks of all graphs in the order of the forward, numbered through."""
    blocks = [block for key in order for block in parts[key].blocks]
    return tuple(replace(block, index=index) for index, block in enumerate(blocks))
