"""The plans of one wrapped model, one for each joint graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from hybridremat.errors import InfeasibleLimitError
from hybridremat.planning.plan import Plan
from hybridremat.plans.plan_data import OtherSizes

if TYPE_CHECKING:
    from hybridremat.compiler.offload.stores import Room, Stores
    from hybridremat.planning.settings import Settings


MOST_REFUSED: Final = 64
"""Of shapes, paths or graphs together."""


class Refusals:
    """What did not fit, so that the same is refused at once; the last :data:`MOST_REFUSED`."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, InfeasibleLimitError]] = []

    @contextmanager
    def unless_known(self, asked: Any, *, kept: bool) -> Iterator[None]:
        """Around what plans something; ``kept``: whether it is not tried again if it has been refused.

        Raises
        ------
        InfeasibleLimitError
            If it does not fit, or did not.
        """
        for known, error in self._known:
            if kept and known == asked:
                raise error.fresh()
        try:
            yield
        except InfeasibleLimitError as error:
            if kept:
                self._known = [*self._known, (asked, error.fresh())][-MOST_REFUSED:]
            raise

    def clear(self) -> None:
        """Plan again for what did not fit: what is asked of plans has changed."""
        self._known.clear()


class PlanStore:
    """Plans by fingerprint of their joint graph, least recently used first; at most ``most`` are kept.

    Attributes
    ----------
    granted
        The most bytes that the limit of a plan came to, dropped ones included.
    told_of_checkpoints
        Whether the log says that the model has checkpoints of its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._plans: dict[str, Plan] = {}
        self._figures: dict[str, Plan] = {}
        self._current: str | None = None
        self.granted = 0
        self.told_of_checkpoints = False
        self._stores = WeakValueDictionary[Hashable, "Stores"]()  # graphs hold them
        self._room: Room | None = None

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def current(self) -> Plan | None:
        """The plan of the step that ran or was compiled last.

        Without ``details`` if it is of a size that shares its schedules, and was dropped.
        """
        if self._current is None:
            return None
        return self._plans.get(self._current) or self._figures.get(self._current)

    def get(self, fingerprint: str) -> Plan | None:
        """The plan of a graph, if there is one."""
        return self._plans.get(fingerprint)

    def whole(self) -> tuple[Plan, ...]:
        """The plans that are kept whole."""
        return tuple(self._plans.values())

    def add(self, plan: Plan) -> None:
        """Make a plan the current one; the least recently used is dropped to make room."""
        self._plans.pop(plan.fingerprint, None)
        while len(self._plans) >= self._most:
            del self._plans[next(iter(self._plans))]
        self._plans[plan.fingerprint] = plan
        self._current = plan.fingerprint
        self.granted = max(self.granted, plan.asked_limit or 0)

    def resume(self, plan: Plan) -> None:
        """Make an earlier plan the current one; it is added again if it has been dropped."""
        self.add(self._plans.get(plan.fingerprint, plan))

    def use(self, fingerprint: str | None) -> None:
        """Make the plan of a graph the current one, if there is one."""
        if fingerprint is not None and fingerprint in self._plans:
            self.add(self._plans[fingerprint])
        elif fingerprint in self._figures:
            self._current = fingerprint

    def keep_figures(self, fingerprint: str) -> None:
        """Keep the figures of a plan when it is dropped: its step can still run."""
        self._figures[fingerprint] = self._plans[fingerprint].figures()

    def let_know(self, fingerprint: str, others: OtherSizes) -> None:
        """Let a plan know the capture that it is of."""
        self._plans[fingerprint] = replace(self._plans[fingerprint], others=others)

    def stores(self, settings: Settings, device: str, part: Hashable = None) -> Stores:
        """Where values of all the model's steps wait (``offload=``), or of one of several graphs of them."""
        found = self._stores.get(part)
        if found is None:
            from hybridremat.compiler.offload.stores import Room, Stores
            from hybridremat.compiler.offload.targets import Target

            assert settings.offload is not None
            self._room = self._room or Room(settings.host_bytes())
            self._stores[part] = found = Stores(Target.of(settings.offload), device, room=self._room)
        return found

    def drop(self, plan: Plan) -> None:
        """Remove a plan that another one replaces."""
        self._plans.pop(plan.fingerprint, None)

    def note_total(self, seconds: float, compiling: float = 0.0) -> None:
        """Record the seconds that a step took in all, and those of its compiler.

        All but these and the stages of planning is capture, emission and checks.
        """
        plan = self._plans.get(self._current or "")
        if plan is not None:
            rest = max(0.0, seconds - plan.planning_seconds - compiling)
            timings = {"capture and emit": rest} | ({"compile": compiling} if compiling else {})
            self._plans[plan.fingerprint] = plan.with_timings(timings)
