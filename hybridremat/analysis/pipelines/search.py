"""Search for the cuts of a pipeline: estimates, plans of the stages that they lead to, and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hybridremat.analysis.pipelines.request import PipelineRequest
from hybridremat.analysis.pipelines.stages import StagePlan, Stages
from hybridremat.errors import InfeasibleLimitError
from hybridremat.sequence.pipeline.cuts import best_cuts, pareto_cuts
from hybridremat.sequence.pipeline.replay import Replay, replay
from hybridremat.units import format_bytes

ROUNDS: Final = 5
NEAR: Final = 1.05
"""Times the least estimate: cuts of up to so much are replayed, and the fastest are planned."""


@dataclass(frozen=True)
class FoundPipeline:
    """Cuts, the plan of each stage, and the step on clocks."""

    at: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    step: Replay


def find_pipeline(stages: Stages, names: Sequence[str]) -> FoundPipeline:
    """The fastest pipeline that is found.

    Raises
    ------
    InfeasibleLimitError
        If no cuts were found with which every stage fits its device.
    """
    best: FoundPipeline | None = None
    failed: list[tuple[int, tuple[int, int, int]]] = []
    seen: set[tuple[int, ...]] = set()
    for _ in range(ROUNDS):
        at = _promising(stages)
        if at in seen:
            break
        seen.add(at)
        every = [*_ranges(at)]
        plans = tuple(stages.planned(*each) for each in every)
        stages.correct(every)
        if any(plan.least is not None for plan in plans):
            failed.append(max((stages.missing(*each), each) for each in every))
            continue
        step = replay(stages.guess.request.shape.orders(), [plan.times for plan in plans])
        if best is None or step.time < best.step.time:
            best = FoundPipeline(at, plans, step)
    if best is None:
        _, nearest = min(failed)
        raise _infeasible(stages.guess.request, names, nearest, stages.planned(*nearest))
    return best


def _ranges(at: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return ((stage, first, last) for stage, (first, last) in enumerate(pairwise(at)))


def _promising(stages: Stages) -> tuple[int, ...]:
    """The cuts with the fastest replay of estimates; if nothing seems to fit, those that miss the least."""
    shape, layers = stages.guess.request.shape, len(stages.guess.pieces.modules)
    found = [*pareto_cuts(layers, shape.stages, stages.time)]
    if not found:
        nearest = best_cuts(layers, shape.stages, stages.missing, layers)
        assert nearest is not None, "there are as many layers as stages"
        return nearest.at
    least = min(each.cost(shape.max_weight) for each in found)
    near = [each.at for each in found if each.cost(shape.max_weight) <= NEAR * least]
    orders = shape.orders()

    def step_time(at: tuple[int, ...]) -> int:
        return replay(orders, [stages.phase_times(*each) for each in _ranges(at)]).time

    return min(near, key=lambda at: (step_time(at), at))


def _infeasible(
    request: PipelineRequest, names: Sequence[str], where: tuple[int, int, int], plan: StagePlan
) -> InfeasibleLimitError:
    stage, first, last = where
    memory, least = request.memory_of(stage), plan.least
    assert least is not None
    share = f" (its share of {request.shape.per_device} stages)" if request.shape.per_device > 1 else ""
    waiting = request.shape.in_flight()[stage]
    fewer = "" if request.shape.schedule == "1f1b" else 'fewer forwards in flight (schedule="1f1b"), '
    return InfeasibleLimitError(
        f"no cuts were found with which every stage fits its device: stage {stage} ({names[first]} to "
        f"{names[last - 1]}, {waiting} forwards in flight) needs at least {format_bytes(least)} ({least} "
        f"bytes), {format_bytes(plan.resident)} of which are parameters, optimizer state and buffers of the "
        f"pipeline, and device_memory is {format_bytes(memory)}{share}. Use more stages, a smaller "
        f"microbatch, {fewer}or devices with more memory.",
        limit=memory,
        least=least,
    )
