"""``tune``: let real training steps choose among the schedules near the best."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from hybridremat.compiler.capture import model_device
from hybridremat.compiler.dispatch import Emitted
from hybridremat.compiler.frame_room import with_room
from hybridremat.compiler.lifted import Lifted
from hybridremat.errors import TuningError
from hybridremat.graph.garbage import collected_seldom
from hybridremat.graph.private_joint import planning_state
from hybridremat.interrupts import prompt_interrupts
from hybridremat.planning.accept import require_as_planned
from hybridremat.planning.candidates import candidates
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.pipeline import emitted
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import stores_for
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.ranks import Ranks, rendezvous
from hybridremat.runtime.halving import LEAST_STEPS, MOST_STEPS, contestants
from hybridremat.runtime.planned_call import PlannedCall, planned_call
from hybridremat.runtime.prepare import require_planned_call
from hybridremat.runtime.tuning import Tuning, clock_of
from hybridremat.units import is_count

if TYPE_CHECKING:
    from hybridremat.compiler.backend import CapturedGraph


@prompt_interrupts()
@with_room
def tune(
    model: nn.Module, *, steps: int = 20, progress: bool = True, across_ranks: bool = True
) -> Tuning:
    """Let the next training steps choose among the schedules near the plan's; all keep its limit.

    Up to eight schedules take turns, one a step, the planned one among them. After each round the slower half
    of the others is out. The planned one stays unless the last other is faster by more than the noise of both
    (for each, how far its second shortest step is from its shortest). Numbers are the same whichever runs.

    Parameters
    ----------
    model
        A wrapped model, whose latest plan is tuned: other input shapes keep theirs.
    steps
        Training steps that are measured: 20 compare five schedules, 28 and more eight, 4 at least two. A step
        is a forward and its first backward, and its time is from the start of the one to the end of the
        other; forwards that wait for their backward at one time (``forwards=``) are one step. A forward
        without a backward does not count.
    progress
        Whether to show how far the search for schedules is, and which one stays.
    across_ranks
        If a process group of ``torch.distributed`` is up, every rank has to call this, with the same plan and
        ``steps``: all run the same schedule in each step, and the slowest rank's times count. They wait for
        each other at the end of each round. False: this rank tunes alone.

    Returns
    -------
    Tuning
        How far it is, and in the end what was found (``record``), as in :func:`hybridremat.get_plan`.

    Raises
    ------
    ModelError
        If the model is not wrapped.
    TuningError
        If its schedules cannot take turns, ``steps`` are too few, they take turns already, or ranks have
        different plans. Nothing has changed.

    Examples
    --------
    >>> model = hybridremat.wrap(model, kwargs=batch, memory_limit="60%", progress=False)
    >>> tuning = hybridremat.tune(model, steps=4, progress=False)
    >>> for _ in range(4):
    ...     model(**batch).backward()
    >>> tuning.done, hybridremat.get_plan(model).tuning == tuning.record
    (True, True)
    """
    with rendezvous(across_ranks, "tune") as ranks:
        call, plan, graph = _tunable(model, steps)
        with planning_progress(show=progress, first="searching for schedules to compare") as shown:
            context = call.context.at(plan.origin, shown)
            plans = tuple(candidates(plan, context, contestants(steps)))
            _require_equal(ranks, plans, steps)
            tuning = _taking_turns(call, graph, plans, steps, ranks, progress)
    call.tuning = tuning
    return tuning


def _tunable(model: nn.Module, steps: int) -> tuple[PlannedCall, Plan, CapturedGraph]:
    """The planned call of a model, its latest plan, and the graph that this is of."""
    if hasattr(model, "_orig_mod") and planned_call(model) is None:
        raise TuningError(
            "tune needs a model that hybridremat.wrap has wrapped, and this is compiled by torch.compile: "
            "wrap the model itself, in place of compiling it"
        )
    call = require_planned_call(model)
    name = type(model).__name__
    if not is_count(steps, LEAST_STEPS) or steps > MOST_STEPS:
        raise TuningError(
            f"steps={steps!r} is no number of training steps to compare schedules in: "
            f"give {LEAST_STEPS} to {MOST_STEPS}"
        )
    if call.tuning is not None and not call.tuning.done:
        raise TuningError(
            f"schedules of this {name} take turns already: {call.tuning}. Wait for the end, or call stop() "
            "of what tune returned: steps of another shape do not count"
        )
    if call.context.settings.compiler == "inductor":
        raise TuningError('steps with compiler="inductor" cannot be tuned: wrap with compiler="eager"')
    if (plan := call.plan) is None:
        raise TuningError(f"this {name} has no plan yet: call tune after its first training step")
    if plan.parts:
        raise TuningError(f"the step of this {name} is several graphs, and only one of one can be tuned")
    graph = call.graph_of(plan.fingerprint)
    if graph is None or plan.details is None:
        raise TuningError(
            f"the latest plan of this {name} is of a step that is captured for all sizes, or that is not "
            "kept any more, and cannot be tuned: wrap with dynamic=False, and tune after a step of its shape"
        )
    return call, plan, graph


def _require_equal(ranks: Ranks, plans: tuple[Plan, ...], steps: int) -> None:
    """Refuse ranks that would run different schedules."""
    text = json.dumps([steps, *((each.fingerprint, repr(each.schedule)) for each in plans)])
    key = hashlib.sha256(text.encode()).hexdigest()
    if len(ranks.group(key, "").members) < ranks.size:
        raise TuningError(
            "the ranks have different plans, or were given different steps=, and can only tune alike: wrap "
            "with sample inputs of one shape on all of them, or pass across_ranks=False"
        )


def _taking_turns(
    call: PlannedCall, graph: CapturedGraph, plans: tuple[Plan, ...], steps: int, ranks: Ranks, show: bool
) -> Tuning:
    """Emit and check the schedules, and let them take turns from now on."""
    with planning_state(), collected_seldom():
        made = [_emitted(graph, plan, call) for plan in plans[1:]]
    turns = graph.turns()
    numbers = [turns.latest, *map(turns.add, made)]

    def over(winner: int) -> None:
        turns.keep(numbers[winner])

    in_flight, clock = call.in_flight, clock_of(model_device(call.model))  # what runs must not hold its call
    tuning = Tuning(steps, plans, call.context.store, lambda: in_flight.waiting, clock, ranks, over, show)
    if not tuning.done:
        turns.choose, turns.ended = lambda: numbers[tuning.begin()], tuning.end
    return tuning


def _emitted(graph: CapturedGraph, plan: Plan, call: PlannedCall) -> Emitted:
    """The graphs of a schedule of a captured step, checked as those of its plan were."""
    assert graph.step is not None
    assert plan.details is not None
    step = replace(graph.step, graph=plan.details.graph)
    chosen = Chosen(
        step,
        plan.schedule,
        plan.memory_limit,
        accept=partial(require_as_planned, plan, step.graph),
        stores=stores_for(plan, step, call.context) if plan.schedule.moves else None,
    )
    forward, backward, memory = emitted(chosen)
    return Emitted(Lifted(forward, backward, (), 0), memory.overwritten)
