"""Steps by schedules that nobody would choose (:mod:`support.extreme_schedules`)."""

from __future__ import annotations

import copy
from dataclasses import replace

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import capture, compile_step
from hybridremat.compiler.inductor import Inductor
from hybridremat.graph.memory import step_memory
from hybridremat.planning.pipeline import PlannedPartition
from support.extreme_schedules import extreme_schedule
from support.training import FixedPlanner


class ExtremePlanner(FixedPlanner):
    """Chooses an extreme schedule; the emitted graphs must take the memory that its replay takes."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.seed, self.share = seed, share

    def choose(self, step):
        chosen = super().choose(step)
        graph = chosen.step.graph
        schedule = extreme_schedule(graph, self.seed, self.share)
        self.predicted = step_memory(graph, schedule).peak
        return replace(chosen, schedule=schedule)

    def accept(self, memory):
        super().accept(memory)
        assert memory.peak == self.predicted


def run_extremely(model, batch, seed: int, share: float, *, fused: bool = False):
    """A copy of the model that trains by an extreme schedule, and the planner that knows its peak.

    ``fused``: the graphs are emitted as for Inductor, but run op by op.
    """
    model, planner = copy.deepcopy(model), ExtremePlanner(seed, share)
    backend = Backend(PlannedPartition(planner.choose, Inductor("") if fused else None))
    compiled = compile_step(model, backend)
    capture(model, compiled, backend, (), batch).plan()
    model._compiled_call_impl = compiled
    return model, planner
