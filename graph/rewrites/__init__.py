"""Other ways to run calls of a step: the list of them, and what the stages of a step ask it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from hybridremat.errors import ModelError
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import device_of
from hybridremat.graph.private_torch import unwritten_module
from hybridremat.graph.rewrites.by_parts import BY_PARTS
from hybridremat.graph.rewrites.chunked_loss import LOSS_BY_CHUNKS
from hybridremat.graph.rewrites.in_place import IN_PLACE
from hybridremat.graph.rewrites.loss_fusion import LOSS_FUSION
from hybridremat.graph.rewrites.rewrite import Call, Form, Joint, Rewrite
from hybridremat.graph.rewrites.slices import SLICES
from hybridremat.graph.tracing.trace import Originals, TracedStep

REWRITES: Final[tuple[Rewrite, ...]] = (LOSS_BY_CHUNKS, LOSS_FUSION, SLICES, IN_PLACE, BY_PARTS)
"""All of them, in the order in which they are written."""


@dataclass(frozen=True)
class JointRewrites:
    """Rewrites joint graphs, in place.

    Attributes
    ----------
    store_for
        What is known on this device, by its kind; None: nothing is tried, nor written that has to be.
    exact
        Whether those with the same bits are to be written.
    chunked
        Whether those with other bits are to be written.
    several
        Whether the step has other graphs, in which they may have a place if they have none here.
    """

    store_for: Callable[[str], KernelStore] | None
    exact: bool = True
    chunked: bool = False
    several: bool = False

    def __call__(self, module: fx.GraphModule, num_outputs: int) -> Originals:
        """Rewrite a graph, so many of whose outputs belong to the forward.

        Raises
        ------
        ModelError
            If one with other bits is to be written, and finds no place.
        """
        joint, whole = Joint(module, num_outputs), None
        if self.chunked:
            try:
                whole = self._written(joint, exact=False)
            except ModelError:
                if not self.several:
                    raise
        return Originals(whole, self._written(joint, exact=True) if self.exact else None)

    def _written(self, joint: Joint, *, exact: bool) -> fx.GraphModule | None:
        """The graph as it was before; None if there is nothing to write."""
        kinds = [each for each in REWRITES if not each.of_ops and each.exact is exact]
        found = [(each, sites) for each in kinds if (sites := self._proven(each, joint))]
        if not found:
            return None
        before = fx.Graph()
        before.output(before.graph_copy(joint.module.graph, {}))
        for each, sites in found:
            each.write(joint, sites)
        joint.module.graph.eliminate_dead_code()
        return unwritten_module(joint.module, before)

    def _proven(self, rewrite: Rewrite, joint: Joint) -> Sequence[Any]:
        sites = rewrite.find(joint)
        if not sites or rewrite.proven is None:
            return sites
        device = device_of(joint.module.graph.nodes)
        if self.store_for is None or device == "meta":
            return ()
        store = self.store_for(device)
        passed = rewrite.proven(joint, sites, store)
        store.save()
        return passed


def with_rewrites(step: TracedStep, store: KernelStore) -> TracedStep:
    """The same step with the ways to run its ops that pass on this device.

    Raises
    ------
    MeasurementError
        If no memory is left for a trial.
    """
    for each in REWRITES:
        step = each.applied(step, store) if each.of_ops else step
    return step


def with_rewrite_times(step: TracedStep, store: KernelStore) -> TracedStep:
    """The same step with the times of these ways, measured. Raises as :func:`with_rewrites`."""
    for each in REWRITES:
        step = each.timed(step, store) if each.timed else step
    return step


def form_of(step: TracedStep, op: int, over: int | None) -> tuple[Form, fx.Node | None] | None:
    """What runs an op that writes over a value (None: over nothing), and the input of its node that this is.

    None for the op's own kernel, and for a way that no rewrite knows.
    """
    return next(filter(None, (each.form(step, op, over) for each in REWRITES if each.form)), None)


def stands_for(call: Call) -> Call:
    """The call of the joint graph that an emitted call stands for: itself, if it is of no rewrite."""
    for each in REWRITES:
        if each.term and (plain := each.term(call, lambda node: stands_for(Call.of(node)))):
            return stands_for(plain)
    return call
