"""The exact figures of a plan with one decision changed, all else as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hybridremat.blocks.problem import bind_blocks
from hybridremat.blocks.types import Option
from hybridremat.graph.joint import Schedule
from hybridremat.plans.judging import plan_judge
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.policy import resolve_policy
from hybridremat.plans.records import PlanDetails
from hybridremat.sequence.dead_code import DeadCodeElimination
from hybridremat.sequence.decisions import Backward, Decision, ForwardOption, Solo, block_decisions
from hybridremat.sequence.exchange.edits import Edits
from hybridremat.sequence.flatten import Flattener
from hybridremat.sequence.offload.placement import Key
from hybridremat.sequence.repair import PinRepair

Where = Literal["forward peak", "saved", "backward peak"]


@dataclass(frozen=True)
class Change:
    """The step with one decision changed.

    Attributes
    ----------
    needed
        Bytes of the step, with what the caller's code takes.
    more_bytes, more_time
        Bytes and nanoseconds against the plan; negative: less.
    over
        Bytes beyond the limit; 0 if it fits. Without a limit, beyond what the plan takes.
    """

    needed: int
    more_bytes: int
    more_time: int
    over: int

    @property
    def fits(self) -> bool:
        """Whether the step keeps the limit."""
        return self.over == 0


@dataclass(frozen=True)
class Headroom:
    """Bytes free under the limit during a block's forward, its backward, and ``between`` the two.

    ``binds`` names the least of them, which keeps the block from taking more; ``saved`` stands for the time
    between, when other blocks run and all that this one saves is held.
    """

    forward: int
    between: int
    backward: int
    binds: Where


class WhatIf:
    """Changes of one plan, from its details alone: no model is needed."""

    def __init__(self, plan: PlanData, details: PlanDetails) -> None:
        self._plan, self._details, self._graph = plan, details, details.graph
        self._judge = plan_judge(plan, details)
        self._limit = plan.needed if plan.memory_limit is None else plan.memory_limit
        self._time = self._judge.time(plan.schedule)
        self._profile = self._judge.profile(plan.schedule)
        steps, overwritten = plan.schedule.steps, self._judge.simulate.overwritten(plan.schedule)
        self._in_place = Counter[int | None](steps[now] for now in overwritten)
        chain = details.chain
        self._sets = details.block_options
        bindings = bind_blocks(chain)
        self._flatten = Flattener(chain, bindings, self._sets)
        pins = resolve_policy(self._graph, plan.request.policy).pins
        self._mend = PinRepair(self._graph, pins, chain.rebuilt)
        self._remove_dead = DeadCodeElimination(self._graph, chain.rebuilt)
        self._chosen = {decision.block: decision for decision in block_decisions(details.decisions)}

    def in_place(self, value: int) -> int:
        """How many of the calls that make a value write it over one of their inputs."""
        return self._in_place[self._graph.values[value].producer]

    def parts(self, value: int) -> str:
        """How the op that makes a value is run by parts: ``by 8 rows``; empty if it is not."""
        op = self._graph.producer(value)
        return op.parts_text if op is not None else ""

    def saving(self, value: int) -> Change | None:
        """Save one more value instead of recomputing it; None if its op does not run in both phases.

        Other outputs of its op are saved with it, and what was recomputed only for it no longer is.
        """
        op, plan = self._graph.values[value].producer, self._plan
        forward = plan.schedule.steps[: plan.schedule.num_forward]
        later = plan.schedule.steps[plan.schedule.num_forward :]
        if op is None or op not in forward or op not in later:
            return None
        kept = Schedule((*forward, *(step for step in later if step != op)), len(forward))
        return self._changed(self._remove_dead(kept))

    def staying(self, value: int) -> Change:
        """Let a value that moves stay on the device."""
        schedule = self._plan.schedule
        others = tuple(move for move in schedule.moves if move.value != value)
        return self._figures(replace(schedule, moves=others))

    def again(self, value: int) -> Change | None:
        """Compute a value that moves again instead; other moves are placed anew. None if it cannot be."""
        schedule = self._plan.schedule
        mine = [move for move in schedule.moves if move.value == value]
        edits, bare = Edits(self._graph), replace(schedule, moves=())
        for move in sorted(mine, key=lambda each: -each.ready):
            ops = edits.made_again(edits.versions(bare), value, move.ready)
            if not ops:
                return None
            bare = edits.inserted(bare, ops, move.ready)
        return self._figures(self._moved(bare, frozenset((value, move.birth) for move in mine)))

    def options(self, block: int) -> Iterator[tuple[int, Option, Change | None]]:
        """The options that the block can have there, each with the step; None for the chosen one."""
        chosen = self._chosen.get(block)
        if chosen is None:
            return
        family = self._sets[block].solo if chosen.solo else self._sets[block].options
        for number, option in enumerate(family):
            yield number, option, None if number == chosen.option else self._with_option(block, number)

    def headroom(self, block: int) -> Headroom:
        """Bytes free while a block runs, and between its forward and its backward."""
        schedule, own = self._plan.schedule, self._details.chain.blocks[block]
        ops = np.isin(schedule.steps, [*own.forward, *own.optional, *own.backward])
        split = schedule.num_forward
        forward, backward = np.flatnonzero(ops[:split]), split + np.flatnonzero(ops[split:])
        start = forward[-1] + 1 if len(forward) else 0
        end = backward[0] if len(backward) else len(ops)
        lying = np.zeros(len(ops), bool)
        lying[start:end] = True
        free: dict[Where, int] = {
            "forward peak": self._free(forward),
            "saved": self._free(np.flatnonzero(lying & ~ops)),
            "backward peak": self._free(backward),
        }
        binds = min(free, key=lambda where: free[where])
        return Headroom(free["forward peak"], free["saved"], free["backward peak"], binds)

    def _free(self, places: np.ndarray) -> int:
        return self._limit - int(self._profile[places].max(initial=0))

    def _with_option(self, block: int, number: int) -> Change:
        def changed(decision: Decision) -> Decision:
            if isinstance(decision, ForwardOption | Backward | Solo) and decision.block == block:
                return replace(decision, option=number)
            return decision

        decisions = [changed(decision) for decision in self._details.decisions]
        return self._changed(self._mend(self._flatten(decisions)))

    def _changed(self, schedule: Schedule) -> Change:
        if self._plan.schedule.moves:
            schedule = self._moved(schedule)
        return self._figures(schedule)

    def _figures(self, schedule: Schedule) -> Change:
        needed = self._judge.needs(schedule)
        return Change(
            needed=needed,
            more_bytes=needed - self._plan.needed,
            more_time=self._judge.time(schedule) - self._time,
            over=max(0, needed - self._limit),
        )

    def _moved(self, schedule: Schedule, without: frozenset[Key] = frozenset()) -> Schedule:
        """With moves that bring it under the limit; without any if none do. ``without``: what stays."""
        from hybridremat.sequence.offload.moved import unmoved
        from hybridremat.sequence.offload.placement import place

        moves = place(unmoved(self._judge, schedule), self._limit, without, room=self._judge.host_room)
        return replace(schedule, moves=moves or ())
