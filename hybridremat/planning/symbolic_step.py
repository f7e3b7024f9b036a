"""A step with symbols for sizes: planned at the sizes of its sample, emitted for every size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from hybridremat.compiler.backend import Partition
from hybridremat.compiler.check import check
from hybridremat.compiler.emit import emit
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.layout_trials import LayoutTrials
from hybridremat.compiler.lifted import Lifted, lifted, mark_origins, twin
from hybridremat.errors import CaptureError
from hybridremat.graph.private_torch import shape_facts
from hybridremat.graph.sizes import Sizes
from hybridremat.graph.tracing.symbolic import Instance, SymbolicJoint, require_same_facts, symbolic_joint
from hybridremat.graph.tracing.trace import Rewriting, TracedStep, trace_joint
from hybridremat.planning.chosen import Choose, Chosen


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
        """The graphs of a schedule that was found at some sizes, checked there, with symbols.

        Raises
        ------
        PlanError
            If they fail the check.
        """
        mark_origins(sized.instance)
        forward, backward = emit(chosen.step, chosen.schedule)
        memory = check(chosen.step, forward, backward, limit=chosen.limit)
        chosen.accept(memory)
        return lifted(self.joint, sized.instance.sizes, forward, backward), memory


def overwritten_inputs(lifted: Lifted, memory: EmittedMemory) -> tuple[int, ...]:
    """The places of the lifted backward's inputs that it writes over: the size inputs come first."""
    return tuple(lifted.num_sizes + place for place in memory.overwritten)


class SymbolicPartition:
    """A partitioner (``compiler/backend.py``) of steps with symbols: one schedule, at every size.

    Attributes
    ----------
    steps
        The step, once it has been planned.
    lifted
        The graphs that run.
    """

    def __init__(self, choose: Choose, rewriting: Rewriting | None = None) -> None:
        self.choose, self.rewriting = choose, rewriting
        self.steps: SymbolicSteps | None = None
        self.lifted: Lifted | None = None

    def split(
        self, joint: fx.GraphModule, num_outputs: int, *, hold_outputs: bool, leaving: Mapping[int, int]
    ) -> Partition:
        """See :class:`~hybridremat.compiler.backend.Partitioner`."""
        facts, symbolic = shape_facts(joint), symbolic_joint(joint, num_outputs)
        if symbolic is None or facts is None:
            raise CaptureError("no dimension of the inputs is a symbol in the captured graph")
        self.steps = SymbolicSteps(
            symbolic, hold_outputs=hold_outputs, leaving=leaving, rewriting=self.rewriting
        )
        sized = self.steps.at(symbolic.sample)
        chosen = self.choose(sized.traced)
        self.lifted, memory = self.steps.emitted(sized, chosen)
        require_same_facts(joint, facts)
        delivered = tuple(each.index for each in chosen.step.graph.deliveries)
        return Partition(
            twin(self.lifted.forward),
            twin(self.lifted.backward),
            chosen.started,
            delivered=delivered,
            overwritten=overwritten_inputs(self.lifted, memory),
        )

    def forward_only(self, graph: fx.GraphModule) -> Callable[[], None]:
        """See :class:`~hybridremat.compiler.backend.Partitioner`."""
        raise CaptureError("a step without a backward has no sizes to plan for")
