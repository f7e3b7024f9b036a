"""The planned steps of a wrapped model by their inputs, and the inputs whose steps do not fit the limit."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from typing import Any

from torch import nn

from hybridremat.planning.context import PlanContext
from hybridremat.planning.input_keys import conditions, input_key, numbers_apart, plain_state
from hybridremat.planning.pipeline import Step
from hybridremat.planning.plan_store import Refusals
from hybridremat.planning.settings import Settings

logger = logging.getLogger(__name__)


class KnownSteps:
    """Steps by input shape; beyond ``Settings.max_plans``, the least recently used is dropped.

    Attributes
    ----------
    refusals
        The shapes that are known not to fit.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._steps: OrderedDict[Hashable, Step] = OrderedDict()
        self.refusals = Refusals()
        self._warned = self._warned_of_numbers = False

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Any]:
        """The keys."""
        return iter(self._steps)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._steps

    def values(self) -> ValuesView[Step]:
        """The steps."""
        return self._steps.values()

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings) -> Hashable:
        """The key of a step; with planned breaks it has the model's state, as eager code may depend on it."""
        breaks = settings.several_graphs
        return input_key(args, kwargs), conditions(self._model) if breaks else None

    def get(self, key: Hashable) -> Step | None:
        """The step of a key, which is the last used from then on."""
        if key in self._steps:
            self._steps.move_to_end(key)
        return self._steps.get(key)

    def keep(self, key: Hashable, step: Step, *, most: int) -> None:
        """Keep a step, and no more than ``most``."""
        self._warn_of_numbers(key)
        while key not in self._steps and len(self._steps) >= most:
            self._steps.popitem(last=False)
            self._warn_once(most)
        self._steps[key] = step

    def clear(self) -> None:
        """Drop all steps: their keys are others from now on."""
        self._steps.clear()

    @contextmanager
    def unless_refused(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], context: PlanContext
    ) -> Iterator[None]:
        """Around the planning of a step: one that did not fit is refused at once while nothing has changed.

        One of several graphs is not: which of them a step takes may depend on anything.

        Raises
        ------
        InfeasibleLimitError
            If it does not fit, or did not.
        """
        settings = context.settings
        if settings.several_graphs:
            yield
            return
        state = conditions(self._model), plain_state(self._model)
        asked = input_key(args, kwargs), state, context.store.granted
        kept = settings.budget_seconds() is None and settings.gradients == "at_end"  # else more may change
        with self.refusals.unless_known(asked, kept=kept):
            yield

    def _warn_of_numbers(self, key: Any) -> None:
        """Say once that steps are planned anew for nothing but another number."""
        known: list[Any] = [each for each in self._steps if each != key]
        names = [] if self._warned_of_numbers else numbers_apart(key[0], (inputs for inputs, _ in known))
        if names:
            self._warned_of_numbers = True
            logger.warning(
                "%s is captured and planned for each new number in %s, which takes seconds each time. Pass a "
                "tensor of no dimension in its place (torch.tensor(0.5)): it may change without that.",
                type(self._model).__name__,
                ", ".join(names),
            )

    def _warn_once(self, most: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s has met more than max_plans=%d input shapes; a plan is dropped for each new one, "
                "and made again if its shape comes back. Pad inputs to few lengths (a collator's "
                "pad_to_multiple_of=), or raise max_plans.",
                type(self._model).__name__,
                most,
            )
