"""The public :class:`Frontier`: choose, plan, measure and plot its points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hybridremat.analysis.frontier_certify import certify_points
from hybridremat.analysis.frontier_data import FrontierData
from hybridremat.analysis.frontier_measure import measure_points
from hybridremat.analysis.frontier_plot import plot_frontier
from hybridremat.analysis.frontier_rows import (
    SHOWN,
    evenly_spaced,
    frontier_csv,
    frontier_dict,
    frontier_text,
)
from hybridremat.analysis.measure import LossFunction
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.errors import InputError, LimitError
from hybridremat.files import write_atomic
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import choose_from
from hybridremat.planning.progress import planning_progress
from hybridremat.planning.settings import Settings
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.origin import Origin
from hybridremat.plans.records import FrontierPoint
from hybridremat.units import parse_overhead, resolve_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hybridremat.planning.breaks.frontier import AnyFrontier
    from hybridremat.planning.sized_frontier import SizedFrontier


@dataclass(frozen=True)
class Frontier(FrontierData):
    """Pareto points by rising peak; each is the exact figure of a schedule.

    Of a step that is to be compiled they are those whose code was lowered, a handful; :meth:`at` and
    :meth:`plan` lower more where that pays.

    Attributes
    ----------
    points
        Peaks in bytes, overheads and extra flops as fractions of the plain step's.
    plain_peak
        Step memory of the plain step in bytes.
    checkpointed
        For comparison: each layer keeps only its input, as with ``torch.utils.checkpoint`` around it. None
        without modules that repeat, where the frontier has the same point, and for compiled steps.
    measurements
        Results of :meth:`measured`.
    bounds, least_bound
        Results of :meth:`certified`: at the points that are printed, the overhead that no schedule of so many
        bytes goes below; and the bytes that none goes below. None and empty without.
    origin
        The model and input that it belongs to.
    cost_model
        The source of times.
    """

    _step_frontier: AnyFrontier = field(repr=False, compare=False, kw_only=True)
    _settings: Settings = field(repr=False, compare=False, kw_only=True)
    _show: bool = field(repr=False, compare=False, kw_only=True)
    _sized: SizedFrontier | None = field(default=None, repr=False, compare=False, kw_only=True)

    def at(
        self, *, memory_limit: int | str | None = None, max_overhead: float | str | None = None
    ) -> FrontierPoint:
        """The fastest point under a limit, or the smallest within an overhead.

        Raises
        ------
        InfeasibleLimitError
            If no point satisfies what was asked.
        LimitError
            If it cannot be read.
        """
        limit = None if memory_limit is None else resolve_limit(memory_limit, self.plain_peak)
        overhead = None if max_overhead is None else parse_overhead(max_overhead)
        with self._shown() as frontier:
            return frontier.figures_at(limit, overhead)

    def plan(self, *, memory_limit: int | str | None = None, max_overhead: float | str | None = None) -> Plan:
        """The plan of the point that :meth:`at` chooses; no block is solved again.

        Raises
        ------
        InfeasibleLimitError
            If no point satisfies what was asked.
        LimitError
            If it cannot be read, or neither is given.

        Examples
        --------
        >>> found = hybridremat.frontier(model, kwargs=batch)
        >>> plan = found.plan(max_overhead=0.05)
        >>> model = hybridremat.wrap(model, kwargs=batch, plan=plan)
        """
        settings = replace(self._settings, memory_limit=memory_limit, max_overhead=max_overhead)
        settings = settings.validated(need_limit=True)
        with self._shown() as frontier:
            plan = choose_from(frontier, settings, self.origin)
        if self._sized is None or not isinstance(frontier, GraphFrontier):
            return plan
        return self._sized.knowing(plan, frontier, settings)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the inputs that may differ without another capture, by name; empty for one shape."""
        return {} if self._sized is None else dict(self._sized.own)

    def at_sizes(self, **sizes: int) -> Frontier:
        """The frontier at other sizes (``batch=…, length=…``), searched there, from the same capture.

        Sizes that are not given are those of this one.

        Raises
        ------
        InputError
            If it is of one shape alone, a name is not among :attr:`sizes`, or these sizes need a capture of
            their own.
        """
        if self._sized is None:
            raise InputError(
                "this frontier is of one shape: pass dynamic=True to hybridremat.frontier, and one capture "
                "has those of all sizes"
            )
        with planning_progress(show=self._show) as progress:
            frontier, origin, sized = self._sized.at(sizes, progress)
        return frontier_of(frontier, self._settings, origin, sized, show=self._show)

    @contextmanager
    def _shown(self) -> Iterator[AnyFrontier]:
        """The step's frontier, with a progress bar where points may be looked for, or lowered."""
        with planning_progress(show=self._show) as progress:
            yield self._step_frontier.shown_by(progress)

    def certified(self, *, progress: bool = True) -> Frontier:
        """The same frontier with bounds, a second or a few for each of the points that are printed.

        Raises
        ------
        LimitError
            If the step is compiled or has no backward.
        """
        bounds, least = certify_points(self._step_frontier, show=progress)
        return replace(self, bounds=bounds, least_bound=least)

    def measured(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        count: int = 5,
        loss_fn: LossFunction | None = None,
        progress: bool = True,
    ) -> Frontier:
        """The same frontier with measurements: of the plain step, and of ``count`` points spread over it.

        Each point's plan runs in a copy of the model; nothing is solved again, and the model stays as it is.

        Parameters
        ----------
        model, args, kwargs
            What the frontier was made for.
        count
            Points to be measured, the least and the fastest among them.
        loss_fn
            From the model's output to the loss, as in :func:`hybridremat.measure`.
        progress
            Whether to show a progress bar on a terminal.

        Raises
        ------
        PlanMismatchError
            If the frontier was made for another model or input.
        LimitError
            If ``count`` is below 1, or the frontier is for another device (``device_spec``).
        InputError
            If the output holds no loss and no ``loss_fn`` is given.
        ModelError
            If the model cannot be copied.
        """
        if (spec := self._settings.spec) is not None:
            raise LimitError(f"this frontier is for {spec.name}; steps that run here do not compare with it")
        found = measure_points(
            self,
            lambda point: self.plan(memory_limit=point.peak),
            SampleStep(model, args, {} if kwargs is None else kwargs),
            count=count,
            loss_fn=loss_fn,
            compiler=self._settings.compiler,
            show=progress,
        )
        return replace(self, measurements=found)

    def plot(
        self,
        path: str | Path | None = None,
        *,
        memory_limit: int | str | None = None,
        max_overhead: float | str | None = None,
        ax: Axes | None = None,
    ) -> Figure:
        """Draw the frontier, with the point that a limit or an overhead chooses.

        Parameters
        ----------
        path
            Where to write the picture: ``.png``, ``.svg`` or ``.pdf``. It appears complete or not at all.
        memory_limit, max_overhead
            As in :meth:`at`.
        ax
            Axes to draw on; None: those of a new figure.

        Raises
        ------
        PlotError
            If the suffix is another.
        MissingPackageError
            If matplotlib is not installed.
        InfeasibleLimitError, LimitError
            As :meth:`at`.
        OSError
            If the file cannot be written.
        """
        chosen = None
        if memory_limit is not None or max_overhead is not None:
            chosen = self.at(memory_limit=memory_limit, max_overhead=max_overhead)
        limit = None if memory_limit is None else resolve_limit(memory_limit, self.plain_peak)
        return plot_frontier(self, path, chosen=chosen, limit=limit, ax=ax)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types; ``pandas.DataFrame(found.to_dict()["points"])`` is a table."""
        return frontier_dict(self)

    def to_csv(self, path: str | Path) -> None:
        """Write the points as a table; the file appears complete or not at all.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        write_atomic(Path(path), frontier_csv(self))

    def __str__(self) -> str:
        return frontier_text(self)


def frontier_of(
    frontier: AnyFrontier, settings: Settings, origin: Origin, sized: SizedFrontier | None, *, show: bool
) -> Frontier:
    """The frontier of a planning run, with exchanges at the points that are printed.

    ``sized``: the capture that it is of, if that is for all sizes.
    """
    if isinstance(frontier, StepFrontier) and frontier.searches:
        with planning_progress(show=show) as report:
            shown = evenly_spaced(frontier.points(), SHOWN)
            numbers = [n for n, point in enumerate(frontier.points()) if point in shown]
            total = len(numbers)
            frontier = frontier.improved_at(numbers, lambda done: report("exchanging", done, total))
    return Frontier(
        points=frontier.points(),
        plain_peak=frontier.plain_peak,
        checkpointed=frontier.checkpointed(),
        origin=origin,
        cost_model=settings.costs().name,
        _step_frontier=frontier,
        _settings=settings,
        _sized=sized,
        _show=show,
    )
