"""The partitioner of steps that are captured with symbols for sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from hybridremat.compiler.backend import Partition
from hybridremat.errors import CaptureError
from hybridremat.graph.private_torch import shape_facts
from hybridremat.graph.tracing.symbolic import require_same_facts, symbolic_joint
from hybridremat.graph.tracing.trace import Rewriting
from hybridremat.planning.chosen import Choose
from hybridremat.planning.portfolio import Portfolio
from hybridremat.planning.symbolic_step import SymbolicSteps


class SymbolicPartition:
    """A partitioner (``compiler/backend.py``) that lets a portfolio of schedules run.

    Attributes
    ----------
    portfolio
        The schedules, once the sizes of the sample have been planned.
    """

    def __init__(self, choose: Choose, rewriting: Rewriting | None = None) -> None:
        """``choose`` gives the schedule at each size, as for a :class:`Portfolio`."""
        self.choose, self.rewriting = choose, rewriting
        self.portfolio: Portfolio | None = None

    def split(
        self, joint: fx.GraphModule, num_outputs: int, *, hold_outputs: bool, leaving: Mapping[int, int]
    ) -> Partition:
        """See :class:`~hybridremat.compiler.backend.Partitioner`."""
        facts, symbolic = shape_facts(joint), symbolic_joint(joint, num_outputs)
        if symbolic is None or facts is None:
            raise CaptureError("no dimension of the inputs is a symbol in the captured graph")
        steps = SymbolicSteps(
            symbolic, hold_outputs=hold_outputs, leaving=leaving, rewriting=self.rewriting
        )
        self.portfolio = portfolio = Portfolio(steps, self.choose)
        portfolio.number_for(symbolic.sample)
        dispatch = portfolio.dispatch()
        forward, backward = dispatch.template()
        require_same_facts(joint, facts)
        delivered = tuple(each.index for each in portfolio.members[0].graph.deliveries)
        return Partition(forward, backward, lambda: None, delivered=delivered, dispatch=dispatch)

    def forward_only(self, graph: fx.GraphModule) -> Callable[[], None]:
        """See :class:`~hybridremat.compiler.backend.Partitioner`."""
        raise CaptureError("a step without a backward has no sizes to plan for")
