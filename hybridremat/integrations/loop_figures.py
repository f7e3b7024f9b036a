"""Measured steps of a training loop beside their plan: the warning if they differ, and figures to log."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.planning.plan import Plan
from hybridremat.units import format_bytes

PREFIX = "hybridremat/"  # of logged names
MIB = 1 << 20


@dataclass(frozen=True)
class StepFigures:
    """One measured step beside its plan.

    Attributes
    ----------
    plan
        The plan that the step ran.
    measured
        Peak in bytes, from the start of the model's forward to the end of the backward.
    upper_bound
        Whether the prediction is a bound that a step may stay below.
    """

    plan: Plan
    measured: int
    upper_bound: bool = False

    def deviation(self) -> float:
        """Measured peak over predicted peak, less 1; 0.0 where they agree.

        Any peak between the prediction without and with ``reserve`` and ``forwards`` agrees.
        """
        if self.measured > self.plan.needed:
            return self.measured / self.plan.needed - 1
        if self.measured < self.plan.predicted_peak and not self.upper_bound:
            return self.measured / self.plan.predicted_peak - 1
        return 0.0

    def warning(self, model: str) -> str:
        """The text of the warning if the deviation is too large."""
        share, plan = self.deviation(), self.plan
        start = (
            f"a training step of {model} took {format_bytes(self.measured)}, {abs(share):.1%} "
            f"{'more' if share > 0 else 'less'} than the {format_bytes(self.expected)} that its plan predicts"
        )
        if share < 0:
            return (
                f"{start}. Nothing is wrong with the numbers; memory is left over. Kernels that need less on "
                "real numbers than on made-up ones do this, and outputs that are counted as held but dropped."
            )
        if plan.memory_limit is not None:
            passed = self.measured > plan.memory_limit
            start += f" ({'beyond' if passed else 'within'} the limit of {format_bytes(plan.memory_limit)})"
        room = plan.reserve + self.measured - plan.needed
        return (
            f"{start}. The step allocates what the plan does not know of. Likely causes: a loss outside of "
            f"the model (keep room for it with reserve={room} or a little more, or compute it inside); "
            "outputs that are held through the backward (drop them, or hold_outputs=True); a second forward "
            "before the backward (forwards=2); DistributedDataParallel with find_unused_parameters=True, "
            "which copies the outputs (the Trainer's ddp_find_unused_parameters=False turns it off); hooks "
            "or metrics that allocate between forward and backward; gradients that are copied while they are "
            "accumulated."
        )

    @property
    def expected(self) -> int:
        """The prediction in bytes that the measurement is compared with."""
        return self.plan.needed if self.measured > self.plan.needed else self.plan.predicted_peak


class StepLog:
    """Figures since the last entry: of several measurements the one with the largest peak.

    Attributes
    ----------
    due
        Whether there is something that deserves an entry of its own.
    waiting
        Whether there is something that has not been logged.
    largest
        The measurement with the largest peak of all.
    overhead
        The measured overhead as a fraction, once there is one.
    planning_seconds
        What planning took for all plans that ran.
    """

    def __init__(self) -> None:
        self.due = self.waiting = False
        self._plan: Plan | None = None
        self._figures: StepFigures | None = None
        self.largest: StepFigures | None = None
        self.overhead: float | None = None
        self.planning_seconds = 0.0
        self._plans: dict[str, Plan] = {}  # the last one for each graph

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that ran, one for each graph, in the order of their first step.

        Of those that share a capture, the one with the largest peak is whole; of the others the figures stay.
        """
        return tuple(self._plans.values())

    def ran(self, plan: Plan) -> None:
        """A step has run under a plan."""
        if self._plan is None:
            self.due = self.waiting = True
        self._plan = plan
        known = self._plans.get(plan.fingerprint)
        if known is None or known.timings != plan.timings:
            self._keep(plan)
            self.waiting = True
            self.planning_seconds += plan.planning_seconds

    def _keep(self, plan: Plan) -> None:
        """Keep a plan: a run may meet hundreds of sizes, whose plans are of many megabytes each."""
        shared = [each for each in self._plans.values() if each.others is not None]
        before = max(shared, key=lambda each: each.predicted_peak, default=None)
        if plan.others is not None and before is not None:
            if before.predicted_peak > plan.predicted_peak:
                plan = plan.figures()
            else:
                self._plans[before.fingerprint] = before.figures()
        self._plans[plan.fingerprint] = plan

    def measured(self, figures: StepFigures, *, due: bool) -> None:
        """A step has been measured."""
        if self._figures is None or figures.measured > self._figures.measured:
            self._figures = figures
        if self.largest is None or figures.measured > self.largest.measured:
            self.largest = figures
        self.waiting = True
        self.due = self.due or due

    def timed(self, overhead: float, *, due: bool) -> None:
        """The measured overhead as a fraction has changed."""
        self.overhead, self.waiting = overhead, True
        self.due = self.due or due

    def entry(self) -> dict[str, float]:
        """Keys and figures to be logged: bytes and MiB, overheads as fractions, seconds, counts.

        Empty before there is a plan.
        """
        figures, self._figures = self._figures, None
        self.due = self.waiting = False
        plan = figures.plan if figures is not None else self._plan
        if plan is None:
            return {}
        sizes = {"predicted_peak": plan.predicted_peak, "plain_peak": plan.plain_peak}
        if plan.memory_limit is not None:
            sizes["limit"] = plan.memory_limit
        if figures is not None:
            sizes["measured_peak"] = figures.measured
        entry: dict[str, float] = {f"{PREFIX}{name}_bytes": size for name, size in sizes.items()}
        entry |= {f"{PREFIX}{name}_mib": size / MIB for name, size in sizes.items()}
        entry[f"{PREFIX}predicted_overhead"] = plan.overhead
        if self.overhead is not None:
            entry[f"{PREFIX}measured_overhead"] = self.overhead
        entry[f"{PREFIX}plans"] = len(self._plans)
        entry[f"{PREFIX}planning_seconds"] = self.planning_seconds
        return entry
