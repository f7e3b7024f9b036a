"""Graphs with symbols for sizes that ``torch.compile`` hands over: planned at each size that they meet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from hybridremat.compiler.backend import Backend
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.origin import origin_on
from hybridremat.planning.pipeline import backend_of, rewriting_of
from hybridremat.planning.plan import Plan
from hybridremat.planning.progress import no_progress
from hybridremat.planning.size_choice import SizeChoice
from hybridremat.planning.symbolic_partition import SymbolicPartition
from hybridremat.plans.origin import Origin, TensorSpec

logger = logging.getLogger(__name__)


class EachSize(SizeChoice):
    """Chooses the schedule of one graph at each size; a ``Choose``.

    ``on_plan`` is called with the plan of each further size, before it runs there; that of the first is left
    to the caller.
    """

    def __init__(self, context: PlanContext, on_plan: Callable[[Plan], None] | None) -> None:
        super().__init__(context)
        self._first, self._on_plan = context, on_plan
        self._sizes = 0

    def __call__(self, traced: TracedStep) -> Chosen:
        """See :class:`SizeChoice`. Raises as that."""
        self._at(traced)
        chosen = super().__call__(traced)
        self._made()
        return chosen

    def plan_at(self, step: TracedStep) -> Plan | None:
        """See :class:`SizeChoice`."""
        self._at(step)
        return super().plan_at(step)

    def adopted(self, plan: Plan, step: TracedStep) -> Chosen:
        """See :class:`SizeChoice`."""
        chosen = super().adopted(plan, step)
        self._made()
        return chosen

    def _at(self, step: TracedStep) -> None:
        progress = no_progress if self._sizes else self._first.progress
        self.context = self._first.at(_origin(step), progress)

    def _made(self) -> None:
        self._sizes += 1
        plan = self.context.store.current
        if self._sizes > 1 and plan is not None:
            logger.info("size %d is planned", self._sizes)
            if self._on_plan is not None:
                self._on_plan(plan)


def symbolic_backend(context: PlanContext, on_plan: Callable[[Plan], None] | None) -> Backend:
    """The backend of one graph with symbols."""
    settings = context.settings
    partition = SymbolicPartition(
        EachSize(context, on_plan), rewriting_of(settings), plain_forwards=True, most=settings.max_plans
    )
    return backend_of(settings, partition, dynamic=True)


def is_symbolic(value: Any) -> bool:
    """Whether an input of a graph has a size that is a symbol, or is one."""
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in sizes)


def _origin(step: TracedStep) -> Origin:
    """The record of a graph at the sizes of a step, as ``graph_origin`` has it of its inputs."""
    found: list[TensorSpec] = []
    device = "cpu"
    for node in step.module.graph.find_nodes(op="placeholder"):
        for value in step.node_values.get(node, ())[:1] if not node.name.startswith("tangents_") else ():
            known = step.graph.values[value]
            found.append(TensorSpec(str(len(found)), known.shape, known.dtype))
            device = node.meta["val"].device.type if len(found) == 1 else device
    return origin_on(device, found)
