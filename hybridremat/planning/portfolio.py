"""The schedules of a step with symbols for sizes: which runs at which, each emitted when it is first chosen.

What a schedule needs at other sizes is known from the copy of the step there, as it is at its own; that it
computes the same there is checked there, before anything of the step runs. Where a step is trusted, no copy
is made: its schedules are checked once for all sizes, and their bytes at each.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from hybridremat.compiler.dispatch import Dispatch, Emitted
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.lifted import Lifted
from hybridremat.errors import PlanError
from hybridremat.graph.garbage import collected_seldom
from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.graph.memory import MemorySimulator
from hybridremat.graph.private_joint import planning_state
from hybridremat.graph.sizes import Sizes
from hybridremat.planning.accept import require_as_planned
from hybridremat.planning.chosen import Choose, Chosen
from hybridremat.planning.other_sizes import checked, moved
from hybridremat.planning.size_choice import SizeChoice
from hybridremat.planning.step_costs import kernel_store
from hybridremat.planning.symbolic_step import SizedStep, SymbolicSteps
from hybridremat.planning.trust import Trust

if TYPE_CHECKING:
    from hybridremat.compiler.offload.stores import Stores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """An emitted schedule, and the graph that it was found on, which tells how its ops run.

    ``sizes`` are those that it was emitted at, ``stores`` where what moves waits.
    """

    graph: JointGraph
    schedule: Schedule
    sizes: Sizes
    stores: Stores | None = None

    @cached_property
    def ways(self) -> tuple[object, ...]:
        """How its executions run."""
        return _ways(self.graph, self.schedule)

    def is_as(self, graph: JointGraph, schedule: Schedule) -> bool:
        """Whether its code is that of a schedule on a graph, which may be of other sizes."""
        return self.schedule == schedule and self.ways == _ways(graph, schedule)


def _ways(graph: JointGraph, schedule: Schedule) -> tuple[object, ...]:
    """How the executions of a schedule run: by parts, and over what."""
    how = [(graph.ops[op].runs.kernel, graph.ops[op].runs.parts) for op in schedule.steps]
    return how, sorted(MemorySimulator(graph).overwritten(schedule).items())


Running = tuple[int, Callable[[], None]]
"""The number of a member, and what is called when its forward starts."""


@dataclass
class Portfolio:
    """Chooses a schedule at each size.

    Attributes
    ----------
    steps
        The step.
    choose
        The schedule at some sizes, given the step there. If it is a :class:`SizeChoice`, steps that are
        trusted (``trust.py``) need not be traced where a known schedule runs.
    most
        Schedules whose graphs are kept; those that ran longest ago are let go, and emitted again if they are
        called.
    members
        The schedules that have been emitted; one that runs at several sizes is there once.
    emitted
        The graphs that are kept, by the number of the schedule; those that ran last are at the end.
    numbers
        By sizes, in the order of the step's size inputs, the number of the member that runs there.
    traces
        How many sizes were traced.
    lock
        Held while a schedule is chosen or emitted, and by who says first what it is chosen for.
    """

    steps: SymbolicSteps
    choose: Choose
    most: int | None = None
    members: list[Member] = field(default_factory=list)
    emitted: OrderedDict[int, Emitted] = field(default_factory=OrderedDict)
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    traces: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    _started: dict[tuple[int, ...], Callable[[], None]] = field(default_factory=dict)
    _trust: Trust = field(init=False)

    def __post_init__(self) -> None:
        self._trust = Trust(self.steps.joint)

    def dispatch(self) -> Dispatch:
        """What runs its schedules, the first of which has been chosen."""
        placeholders = self.steps.joint.module.graph.find_nodes(op="placeholder")
        places = {node: place for place, node in enumerate(placeholders)}
        inputs = {name: places[node] for name, node in self.steps.joint.inputs.items()}
        return Dispatch(inputs, self.begin, self.graphs, self.steps.joint.require_guarded)

    def number_for(self, sizes: Sizes) -> int:
        """The number of the schedule for some sizes; at new ones it is chosen and, if it is new, emitted.

        Raises
        ------
        HybridRematError
            As planning.
        """
        key = self._key(sizes)
        if key not in self.numbers:
            with planning_state(), collected_seldom():
                self.numbers[key], self._started[key] = self._trusted(sizes) or self._traced(sizes)
        return self.numbers[key]

    def _traced(self, sizes: Sizes) -> Running:
        """The schedule for sizes at which the step is traced, which becomes known there."""
        sized, choose = self.steps.at(sizes), self.choose
        self.traces += 1
        chosen = choose(sized.traced)
        number = self._member(sized, chosen)
        if isinstance(choose, SizeChoice) and choose.costed is not None:
            settings = choose.context.settings
            store = kernel_store(choose.costed, settings)
            self._trust.learn(sized, choose.costed, settings.costs(), store)
        return number, chosen.started

    def _trusted(self, sizes: Sizes) -> Running | None:
        """The schedule for sizes at which the step is known, one that has been emitted; else None.

        It is proven for all sizes, and its bytes are counted at these on its graphs.
        """
        choose = self.choose
        if not isinstance(choose, SizeChoice) or not choose.shares:
            return None
        known = self._trust.at(sizes, choose.context.settings.costs())
        plan = choose.plan_at(known) if known is not None else None
        if known is None or plan is None or plan.details is None:
            return None
        for number, member in enumerate(self.members):
            if not member.is_as(plan.details.graph, plan.schedule):
                continue
            proof = self._trust.proof(number, partial(self._lifted, number))
            if proof is not None:
                try:
                    require_as_planned(plan, plan.details.graph, proof.memory(plan.details.graph))
                except PlanError as error:
                    self._trust.lose(str(error))
                    return None
                return number, choose.adopted(plan, known).started
        return None

    def _lifted(self, number: int) -> Lifted:
        return self.graphs(number).lifted

    def graphs(self, number: int) -> Emitted:
        """The graphs of a schedule, emitted again if they have been let go."""
        with self.lock:
            if number not in self.emitted:
                self._emit_again(number)
            self.emitted.move_to_end(number)
            return self.emitted[number]

    def _emit_again(self, number: int) -> None:
        member = self.members[number]
        with planning_state(), collected_seldom():
            sized = self.steps.at(member.sizes)
            step = replace(sized.traced, graph=member.graph)
            chosen = Chosen(step, member.schedule, stores=member.stores)
            self._keep(number, *self.steps.emitted(sized, chosen))
        logger.info("a schedule of %s is emitted again", dict(member.sizes))

    def _keep(self, number: int, lifted: Lifted, memory: EmittedMemory) -> None:
        overwritten = tuple(lifted.num_sizes + place for place in memory.overwritten)
        self.emitted[number] = Emitted(lifted, overwritten)
        if self.most is not None and len(self.emitted) > self.most:
            self._trust.forget(self.emitted.popitem(last=False)[0])

    def begin(self, sizes: Sizes) -> int:
        """As :meth:`number_for`; the plan there becomes the current one."""
        with self.lock:
            number = self.number_for(sizes)
            self._started[self._key(sizes)]()
        return number

    def choose_again(self, sizes: Sizes) -> None:
        """As :meth:`begin` at sizes whose plan has been dropped: it is made again."""
        with self.lock:
            del self.numbers[self._key(sizes)]
            self.begin(sizes)

    def _key(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[name] for name in self.steps.joint.inputs)

    def _member(self, sized: SizedStep, chosen: Chosen) -> int:
        graph = chosen.step.graph
        for number, member in enumerate(self.members):
            if member.is_as(graph, chosen.schedule) and self._runs_here(number, sized, chosen):
                return number
        emitted = self.steps.emitted(sized, chosen)
        self.members.append(Member(graph, chosen.schedule, sized.instance.sizes, chosen.stores))
        self._keep(len(self.members) - 1, *emitted)
        return len(self.members) - 1

    def _runs_here(self, number: int, sized: SizedStep, chosen: Chosen) -> bool:
        """Whether the graphs of a member pass the check at some sizes."""
        member = self.members[number]
        graph = moved(member.graph, member.schedule, chosen.step.graph)
        if graph is None:
            return False
        try:
            memory = checked(self._lifted(number), chosen.step, graph, sized.instance, chosen.limit)
        except PlanError:  # a rewrite has written other numbers into it
            return False
        chosen.accept(memory)
        return True
