"""Warn when more forwards wait for their backward than planned, or one for two: what is saved adds up."""

from __future__ import annotations

import logging
import weakref

import torch

from hybridremat.compiler.second_backwards import BackwardToken, refuse_again, refuse_second_of
from hybridremat.errors import InfeasibleLimitError, OutstandingForwardWarning, warn_caller
from hybridremat.graph.private_torch import tree_leaves
from hybridremat.planning.context import PlanContext
from hybridremat.plans.plan_data import PlanData
from hybridremat.units import format_bytes

logger = logging.getLogger(__name__)


def counts_retained(context: PlanContext) -> bool:
    """Whether steps that leave their graph for another backward can be planned for that in training."""
    settings = context.settings
    alone = context.agreement.alone and settings.sharding is None and context.given is None
    return alone and settings.memory_limit is not None and settings.gradients == "at_end"


class ForwardsInFlight:
    """Counts the forwards of a wrapped model that wait for their backward.

    Attributes
    ----------
    retained
        Whether a backward has left its graph for another one.
    """

    def __init__(self, context: PlanContext, *, plans_again: bool = True) -> None:
        self.context, self._plans_again = context, plans_again
        self._tokens: weakref.WeakSet[BackwardToken] = weakref.WeakSet()
        self._warned = self._warned_again = self._told_of_eval = self.retained = False

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

    def after_plain(self, outputs: object, name: str) -> None:
        """Say once, if a backward reaches what the plain model returns in eval mode, that it has no limit."""
        plan = self.context.store.current
        if self._told_of_eval or plan is None or plan.memory_limit is None:
            return
        if plan.plain_peak > plan.memory_limit:
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                    output.grad_fn.register_prehook(lambda _: self._tell_of_eval(name, plan))

    def _tell_of_eval(self, name: str, plan: PlanData) -> None:
        if not self._told_of_eval:
            self._told_of_eval = True
            logger.warning(
                "a backward ran through %s in eval mode, where the plain model runs, without a limit: a "
                "plain step takes about %s, and the limit is %s. With model.training = True the step is "
                "planned, and submodules stay in eval mode.",
                name,
                format_bytes(plan.plain_peak),
                format_bytes(plan.memory_limit or 0),
            )

    def after_forward(self, outputs: object, *, several_graphs: bool) -> None:
        """Follow the autograd graph of a forward's outputs."""
        if several_graphs:
            refuse_second_of(tree_leaves(outputs))
        token = BackwardToken(self._warn_again if several_graphs else self._refuse_again, self._retained)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(token.spend)
        self._tokens.add(token)

    def _retained(self) -> None:
        """Say once what a backward with ``retain_graph`` takes beyond the plan."""
        plan = self.context.store.current
        if self.retained or plan is None or self.context.settings.forwards > 1:
            return
        self.retained = True
        logger.warning(
            "a backward with retain_graph=True leaves what is saved until it has ended: up to %s beyond what "
            "the plan counts. %s",
            format_bytes(plan.saved_bytes),
            "Steps from the next one on are planned for that (forwards=2)."
            if self._plans_again and counts_retained(self.context)
            else "forwards=2 counts it.",
        )

    def for_retained(self, error: InfeasibleLimitError) -> InfeasibleLimitError:
        """The error for a step that has to be planned for a retained graph, saying so."""
        text = f"{error} (A backward with retain_graph=True leaves what is saved, which counts twice.)"
        return InfeasibleLimitError(text, limit=error.limit, least=error.least)

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
