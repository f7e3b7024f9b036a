"""Schedules that nobody would choose: each backward op has what it reads computed again, at random.

They reach what plans seldom do: every op that may run again does, some many times, from inputs that were
themselves computed again or not.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random

from hybridremat.compiler.backend import Backend
from hybridremat.compiler.capture import capture, compile_step
from hybridremat.compiler.inductor import Inductor
from hybridremat.graph.joint import Phase, Schedule
from hybridremat.graph.memory import step_memory
from hybridremat.planning.pipeline import PlannedPartition
from support.training import FixedPlanner


def extreme_schedule(graph, seed: int, share: float) -> Schedule:
    """Before each backward op, every op that it needs runs again with this probability."""
    draw = Random(seed)
    forward = graph.phase_ops(Phase.FORWARD)
    steps, done = list(forward), set(forward)

    def bring(value, seen):
        op = graph.producer(value)
        if op is None or op.phase is Phase.BACKWARD or op.id in seen:
            return
        seen.add(op.id)
        if op.id in done and not (op.recomputable and draw.random() < share):
            return
        for read in op.reads:
            bring(read, seen)
        steps.append(op.id)
        done.add(op.id)

    for late in graph.phase_ops(Phase.BACKWARD):
        seen: set[int] = set()
        for value in graph.ops[late].reads:
            bring(value, seen)
        steps.append(late)
    for value in sorted(graph.gradients | graph.held_outputs):  # those that no backward op makes or reads
        op = graph.producer(value)
        if op is not None and op.id not in done and op.phase is not Phase.BACKWARD:
            bring(value, set())
    return Schedule(tuple(steps), len(forward))


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
    capture(model, compiled, backend, (), batch)
    model._compiled_call_impl = compiled
    return model, planner
