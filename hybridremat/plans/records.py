"""The parts of a plan as plain data: decisions, and what they were chosen from."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.blocks.types import OptionSet
from hybridremat.graph.joint import JointGraph
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.sequence.decisions import Decision
from hybridremat.sequence.offload.link import Link
from hybridremat.units import format_bytes


@dataclass(frozen=True)
class SearchEffort:
    """What bounded the search for a plan: seconds of a nominal core, as powers of two.

    Attributes
    ----------
    capture, step
        About what the capture took, and the plain step by the cost model.
    curtailed
        Whether blocks were left with fewer options than a whole search finds.
    """

    capture: float
    step: float
    curtailed: bool


@dataclass(frozen=True)
class PinRecord:
    """One pattern of a policy: the values that it pins, and their bytes."""

    pattern: str
    action: str
    values: int
    bytes: int


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of the frontier: ``peak`` in bytes, ``overhead`` and ``extra_flops`` as fractions."""

    peak: int
    overhead: float
    extra_flops: float


@dataclass(frozen=True)
class Certificate:
    """How good a plan is, proven: see :mod:`hybridremat.sequence.bounds`.

    Attributes
    ----------
    limit
        Bytes under which no schedule is faster than ``lower_bound``.
    time, lower_bound
        Nanoseconds of the plan's step by its cost model, and those that no schedule beats.
    least_bound
        Bytes of step memory that no schedule goes below.
    """

    limit: int
    time: int
    lower_bound: int
    least_bound: int

    @property
    def gap(self) -> float:
        """How much of the plan's time a better schedule could save at most, as a fraction."""
        return 1.0 - self.lower_bound / self.time if self.time else 0.0


@dataclass(frozen=True)
class TriedSchedule:
    """A schedule that real steps ran to compare it.

    Attributes
    ----------
    overhead
        By the cost model, as a fraction of the plain step's time.
    peak
        Bytes of step memory.
    turns
        How many steps were measured, on each rank.
    seconds, noise
        The shortest of its steps, of the slowest rank, and how much longer the next one took.
    """

    overhead: float
    peak: int
    turns: int
    seconds: float
    noise: float


@dataclass(frozen=True)
class TuningRecord:
    """What :func:`hybridremat.tune` has found.

    Attributes
    ----------
    steps
        The real steps that it was given.
    tried
        The schedules that took turns: first the one that was planned, then the others, the fastest by the
        cost model first.
    winner
        The number among these of the one that stays.
    """

    steps: int
    tried: tuple[TriedSchedule, ...]
    winner: int

    @property
    def gain(self) -> float:
        """The share of the planned schedule's time that the one that stays saves."""
        planned = self.tried[0].seconds
        return 1.0 - self.tried[self.winner].seconds / planned if planned else 0.0

    def __str__(self) -> str:
        if len(self.tried) == 1:
            return "no other schedule near the plan keeps its limit: it stays"
        turns = f"{len(self.tried)} schedules took turns in {self.steps} steps"
        if self.winner == 0:
            return f"{turns}; the planned one stays: none was faster by more than the noise"
        return f"{turns}; the planned one gave way to one that took {self.gain:.1%} less time"


