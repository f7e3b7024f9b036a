"""Graphs with symbols for sizes that ``torch.compile`` hands over: planned at each size that they meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hybridremat.compiler.backend import Backend
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.origin import graph_origin
from hybridremat.planning.pipeline import backend_of, rewriting_of
from hybridremat.planning.plan import Plan
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.size_choice import SizeChoice
from hybridremat.planning.symbolic_partition import SymbolicPartition

logger = logging.getLogger(__name__)


class EachSize:
    """Chooses the schedule of one graph at each size; a ``Choose``.

    ``on_plan`` is called with the plan of each further size, before it runs there; that of the first is left
    to the caller.
    """

    def __init__(self, context: PlanContext, on_plan: Callable[[Plan], None] | None) -> None:
        self._context, self._on_plan = context, on_plan
        self._choice = SizeChoice(context)
        self._sizes = 0

    def __call__(self, traced: TracedStep) -> Chosen:
        """See :class:`SizeChoice`. Raises as that."""
        started, first = time.perf_counter(), not self._sizes
        with planning_progress(show=False) as progress:
            at = progress if not first else self._context.progress
            self._choice.context = self._context.at(graph_origin(_inputs(traced.module)), at)
            chosen = self._choice(traced)
        self._sizes += 1
        plan = self._context.store.current
        if not first and plan is not None:
            logger.info("size %d: planned in %.1f s", self._sizes, time.perf_counter() - started)
            if self._on_plan is not None:
                self._on_plan(plan)
        return chosen


def symbolic_backend(context: PlanContext, on_plan: Callable[[Plan], None] | None) -> Backend:
    """The backend of one graph with symbols."""
    settings = context.settings
    partition = SymbolicPartition(EachSize(context, on_plan), rewriting_of(settings), plain_forwards=True)
    return backend_of(settings, partition, dynamic=True)


def is_symbolic(value: Any) -> bool:
    """Whether an input of a graph has a size that is a symbol, or is one."""
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in sizes)


def _inputs(module: fx.GraphModule) -> list[Any]:
    """What a joint graph gets of its forward, as at its sizes."""
    given = module.graph.find_nodes(op="placeholder")
    return [node.meta.get("val") for node in given if node.name.startswith("primals")]
