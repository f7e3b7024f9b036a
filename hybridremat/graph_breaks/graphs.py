"""The distinct graphs of the steps of one input shape, and the point of its frontier that each runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridremat.errors import InfeasibleLimitError
from hybridremat.graph_breaks.choose_points import PartedProblem, choose_parts
from hybridremat.graph_breaks.paths import Path, Paths
from hybridremat.planning.choose import make_plan
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import Settings
from hybridremat.planning.step_frontier import Candidate, StepFrontier
from hybridremat.plans.outside_memory import NOTHING
from hybridremat.plans.records import GraphBreak, PlannedBlock

if TYPE_CHECKING:
    from hybridremat.planning.session import Session

logger = logging.getLogger(__name__)


class PartedGraphs:
    """Plans paths through graphs; a graph that is on several keeps the point that the first one gave it.

    Attributes
    ----------
    plannings, chosen, parts
        By fingerprint: what is known of each graph, and of those on a planned path the point and its plan.
    """

    def __init__(self, session: Session, plannings: Mapping[str, StepFrontier]) -> None:
        self.session = session
        self.plannings = dict(plannings)
        self.chosen: dict[str, Candidate] = {}
        self.parts: dict[str, Plan] = {}

    def plan(self, order: Path, paths: Paths, settings: Settings) -> Plan:
        """Choose a point for each graph of a step that has none, and make the plan of the whole.

        Raises
        ------
        InfeasibleLimitError
            If nothing fits, unless ``on_infeasible="least"``.
        """
        chosen, whole = self._choose(order, paths, settings)
        for key, candidate in chosen.items():
            if key not in self.parts:
                self.parts[key] = make_plan(
                    self.plannings[key],
                    candidate,
                    limit=None,
                    asked=None,
                    demands=NOTHING,
                    cost_model=whole.cost_model,
                )
        self.chosen.update(chosen)
        return replace(
            whole,
            origin=self.session.origin,
            request=settings.request(),
            parts=tuple(self.parts[key] for key in chosen),
            breaks=self._breaks(order, paths),
            blocks=self._blocks(order),
        )

    def _choose(self, order: Path, paths: Paths, settings: Settings) -> tuple[dict[str, Candidate], Plan]:
        """Points for the graphs of a step; those with options of other shapes are solved anew if none fit."""
        name = self.session.cost_model_name
        reused = [key for key in dict.fromkeys(order) if self._may_be_better(key)]
        if reused:
            try:
                problem = self._problem(order, paths)
                return choose_parts(problem, replace(settings, on_infeasible="error"), name)
            except InfeasibleLimitError:
                logger.info("the options of other shapes do not fit this one; its blocks are solved anew")
                self.plannings |= {key: self.session.solved_anew(self.plannings[key]) for key in reused}
        return choose_parts(self._problem(order, paths), settings, name)

    def _may_be_better(self, key: str) -> bool:
        return key not in self.chosen and self.plannings[key].reused_options

    def _problem(self, order: Path, paths: Paths) -> PartedProblem:
        between, joined = paths.surroundings(order)
        if joined is None:
            joined = max(_largest_gradient(self.plannings[key]) for key in order)
        return PartedProblem.of(order, self.plannings, self.chosen, between, joined)

    def _breaks(self, order: Path, paths: Paths) -> tuple[GraphBreak, ...]:
        return tuple(
            GraphBreak(*ending, crossing_bytes=_output_bytes(self.plannings[key]))
            for key, ending in zip(order, paths.breaks(order), strict=False)
            if ending is not None
        )

    def _blocks(self, order: Path) -> tuple[PlannedBlock, ...]:
        """The blocks of all graphs in the order of the forward, numbered through."""
        blocks = [block for key in order for block in self.parts[key].blocks]
        return tuple(replace(block, index=index) for index, block in enumerate(blocks))


def _output_bytes(planning: StepFrontier) -> int:
    graph = planning.graph
    return sum(graph.values[value].bytes for value in graph.held_outputs | graph.released_outputs)


def _largest_gradient(planning: StepFrontier) -> int:
    graph = planning.graph
    return max((graph.values[value].bytes for value in graph.gradients), default=0)
