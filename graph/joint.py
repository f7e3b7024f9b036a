"""The joint forward+backward graph of one training step, as plain data.

Nothing here imports torch: a graph can be written by hand in a test, saved, compared, and planned
on a machine without an accelerator. :mod:`hybridremat.graph.tracing` makes one from a model.

Units: bytes and nanoseconds, always integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Final


class Phase(StrEnum):
    """Where an op belongs in the step.

    ``FORWARD`` ops are what the model's outputs need, ``BACKWARD`` ops depend on the tangents, and
    ``OPTIONAL`` ops depend only on forward values but are read only by the backward: they may run
    in either phase.
    """

    FORWARD = "forward"
    OPTIONAL = "optional"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Value:
    """One storage. Views of it belong to it.

    ``producer`` is the op that writes it; None for graph inputs (resident, they cost nothing) and
    for tangents (``tangent=True``: alive from the start of the backward to its end, since autograd's
    frame holds them).
    """

    id: int
    bytes: int
    producer: int | None
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    tangent: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run an op, with the same bits as any other.

    Attributes
    ----------
    kernel, parts
        What runs in place of the op's own kernel, and in how many parts; empty and 1 for that itself.
    time, temp, overwrites
        As in :class:`Op`.
    """

    kernel: str
    parts: int
    time: int
    temp: int
    overwrites: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel call of the joint graph.

    Attributes
    ----------
    reads, writes
        Value ids. ``writes`` holds only values that this op produces; a mutation of a resident
        buffer (BatchNorm statistics) has ``mutates=True`` and writes nothing.
    recomputable
        False for mutations, collectives, effectful and impure custom ops: they run exactly once.
    random
        Draws from the generator; a recomputation replays the saved generator state.
    flops
        Matrix-product, convolution and attention flops.
    io_bytes
        Bytes read plus bytes written.
    time
        Nanoseconds, by the cost model that was chosen.
    temp
        Workspace: bytes that the kernel allocates beyond its outputs while it runs.
    overwrites
        What it reads that its output may be written over, where nobody needs that any more: of the same size
        and layout, proven on this device to give the same bits.
    variants, variant
        The ways to run it, its own kernel first (none if there is no other), and which of them does:
        ``time``, ``temp`` and ``overwrites`` are those of this one.
    module, source
        Where it comes from in the model: module path, and ``file:line``.
    """

    id: int
    name: str
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    target: str = ""
    flops: int = 0
    io_bytes: int = 0
    time: int = 0
    temp: int = 0
    overwrites: tuple[int, ...] = ()
    random: bool = False
    mutates: bool = False
    recomputable: bool = True
    module: str = ""
    source: str = ""
    variants: tuple[Variant, ...] = ()
    variant: int = 0

    @property
    def runs(self) -> Variant:
        """How it is run."""
        own = Variant("", 1, self.time, self.temp, self.overwrites)
        return self.variants[self.variant] if self.variants else own

    @property
    def parts_text(self) -> str:
        """How it is run by parts: ``by 8 rows``; empty if it is not."""
        how = self.runs
        return f"by {how.parts} {how.kernel.rpartition('_by_')[2]}" if how.kernel else ""

    @property
    def ways(self) -> tuple[Variant, ...]:
        """All ways to run it; its own kernel alone if there is no other."""
        return self.variants or (self.runs,)

    @property
    def runs_alone(self) -> Variant:
        """Its own kernel."""
        return self.variants[0] if self.variants else self.runs

    def run_as(self, variant: int) -> Op:
        """The op run in another of its ways."""
        if not self.variants or variant == self.variant:
            return self
        chosen = self.variants[variant]
        return replace(
            self, variant=variant, time=chosen.time, temp=chosen.temp, overwrites=chosen.overwrites
        )


@dataclass(frozen=True, slots=True)
class Delivery:
    """A gradient that leaves in the backward, as soon as nobody reads it or its parameter any more.

    Attributes
    ----------
    gradient, parameter
        Values: what leaves, and the graph input that it is the gradient of, which may change then.
    index
        Which of the step's inputs the parameter is, not counting sizes; those that leave together leave in
        this order.
    workspace
        Bytes that whoever takes it (a hook with an optimizer) allocates meanwhile.
    """

    gradient: int
    parameter: int
    index: int
    workspace: int = 0


@dataclass(frozen=True)
class JointGraph:
    """Ops in topological order (forward first among equals) and the values that join them.

    ``ops[i].id == i`` and ``values[i].id == i``.

    Attributes
    ----------
    held_outputs
        Values of step outputs that live to the end of the step (their first version does).
    released_outputs
        Values of step outputs that the caller drops once the forward has returned: their first
        version lives to the end of the forward, and beyond only if the backward reads it.
    gradients
        Values that the backward returns (parameter gradients and the like): their last version
        lives to the end of the step.
    deliveries
        Gradients that leave earlier, by rising index; they are not among ``gradients``.
    rng_state_bytes
        Bytes of one saved generator state (for each random op that runs more than once).
    fingerprint
        Names what was traced: ops, edges, phases, layouts. Equal whatever has been measured since.
    untried
        The ops whose workspace is unknown and not counted, each with its line and why.
    checkpointed
        The ops that the model's own checkpointing (``torch.utils.checkpoint``) would run again.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    held_outputs: frozenset[int] = frozenset()
    released_outputs: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    deliveries: tuple[Delivery, ...] = ()
    rng_state_bytes: int = 0
    fingerprint: str = ""
    untried: tuple[str, ...] = ()
    checkpointed: frozenset[int] = frozenset()

    @cached_property
    def op_times(self) -> tuple[int, ...]:
        """Nanoseconds of each op."""
        return tuple(op.time for op in self.ops)

    @cached_property
    def op_flops(self) -> tuple[int, ...]:
        """Flops of each op."""
        return tuple(op.flops for op in self.ops)

    def producer(self, value: int) -> Op | None:
        """The op that writes ``value``; None for graph inputs and tangents."""
        op = self.values[value].producer
        return None if op is None else self.ops[op]

    @property
    def leaving(self) -> frozenset[int]:
        """The gradients that leave early."""
        return frozenset(each.gradient for each in self.deliveries)

    def phase_ops(self, phase: Phase) -> tuple[int, ...]:
        """Ids of the ops of one phase, in topological order."""
        return tuple(op.id for op in self.ops if op.phase is phase)

    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For every value, the ids of the ops that read it, in topological order."""
        lists: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for value in op.reads:
                lists[value].append(op.id)
        return tuple(map(tuple, lists))


def as_plain(graph: JointGraph) -> JointGraph:
    """The graph as PyTorch runs it: every op in its plain form, and all gradients held to the end."""
    return replace(
        graph,
        ops=tuple(map(_alone, graph.ops)),
        gradients=graph.gradients | graph.leaving,
        deliveries=(),
    )


def _alone(op: Op) -> Op:
    """The op run by its own kernel, over nothing."""
    own = op.run_as(0)
    return replace(own, overwrites=()) if own.overwrites else own


def ops_by_parts(graph: JointGraph, ops: Collection[int] | None = None) -> JointGraph:
    """The graph with some ops run by parts (by default all that can), the others by their own kernels."""
    chosen = [int(ops is None or op.id in ops) for op in graph.ops]
    return replace(
        graph, ops=tuple(op.run_as(variant) for op, variant in zip(graph.ops, chosen, strict=True))
    )


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """A version of a value that waits in host memory, between its readers in the forward and the backward.

    Places are those of executions in the schedule. The copy out starts right after ``birth``; the device's
    own copy is gone before ``free``, and a new one is there before ``fetch``, into which it comes back.

    Attributes
    ----------
    value
        What moves.
    birth
        The execution that makes this version.
    free
        After its last reader in the forward; ``num_forward`` if it is gone before the backward.
    fetch
        In the backward.
    ready
        Its first reader in the backward.
    """

    value: int
    birth: int
    free: int
    fetch: int
    ready: int


PAGE: Final = 4096
"""Bytes that each place in host memory is a multiple of."""


def host_bytes(sizes: Iterable[int]) -> int:
    """Bytes of host memory that values of so many bytes take: whole pages of its own for each."""
    return sum(-(-size // PAGE) * PAGE for size in sizes)


@dataclass(frozen=True)
class Schedule:
    """The flat list of op executions of one step, recomputations included.

    ``steps[:num_forward]`` run in the forward graph, the rest in the backward graph. ``moves``: what waits in
    host memory meanwhile.
    """

    steps: tuple[int, ...]
    num_forward: int
    moves: tuple[Move, ...] = ()


def plain_schedule(graph: JointGraph) -> Schedule:
    """Every op once: the forward ops, then the optional and backward ops as captured."""
    forward = graph.phase_ops(Phase.FORWARD)
    rest = tuple(op.id for op in graph.ops if op.phase is not Phase.FORWARD)
    return Schedule(forward + rest, len(forward))


def short_op(op: str) -> str:
    """``layer_norm`` for ``aten.native_layer_norm.default``."""
    parts = op.split(".")
    name = (parts[1] if len(parts) > 1 else op).lstrip("_").removeprefix("native_")
    return name.removeprefix("scaled_dot_product_").removesuffix("_for_cpu").removesuffix("_legit_functional")
