"""The public plan: its data, and methods to print, save, show and explain it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridremat.errors import InputError
from hybridremat.plans.plan_data import OtherSizes, PlanData
from hybridremat.plans.sizes import combinations

if TYPE_CHECKING:
    from hybridremat.reports.explanation import BlockExplanation, ModuleExplanation
    from hybridremat.reports.size_curve import SizeCurve


@dataclass(frozen=True)
class Plan(PlanData):
    """A plan for one model, input and limit. ``print(plan)`` shows it.

    Attributes
    ----------
    memory_limit
        Bytes of step memory that the plan promises to stay under; None if only an overhead was asked.
    asked_limit
        Bytes that were asked for: more than nothing fits, and ``memory_limit`` is what the least plan needs,
        if ``on_infeasible="least"``; else the same as ``memory_limit``.
    predicted_peak
        Exact step memory of the emitted graphs in bytes, without the caller's own code; of the generated code
        if they are compiled.
    needed
        Bytes that the step takes at most with the caller's code and further forwards
        (:mod:`hybridremat.sequence.outside_memory`); the same as ``predicted_peak`` without.
    plain_peak, least_peak
        Bytes: the plain step's, and the least ``memory_limit`` that is feasible with ``reserve`` and
        ``forwards``, as far as composing blocks tells; under a lower one a search may find up to 1 % less.
    overhead, extra_flops
        Fractions of the plain step's time (by the cost model) and flops.
    saved_bytes
        Bytes alive between forward and backward.
    host_bytes
        Bytes of host memory or of a file that its moves take (``offload=``).
    blocks
        Decisions, block by block.
    parts
        For a step of several graphs, the plan of each distinct one, or of each way in which it runs;
        ``schedule`` is then empty.
    places
        The numbers of the parts in the order of the forward; none in plan files of schema 6 and earlier.
    breaks
        The graph breaks between them, in the order of the forward.
    composition
        For a step of several graphs, what its memory is added up from; None in plan files that were written
        before it was kept.
    pins
        What each pattern of ``policy=`` pins.
    timings
        Seconds that planning took, by stage; ``"compile"`` is what Inductor took to build its code.
    cost_model
        The source of times.
    reused_options
        Whether some blocks' options were those of another input shape, counted anew for this one: quick to
        make, exact in memory, and perhaps a little slower than a plan of its own.
    fingerprint
        Identifies the joint graph: ops, edges, shapes, dtypes, strides.
    schedule
        Every op execution, recomputations included.
    origin, request
        What the plan was made for and where, and what was asked.
    details
        What it was chosen from; None for a step of several graphs (each of ``parts`` has its own) and for a
        graph without a backward.
    lean
        Whether Inductor keeps the order of the schedule and frees every buffer at once: it then fuses less,
        and takes less memory.
    plain_code
        Whether it is the plain step, and Inductor lays out what is saved as it likes.
    composed_overhead
        The overhead that the blocks' options alone would have, if exchanges across blocks made the plan
        faster than that; then a block's option is what they began with.
    strategy_gap
        The most that another schedule of the strategy could save of this one's time, as a fraction, where it
        proves that. ``"checkmate"`` does, among schedules that keep the limit by its own count of memory, in
        which nothing is written in place; 0.0: none is faster.
    certificate
        How near the plan is to the best there is, if it was certified or had a budget; ``lower_bound`` and
        ``optimality_gap`` are its figures.
    tuning
        What was tried in real steps, and how long these took, if the schedule was chosen so
        (:func:`hybridremat.tune`).
    coverage
        Of a plan that was read from a file: the other sizes that it is for, and its schedules there
        (:class:`~hybridremat.plans.coverage.Coverage`).
    others
        The capture that the plan is of, if that is planned at many sizes (:meth:`at`, :meth:`curve`); not in
        plan files and copies.
    untried
        The ops whose workspace is unknown and not counted in any peak, each with its line and why: those that
        ``untried="allow"`` let pass, and ops with effects.
    """

    parts: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        from hybridremat.reports.text import plan_tables, rendered

        return rendered(plan_tables(self))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types, with the version of the schema (:mod:`hybridremat.plans.codec`)."""
        from hybridremat.plans.codec import plan_to_dict

        return plan_to_dict(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears complete or not at all.

        Raises
        ------
        OutputError
            If it cannot be written.
        """
        from hybridremat.plans.codec import write_plan

        write_plan(self, path)

    def to_html(self, path: str | Path) -> None:
        """Write a report to read in a browser: one HTML file that needs nothing else, and no network.

        Raises
        ------
        OutputError
            If it cannot be written.
        """
        from hybridremat.reports.html_page import write_html

        write_html(self, path)

    def plot(self, path: str | Path) -> None:
        """Draw the memory of the plain and of the planned step over time, as ``.png``, ``.svg`` or ``.pdf``.

        Raises
        ------
        PlotError
            If the file has another suffix, the step is several graphs that are compiled, or has no backward.
        MissingPackageError
            If matplotlib is not installed.
        OutputError
            If it cannot be written.
        """
        from hybridremat.reports.memory_plot import plot_memory

        plot_memory(self, path)

    def to_memory_viz(self, path: str | Path) -> None:
        """Write the step as a snapshot of PyTorch's allocator, for its memory viewer.

        A pickle as of ``torch.cuda.memory._dump_snapshot``, which https://pytorch.org/memory_viz opens:
        each allocation with its bytes, and its op, module and line of source.

        Raises
        ------
        PlotError
            If the step is several graphs that are compiled, or has no backward.
        OutputError
            If it cannot be written.
        """
        from hybridremat.reports.memory_viz import write_memory_viz

        write_memory_viz(self, path)

    def to_trace(self, path: str | Path) -> None:
        """Write the step as a trace for Perfetto or ``chrome://tracing``: ops, and memory as counters.

        Times are those of the plan's cost model.

        Raises
        ------
        PlotError
            If the step is several graphs that are compiled, or has no backward.
        OutputError
            If it cannot be written.
        """
        from hybridremat.reports.trace_file import write_trace

        write_trace(self, path)

    def certified(self, *, progress: bool = True) -> Plan:
        """The same plan with a proof of how good it is; it takes some seconds, and nothing is planned again.

        ``lower_bound`` is then the time in nanoseconds that no schedule of this graph beats under the plan's
        limit, by its cost model, and ``optimality_gap`` the share of the step's time that a better one could
        save at most. For several graphs that is any choice of their schedules, in any number of ways.

        Raises
        ------
        LimitError
            If the step is compiled or has no backward, or its file does not say how its graphs are joined.
        """
        from hybridremat.planning.progress import planning_progress
        from hybridremat.plans.certify import certificate_of

        with planning_progress(show=progress) as report:
            report("certifying", 0, 1)
            return replace(self, certificate=certificate_of(self))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the inputs that may differ without another capture, by name; empty for one shape."""
        known = self.others or self.coverage
        return {} if known is None else dict(known.own)

    def at(self, **sizes: int) -> Plan:
        """The plan of the same step at other sizes (``batch=…, length=…``), from the same capture.

        Nothing has to be of these sizes, and nothing runs; sizes that are not given are those of this plan.
        It becomes a plan of the model that this one is of, so that its first step there is planned already.

        Raises
        ------
        InputError
            If the plan is of one shape alone, a name is not among :attr:`sizes`, or these sizes need a
            capture of their own.
        InfeasibleLimitError
            If nothing fits there.
        """
        made = self._capture().plan(sizes)
        assert isinstance(made, Plan)
        return made

    def curve(self, **sizes: Iterable[int]) -> SizeCurve:
        """What the step needs at many sizes: ``curve(length=range(64, 513, 64))``, all pairs of several.

        Raises
        ------
        InputError
            As :meth:`at`; sizes at which nothing fits are in the curve.
        """
        from hybridremat.reports.size_curve import SizeCurve

        return SizeCurve(tuple(self._capture().rows(combinations(sizes))))

    def _capture(self) -> OtherSizes:
        if self.others is None and self.coverage is not None:
            raise InputError(
                "this plan comes from a file, and there is no capture to plan other sizes from: pass it to "
                "wrap(model, kwargs=…, plan=plan) with such inputs. plan.coverage.rows has what is known"
            )
        if self.others is None:
            raise InputError(
                "this plan is of one shape: pass dynamic=True to plan or wrap, and one capture is planned at "
                "all sizes"
            )
        return self.others

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises
        ------
        PlanFormatError
            If the file is no plan, is damaged, or its schema version is not read.
        OSError
            If it cannot be read.
        """
        from hybridremat.plans.codec import read_plan

        return read_plan(path, Plan)

    def inspect(self, block: int) -> BlockExplanation:
        """Everything about one block: its values and what becomes of them, what binds there, its options.

        Raises
        ------
        InputError
            If there is no such block.
        """
        from hybridremat.reports.explain import explain_block

        return explain_block(self, block)

    def explain(self, module: str) -> ModuleExplanation:
        """What becomes of every value that a module makes, given by its path (``"transformer.h.3.mlp"``).

        Raises
        ------
        InputError
            If no value of the plan is made there.
        """
        from hybridremat.reports.explain import explain_module

        return explain_module(self, module)
