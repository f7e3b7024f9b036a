"""The inner compiler Inductor: our partition of the joint graph, Inductor's kernels.

Inductor's own compiler is imported where it is used: that takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.inner import Callbacks
from hybridremat.graph.joint import Schedule
from hybridremat.graph.tracing.fusion import FusionRules
from hybridremat.graph.tracing.trace import TracedStep


@dataclass(frozen=True)
class Inductor:
    """See :class:`~hybridremat.compiler.inner.InnerCompiler`.

    ``identity`` names what the partition depends on; it is part of the keys of Inductor's caches.
    """

    identity: str

    def __call__(
        self, module: fx.GraphModule, inputs: Sequence[Any], callbacks: Callbacks
    ) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs with Inductor."""
        from hybridremat.graph.private_inductor import compile_step

        return compile_step(module, inputs, callbacks, identity=self.identity)


def inductor_fusion() -> FusionRules:
    """What Inductor fuses."""
    from hybridremat.graph.private_inductor import InductorFusion

    return InductorFusion()


def lowered_memory(step: TracedStep, schedule: Schedule, *, lean: bool) -> EmittedMemory:
    """The memory of a schedule of a step with Inductor's fusion, from its own lowering.

    ``lean``: whether it keeps the order of the schedule and frees every buffer at once.

    Raises
    ------
    PlanError
        If the emitted graphs do not compute the joint graph.
    """
    from hybridremat.compiler import lowering

    return lowering.lowered_memory(step, schedule, lean=lean)


def code_memory(
    step: TracedStep, forward: fx.GraphModule, backward: fx.GraphModule
) -> Callable[[object, object], EmittedMemory]:
    """A function from the code of two emitted graphs, which have not been compiled yet, to its memory."""
    from hybridremat.compiler import lowering

    return lowering.code_memory(step, forward, backward)
