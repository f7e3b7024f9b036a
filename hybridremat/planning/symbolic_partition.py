"""The partitioner of steps that are captured with symbols for sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from hybridremat.compiler.backend import Partition
from hybridremat.errors import CaptureError
from hybridremat.graph.tracing.symbolic import symbolic_joint
from hybridremat.graph.tracing.trace import Rewriting, deliveries_by_input
from hybridremat.planning.chosen import Choose
from hybridremat.planning.pipeline import PlannedPartition
from hybridremat.planning.portfolio import Portfolio
from hybridremat.planning.symbolic_step import SymbolicSteps


class SymbolicPartition:
    """A partitioner (``compiler/backend.py``) that lets a portfolio of schedules run.

    Attributes
    ----------
    portfolio
        The schedules of the graph that was captured last, once the sizes of its sample have been planned.
        PyTorch captures another graph where sizes are outside of what it is right for.
    """

    def __init__(
        self,
        choose: Choose,
        rewriting: Rewriting | None = None,
        *,
        plain_forwards: bool = False,
        most: int | None = None,
    ) -> None:
        """``choose`` gives the schedule at each size, and ``most`` are kept, as for a :class:`Portfolio`.

        ``plain_forwards``: a graph without a backward runs as it is, instead of being refused.
        """
        self.choose, self.rewriting = choose, rewriting
        self._plain_forwards, self._most = plain_forwards, most
        self.portfolio: Portfolio | None = None
        self._joint: fx.GraphModule | None = None  # its graph, until a size of it could be planned

    def split(
        self, joint: fx.GraphModule, num_outputs: int, *, hold_outputs: bool, leaving: Mapping[int, int]
    ) -> Partition:
        """See :class:`~hybridremat.compiler.backend.Partitioner`.

        The sizes of the sample are planned first, unless others of the same graph have been since.
        """
        if self._joint is not joint:
            symbolic = symbolic_joint(joint, num_outputs)
            if symbolic is None:  # PyTorch has made numbers of all
                static = PlannedPartition(self.choose, rewriting=self.rewriting)
                return static.split(joint, num_outputs, hold_outputs=hold_outputs, leaving=leaving)
            steps = SymbolicSteps(
                symbolic, hold_outputs=hold_outputs, leaving=leaving, rewriting=self.rewriting
            )
            self.portfolio, self._joint = Portfolio(steps, self.choose, self._most), joint
        portfolio = self.portfolio
        assert portfolio is not None
        if not portfolio.members:
            portfolio.number_for(portfolio.steps.joint.sample)
        self._joint = None
        dispatch = portfolio.dispatch()
        forward, backward = dispatch.template()
        delivered = tuple(deliveries_by_input(portfolio.steps.joint.module, portfolio.members[0].graph))
        return Partition(forward, backward, lambda: None, delivered=delivered, dispatch=dispatch)

    def forward_only(self, graph: fx.GraphModule) -> Callable[[], None]:
        """See :class:`~hybridremat.compiler.backend.Partitioner`."""
        if self._plain_forwards:
            return lambda: None
        raise CaptureError("a step without a backward has no sizes to plan for")