@dataclass(frozen=True)
class PlanDetails:
    """What a plan was chosen from: enough to explain it without the model.

    Attributes
    ----------
    chain
        The blocks, and the joint graph with its costs.
    option_sets
        The distinct sets of options.
    option_set_of
        For each block, which of them it has.
    decisions
        What the chain program chose; empty for the plain step.
    frontier
        The points that were looked at and could have been chosen, by rising peak: all near the limit, and
        few elsewhere where one plan alone was asked for.
    checkpointed
        For comparison: the figures if each of the layers that repeat saves only its input. None without
        such, or where the frontier has the same point.
    link
        How fast values move to host memory and back; None where they may not.
    """

    chain: Chain
    option_sets: tuple[OptionSet, ...] = ()
    option_set_of: tuple[int, ...] = ()
    decisions: tuple[Decision, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    checkpointed: FrontierPoint | None = None
    link: Link | None = None

    @property
    def graph(self) -> JointGraph:
        """The joint graph with its costs."""
        return self.chain.graph

    @property
    def block_options(self) -> tuple[OptionSet, ...]:
        """The option set of each block."""
        return tuple(self.option_sets[number] for number in self.option_set_of)


@dataclass(frozen=True)
class ValueRecord:
    """A value of the model, and the op that makes it.

    Attributes
    ----------
    name, shape, dtype
        As captured.
    bytes
        Of its storage.
    op, module, source
        Target of its op, path of the module that calls it, and ``file:line`` of the model's code.
    time
        Nanoseconds of its op; 0 for its further outputs, so that sums count an op once.
    id
        Of the value in the joint graph.
    """

    name: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str
    source: str = ""
    time: int = 0
    id: int = -1

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "scalar"
        where = self.module or "(no module)"
        return f"{self.name}: {format_bytes(self.bytes)}, {shape} {self.dtype}, {self.op} in {where}"


@dataclass(frozen=True)
class PlannedBlock:
    """What the plan does with one block.

    Attributes
    ----------
    index
        Its place in the chain.
    modules
        Paths of the modules that its forward ops come from, in order.
    forward_ops, backward_ops
        How many kernels it has in each phase.
    option, option_count, solo
        Index of the option that its backward uses, and how many there are; ``solo``: nothing of the block is
        saved and its output is not recomputed.
    forward_runs
        How often its whole forward runs (1: no re-run).
    saved
        Values alive between its forward and its backward.
    recomputed
        Values made more than once, with the number of extra times; further outputs of an op only if read.
    freed
        The other values, neither saved nor recomputed.
    moved
        Values that wait in host memory between its forward and its backward.
    saved_bytes, forward_peak, backward_peak
        Bytes of the option, without what other blocks hold.
    forward_time, extra_time
        Nanoseconds of its forward, and of everything that runs more than once.
    """

    index: int
    modules: tuple[str, ...]
    forward_ops: int
    backward_ops: int
    option: int | None
    option_count: int
    solo: bool
    forward_runs: int
    saved: tuple[ValueRecord, ...]
    recomputed: tuple[tuple[ValueRecord, int], ...]
    saved_bytes: int
    forward_peak: int
    backward_peak: int
    forward_time: int
    extra_time: int
    freed: tuple[ValueRecord, ...] = ()
    moved: tuple[ValueRecord, ...] = ()

    def __str__(self) -> str:
        sizes = {"saved": self.saved_bytes, "fwd": self.forward_peak, "bwd": self.backward_peak}
        figures = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        again = {record for record, _ in self.recomputed}
        return "\n".join(
            [
                f"block {self.index}: {', '.join(self.modules) or '(no module)'}",
                f"{self.forward_ops} forward ops, {self.backward_ops} backward ops, {figures}",
                *(f"SAVE {record}" for record in self.saved if record not in again),
                *(f"MOVE {record}" for record in self.moved),
                *(f"RECOMPUTE {times}× {record}" for record, times in self.recomputed),
                *(f"FREE {record}" for record in self.freed),
            ]
        )


@dataclass(frozen=True)
class StepSection:
    """A graph of a step of several, or the code before, between or after them, as the step counts it.

    Attributes
    ----------
    part
        The number of its plan among ``Plan.parts``; None for code between graphs.
    unit
        The module that is planned there, if modules were named; else empty.
    forward_peak, backward_peak, saved
        Bytes of its phases, and of what it leaves for what comes after its forward; code between graphs may
        free what others have left (below 0).
    left
        Bytes that its backward leaves to the end of the step.
    dropped
        Of ``saved``, the bytes that are gone once the forward of the step has returned.
    retained
        Those that would be gone then, too, if its backward did not read them.
    passed
        The gradients of the graph that are gone after the next backward, as values of its joint graph.
    inputs
        The inputs of the graph, as its values, that nothing else holds in the backward: those that it reads
        then are in ``saved`` and ``backward_peak``.
    beside_forward, beside_backward
        Bytes that others hold in its phases, whatever is chosen: parameters that are gathered, for one.
    """

    part: int | None
    unit: str
    forward_peak: int
    backward_peak: int
    saved: int
    left: int
    dropped: int
    passed: frozenset[int] = frozenset()
    retained: int = 0
    beside_forward: int = 0
    beside_backward: int = 0
    inputs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepComposition:
    """What a step of several graphs is added up from; :mod:`hybridremat.sequence.joined_graphs` says how.

    Attributes
    ----------
    sections
        In the order of the forward.
    joined_bytes
        Needed in the backward to add up gradients of what several graphs use.
    largest_gradient
        Bytes of the largest gradient, which is added to an earlier one where several forwards wait.
    """

    sections: tuple[StepSection, ...]
    joined_bytes: int
    largest_gradient: int


@dataclass(frozen=True)
class GraphBreak:
    """Place and reason of a graph break, and the bytes that cross it, which are held to the end."""

    place: str
    reason: str
    crossing_bytes: int
