"""Warn when more forwards wait for their backward than planned: their saved values add up."""

from __future__ import annotations

import warnings
import weakref

import torch

from hybridremat.errors import OutstandingForwardWarning
from hybridremat.graph.private_torch import tree_leaves
from hybridremat.planning.context import PlanContext
from hybridremat.units import format_bytes


class _Token:
    """Lives as long as the autograd graph of a forward; ``spent`` once a backward has run through it."""

    def __init__(self) -> None:
        self.spent = False

    def spend(self, _gradients: object) -> None:
        self.spent = True


class ForwardsInFlight:
    """Counts the forwards of a wrapped model that wait for their backward."""

    def __init__(self, context: PlanContext) -> None:
        self.context = context
        self._tokens: weakref.WeakSet[_Token] = weakref.WeakSet()
        self._warned = False

    def before_forward(self) -> None:
        """Warn, once, if this forward is one more than planned."""
        waiting = sum(not token.spent for token in self._tokens)
        planned = self.context.settings.forwards
        plan = self.context.store.current
        if self._warned or waiting < planned or plan is None:
            return
        self._warned = True
        warnings.warn(
            f"a forward starts while {waiting} of this model's earlier ones still wait for their backward, "
            f"and the plan was made for {planned} at a time: about "
            f"{format_bytes(waiting * plan.saved_bytes)} are held beyond what it counts. Wrap with "
            f"forwards={waiting + 1}, run each backward before the next forward, or drop what holds the "
            "earlier outputs.",
            OutstandingForwardWarning,
            stacklevel=2,
        )

    def after_forward(self, outputs: object) -> None:
        """Follow the autograd graph of a forward's outputs."""
        token = _Token()
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(token.spend)
        self._tokens.add(token)
