"""What a schedule costs once Inductor has lowered it: the memory of the code that it generates.

Counting leaves fused values out, which is close: Inductor also writes results over inputs that die. A
lowering takes a second or so, so each is done once, and searches go by the count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.compiler.lowered_memory import LoweredStep
from hybridremat.graph.joint import Schedule, as_plain, plain_schedule
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.context import PlanContext
from hybridremat.planning.progress import Stopwatch, Timings
from hybridremat.planning.settings import Settings
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import PhasePeaks
from hybridremat.sequence.pool import Code, SchedulePoint
from hybridremat.sequence.sinking import sink_recomputations
from hybridremat.version import __version__

if TYPE_CHECKING:
    from hybridremat.compiler.inductor import Inductor


class Lower(Protocol):
    """Lowers a schedule (``Inductor.lowered``)."""

    def __call__(self, step: TracedStep, schedule: Schedule, *, lean: bool = False) -> LoweredStep:
        """Its code."""
        ...


@dataclass(frozen=True)
class LoweredJudge:
    """Judges schedules of one graph by their code.

    Attributes
    ----------
    step
        The step, its ops with the workspaces of the code.
    counting
        The judge of its graph.
    lower
        Lowers a schedule.
    plain_memory
        That of the plain step's code.
    at_end
        The same if all gradients are handed out at the end, where some leave earlier.
    """

    step: TracedStep
    counting: Judge
    lower: Lower
    plain_memory: EmittedMemory
    at_end: EmittedMemory | None = None
    _known: dict[tuple[Schedule, bool], EmittedMemory] = field(default_factory=dict, repr=False)

    def __call__(self, point: SchedulePoint, *, lean: bool) -> SchedulePoint:
        """A counted point as its code runs it: recomputations sink to where their results are read."""
        schedule = sink_recomputations(self.step.graph, point.schedule, self.step.fused_ops)
        return self.as_it_is(replace(point, schedule=schedule), "lean" if lean else "own")

    def as_it_is(self, point: SchedulePoint, code: Code) -> SchedulePoint:
        """A point with the bytes of its code, its schedule unchanged."""
        if code == "plain":
            return self.plain
        key = point.schedule, code == "lean"
        if key not in self._known:
            self._known[key] = self.lower(self.step, point.schedule, lean=key[1]).memory
        return self._point(point, self._known[key], code)

    @cached_property
    def plain(self) -> SchedulePoint:
        """The plain step; the fastest point may run it in another order, whose code takes more."""
        counted = Judge(as_plain(self.step.graph))(plain_schedule(self.step.graph))
        return self._point(replace(counted, chain=0), self.plain_memory, "plain")

    @cached_property
    def unplanned(self) -> SchedulePoint:
        """The plain step that others are compared with: all gradients are there at its end."""
        return self._point(self.plain, self.at_end or self.plain_memory, "plain")

    def _point(self, point: SchedulePoint, memory: EmittedMemory, code: Code) -> SchedulePoint:
        phases = phases_of(memory)
        return replace(point, phases=phases, needs=self.counting.needs_of(phases), code=code)


def phases_of(memory: EmittedMemory) -> PhasePeaks:
    """The figures of emitted graphs, or of code."""
    return PhasePeaks(memory.forward_peak, memory.backward_peak, memory.saved)


@dataclass(frozen=True)
class Lowering:
    """A step as Inductor compiles it: its ops with the workspaces of its code, what lowers it, its memory.

    ``timings``: seconds by stage so far; ``at_end``: memory of the plain step with its gradients at the end.
    """

    step: TracedStep
    timings: Timings
    lower: Lower
    plain_memory: EmittedMemory
    at_end: EmittedMemory

    @staticmethod
    def of_plain_step(step: TracedStep, timings: Timings, context: PlanContext) -> Lowering:
        """Lower the plain step."""
        inductor, timed = inductor_for(context.settings), Stopwatch(timings)
        with timed("lowering"):
            context.progress("lowering", 0, 1)
            code = inductor.lowered(step, plain_schedule(step.graph), plain=True)
            plain = plain_code(step, inductor.lowered) if step.graph.deliveries else code.memory
        return Lowering(code.laid_out(step), timed.timings, inductor.lowered, code.memory, plain)

    def judge(self, counting: Judge) -> LoweredJudge:
        """The judge of the step's code beside the one that counts."""
        return LoweredJudge(self.step, counting, self.lower, self.plain_memory, self.at_end)


def plain_code(step: TracedStep, lower: Lower) -> EmittedMemory:
    """The memory of the code of the plain step, which hands out all gradients at its end."""
    graph = as_plain(step.graph)
    return lower(replace(step, graph=graph), plain_schedule(graph)).memory


def inductor_for(settings: Settings) -> Inductor:
    """Inductor, which these settings ask for."""
    from hybridremat.compiler.inductor import Inductor  # takes a second

    chunked = settings.rewrites == "chunked"
    return Inductor(f"hybridremat {__version__} {settings.request()}", whole_losses=chunked)
