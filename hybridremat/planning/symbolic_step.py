"""A step with symbols for sizes: traced and planned at numbers, emitted for every size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.layout_trials import LayoutTrials
from hybridremat.compiler.lift import lifted
from hybridremat.compiler.lifted import Lifted
from hybridremat.compiler.offload.calls import hold_alike
from hybridremat.graph.private_torch import code_unwritten
from hybridremat.graph.sizes import Sizes
from hybridremat.graph.tracing.symbolic import Instance, SymbolicJoint
from hybridremat.graph.tracing.trace import Rewriting, TracedStep, trace_joint
from hybridremat.planning.chosen import Chosen


@dataclass(frozen=True)
class SizedStep:
    """A symbolic step at some sizes: what is planned.

    ``instance`` is the copy of its joint graph, which ``traced`` describes.
    """

    instance: Instance
    traced: TracedStep


class SymbolicSteps:
    """A symbolic joint graph, and how it is traced at numbers.

    Attributes
    ----------
    joint
        The symbolic joint graph.
    """

    def __init__(
        self,
        joint: SymbolicJoint,
        *,
        hold_outputs: bool,
        leaving: Mapping[int, int],
        rewriting: Rewriting | None = None,
    ) -> None:
        """See :func:`~hybridremat.graph.tracing.trace.trace_joint`."""
        self.joint = joint
        self._trials = LayoutTrials()
        self._trace: Callable[[fx.GraphModule], TracedStep] = lambda module: trace_joint(
            module,
            joint.num_outputs,
            hold_outputs=hold_outputs,
            leaving=leaving,
            rewriting=rewriting,
            real=self._trials,
            merged=True,
        )

    def at(self, sizes: Sizes) -> SizedStep:
        """The step at some sizes.

        Raises
        ------
        TraceError
            If they need a capture of their own.
        """
        instance = self.joint.at(sizes)
        return SizedStep(instance, self._trace(instance.module))

    def emitted(self, sized: SizedStep, chosen: Chosen) -> tuple[Lifted, EmittedMemory]:
        """The graphs of a schedule that was found at some sizes, with symbols, and checked there.

        What is checked is what runs: the graphs with symbols, at these sizes.

        Raises
        ------
        PlanError
            If they fail the check.
        """
        sized.instance.mark_origins()
        with code_unwritten():  # what runs is lifted from them
            forward, backward = emit(chosen.step, chosen.schedule)
            if chosen.stores is not None:
                from hybridremat.compiler.offload.write import write_moves  # not where nothing moves

                write_moves(chosen.step, (forward, backward), chosen.schedule, chosen.stores)
        made = lifted(self.joint, sized.instance.sizes, forward, backward)
        hold_alike(forward, made.forward)
        memory = check(chosen.step, *made.at(sized.instance), limit=chosen.limit)
        chosen.accept(memory)
        return made, memory
