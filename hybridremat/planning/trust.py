"""What is known of a step at sizes that it was not traced at, and whether it may be trusted.

A traced step is taken apart once into its distinct kernels (``extract.py``). At further sizes these alone are
laid out, and measured: what each allocates, whether it may write over an input or run by parts there. From
them the graph of the step is put together (``step_template.py``). Nothing but the following is taken from
other sizes:

- what joins the ops, which depends on no size, as the capture's guards hold. The checker proves it in symbols
  (``compiler/in_symbols.py``), for the graph as for each schedule that runs;
- that some kernels allocate nothing beside their results, whatever the size, or what a number becomes:
  elementwise ones, and on CPU products of float32 and float64, lookups, and what goes row by row
  (``kernel_kinds.py``). So is what they may write over, which is laid out as their result;
- that ways by parts whose every element is computed and drawn by itself (``PartedKernel.largest``) have the
  same bits, where their maker's test of the sizes lets them run;
- of calls that compute each element by itself, whole or by parts, so many bytes for each, once that has been
  measured at several further sizes (``costs/workspace_fits.py``).

A step is trusted at new sizes once the graph that was put together has been the traced one, to the last
byte, at other sizes of each symbol that is new there; one difference ends it for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from hybridremat.compiler.in_symbols import in_symbols
from hybridremat.compiler.lifetimes import StepLifetimes
from hybridremat.compiler.lifted import Lifted
from hybridremat.errors import HybridRematError, PlanError
from hybridremat.graph.costs.cost_models import CostModel
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.joint import JointGraph, Op
from hybridremat.graph.sizes import Sizes
from hybridremat.graph.tracing.alias_analysis import TraceError
from hybridremat.graph.tracing.symbolic import SymbolicJoint
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.step_template import Template
from hybridremat.planning.symbolic_step import SizedStep

logger = logging.getLogger(__name__)


@dataclass
class Trust:
    """Learns from traced sizes of one step, and says what it is at others.

    Attributes
    ----------
    joint
        The symbolic joint graph.
    traced
        Sizes at which the graph that was put together has been compared with the traced one; the first is
        that from which it is put together.
    lost
        Why it is not trusted, for good; empty while it may be.
    """

    joint: SymbolicJoint
    traced: list[Sizes] = field(default_factory=list)
    lost: str = ""
    _made: Template | None = None
    _proofs: dict[int, StepLifetimes | None] = field(default_factory=dict)

    def learn(self, sized: SizedStep, costed: TracedStep, model: CostModel, store: KernelStore) -> None:
        """Compare what would have been said of a size with what was traced, and measured, there.

        ``store``: what is known of kernels; what is told of them by their kind is written into it.
        """
        if self.lost:
            return
        try:
            if self._made is None:
                symbolic = in_symbols(self.joint, sized.instance, replace(sized.traced, graph=costed.graph))
                self._made = Template.of(symbolic, costed, sized.instance.sizes, store)
            graph = self._made.at(sized.instance.sizes, model, store)
        except (HybridRematError, TraceError, ValueError, RuntimeError) as error:
            self.lose(f"{type(error).__name__}: {error}")
            return
        if found := next(_differences(graph, costed.graph, timed=model.name != "profile"), ""):
            self.lose(f"{found} is another one at {dict(sized.instance.sizes)}")
            return
        self.traced.append(sized.instance.sizes)

    def at(self, sizes: Sizes, model: CostModel) -> TracedStep | None:
        """The step at some sizes; None where it is not trusted, and has to be traced.

        It has the calls of the step with symbols, and the graph of these sizes with its costs, but for times
        that are measured.
        """
        if self.lost or self._made is None or not self._seen(sizes) or self.joint.domain.refused(sizes):
            return None
        try:
            graph = self._made.at(sizes, model, KernelStore())
        except (HybridRematError, TraceError) as error:
            logger.debug("the step is traced at %s: %s", dict(sizes), error)
            return None
        return replace(self._made.symbolic.step, graph=graph)

    def proof(self, number: int, graphs: Callable[[], Lifted]) -> StepLifetimes | None:
        """What the graphs of a schedule, by its number, hold when; None if they are not proven."""
        if number not in self._proofs:
            assert self._made is not None
            try:
                self._proofs[number] = self._made.symbolic.proof(graphs())
            except (PlanError, TraceError) as error:
                logger.debug("a schedule is checked at each size: %s", error)
                self._proofs[number] = None
        return self._proofs[number]

    def forget(self, number: int) -> None:
        """Forget the proof of a schedule, whose graphs are let go."""
        self._proofs.pop(number, None)

    def _seen(self, sizes: Sizes) -> bool:
        """Whether each symbol has been seen to change, or has a size that was traced."""
        return len(self.traced) > 1 and all(
            len(known := {each[name] for each in self.traced}) > 1 or size in known
            for name, size in sizes.items()
        )

    def lose(self, why: str) -> None:
        """Trace the step at each size from now on."""
        logger.debug("the step is traced at each size: %s", why)
        self.lost = why


def _differences(one: JointGraph, other: JointGraph, *, timed: bool) -> Iterator[str]:
    """Where two graphs are not the same."""
    for mine, its in zip(one.ops, other.ops, strict=True):
        if mine != (its if timed else _with_times_of(its, mine)):
            yield mine.name
    for value, known in zip(one.values, other.values, strict=True):
        if value != known:
            yield value.name
    if one.fingerprint != other.fingerprint or other.untried:
        yield "the fingerprint" if not other.untried else "a workspace that is not known"


def _with_times_of(op: Op, other: Op) -> Op:
    if len(op.variants) != len(other.variants):
        return op
    pairs = zip(op.variants, other.variants, strict=True)
    return replace(op, time=other.time, variants=tuple(replace(way, time=its.time) for way, its in pairs))
