"""Warn when more forwards wait for their backward than planned, or one for two: what is saved adds up."""

from __future__ import annotations

import weakref

import torch

from hybridremat.compiler.second_backwards import BackwardToken, refuse_again, refuse_second_of
from hybridremat.errors import OutstandingForwardWarning, warn_caller
from hybridremat.graph.private_torch import tree_leaves
from hybridremat.planning.context import PlanContext
from hybridremat.units import format_bytes


class ForwardsInFlight:
    """Counts the forwards of a wrapped model that wait for their backward."""

    def __init__(self, context: PlanContext) -> None:
        self.context = context
        self._tokens: weakref.WeakSet[BackwardToken] = weakref.WeakSet()
        self._warned = self._warned_again = False

    @property
    def waiting(self) -> int:
        """How many forwards wait for their backward."""
        return sum(not token.spent for token in self._tokens)

    def before_forward(self) -> None:
        """Warn, once, if this forward is one more than planned."""
        waiting = self.waiting
        planned = self.context.settings.forwards
        plan = self.context.store.current
        if self._warned or waiting < planned or plan is None:
            return
        self._warned = True
        warn_caller(
            f"a forward starts while {waiting} of this model's earlier ones still wait for their backward, "
            f"and the plan was made for {planned} at a time: about "
            f"{format_bytes(waiting * plan.saved_bytes)} are held beyond what it counts. Wrap with "
            f"forwards={waiting + 1}, run each backward before the next forward, or drop what holds the "
            "earlier outputs.",
            OutstandingForwardWarning,
        )

    def after_forward(self, outputs: object, *, several_graphs: bool) -> None:
        """Follow the autograd graph of a forward's outputs."""
        if several_graphs:
            refuse_second_of(tree_leaves(outputs))
        token = BackwardToken(self._warn_again if several_graphs else self._refuse_again)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(token.spend)
        self._tokens.add(token)

    def _refuse_again(self) -> None:
        """Say what helps, where a second backward finds nothing of what the first one read."""
        plan = self.context.store.current
        if plan is not None and not plan.saved_bytes:
            return
        raise refuse_again(
            "plan the parts that each loss reads by themselves, as in "
            "hybridremat.wrap_each(model, ['generator', 'discriminator'], …)"
        )

    def _warn_again(self) -> None:
        """Warn, once, that graphs that only a later backward reaches were there in the first."""
        if self._warned_again or self.context.settings.forwards > 1:
            return
        self._warned_again = True
        warn_caller(
            "a second backward ran through one forward: what the graphs that it alone reaches have saved "
            "was there while the first one ran, and the plan takes the backward for one. Wrap with "
            "forwards=2, which counts what is saved twice, or run one backward, (first + second).backward().",
            OutstandingForwardWarning,
        )
