"""Choose a point for each graph of a step that comes in several, and figure the whole step."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybridremat.errors import InfeasibleLimitError, InfeasibleLimitWarning
from hybridremat.graph.joint import Schedule
from hybridremat.graph.memory import Replay
from hybridremat.limits import format_bytes
from hybridremat.planner import Candidate, Planning
from hybridremat.plans import Plan
from hybridremat.sequence.parts import Part, PartedStep, PartPoint, choose_points
from hybridremat.settings import Settings


@dataclass(frozen=True)
class PartedProblem:
    """The distinct graphs of a step with the points that each may take.

    Attributes
    ----------
    keys
        Fingerprints of the distinct graphs.
    order
        Indices into ``keys``, in the order of the forward.
    plannings
        Of each distinct graph.
    offered
        Points of each distinct graph: its frontier, or the one that it runs already.
    between
        The code before each graph of ``order``, and after the last one.
    joined_bytes
        As in :class:`~hybridremat.sequence.parts.PartedStep`.
    """

    keys: tuple[str, ...]
    order: tuple[int, ...]
    plannings: tuple[Planning, ...]
    offered: tuple[tuple[Candidate, ...], ...]
    between: tuple[Part | None, ...]
    joined_bytes: int

    @staticmethod
    def of(
        order: Sequence[str],
        plannings: Mapping[str, Planning],
        fixed: Mapping[str, Candidate],
        between: tuple[Part | None, ...],
        joined_bytes: int,
    ) -> PartedProblem:
        """The problem of a step whose graphs run in ``order``."""
        keys = tuple(dict.fromkeys(order))
        return PartedProblem(
            keys,
            tuple(keys.index(key) for key in order),
            tuple(plannings[key] for key in keys),
            tuple((fixed[key],) if key in fixed else plannings[key].candidates for key in keys),
            between,
            joined_bytes,
        )

    def step(self, offered: Sequence[Sequence[Candidate]]) -> PartedStep:
        """The integers of the problem for some points of each graph, which come first among its parts."""
        parts = [_part(planning, group) for planning, group in zip(self.plannings, offered, strict=True)]
        order = list(self.order)
        for place, code in reversed(list(enumerate(self.between[: len(order) + 1]))):
            if code is not None:
                order.insert(place, len(parts))
                parts.append(code)
        return PartedStep(tuple(parts), tuple(order), self.joined_bytes)

    def plain(self) -> PartedStep:
        """The step with each graph plain."""
        return self.step([[Candidate(planning.plain, None)] for planning in self.plannings])

    def fingerprint(self) -> str:
        """Identifies the step: its graphs in order."""
        text = ",".join(self.keys[index] for index in self.order)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class _Choice:
    """Points of the distinct graphs, and bytes: what they keep to, what was asked, what is least."""

    points: tuple[int, ...]
    limit: int | None
    asked: int | None
    least: int


def choose_parts(
    problem: PartedProblem, settings: Settings, cost_model: str
) -> tuple[dict[str, Candidate], Plan]:
    """A point for each distinct graph, and the plan of the whole step (without parts, blocks and breaks).

    Raises
    ------
    InfeasibleLimitError
        If nothing fits, unless ``on_infeasible="least"``.
    """
    step, plain = problem.step(problem.offered), problem.plain()
    first = (0,) * len(plain.parts)
    choice = _choose(step, plain.peak(first), plain.time(first), settings)
    taken = zip(problem.keys, problem.offered, choice.points[: len(problem.keys)], strict=True)
    chosen = {key: group[point] for key, group, point in taken}
    peak, reserve = step.peak(choice.points), settings.reserve_bytes()
    whole = Plan(
        memory_limit=choice.limit,
        asked_limit=choice.asked,
        reserve=reserve,
        forwards=1,
        predicted_peak=peak,
        needed=peak + reserve,
        plain_peak=plain.peak(first),
        least_peak=choice.least,
        overhead=_more(step.time(choice.points), plain.time(first)),
        extra_flops=_extra_flops(problem, chosen),
        saved_bytes=sum(step.parts[g].points[choice.points[g]].saved for g in step.order),
        blocks=(),
        cost_model=cost_model,
        fingerprint=problem.fingerprint(),
        schedule=Schedule((), 0),
        timings=_summed(planning.timings for planning in problem.plannings),
    )
    return chosen, whole


def _choose(step: PartedStep, plain_peak: int, plain_time: int, settings: Settings) -> _Choice:
    reserve, overhead = settings.reserve_bytes(), settings.overhead_limit()
    limit = settings.limit_bytes(plain_peak)
    leanest = choose_points(step)
    assert leanest is not None, "every graph can run in some way"
    least = step.peak(leanest) + reserve
    points = choose_points(
        step,
        limit=None if limit is None else limit - reserve,
        most_time=None if overhead is None else int(plain_time * (1 + overhead)),
    )
    if points is not None:
        return _Choice(points, limit, limit, least)
    error = _infeasible(limit, least, plain_peak, len(step.order))
    if settings.on_infeasible == "error":
        raise error
    warnings.warn(f"{error} The plan of least memory runs.", InfeasibleLimitWarning, stacklevel=2)
    return _Choice(leanest, least, limit, least)


def _infeasible(limit: int | None, least: int, plain_peak: int, count: int) -> InfeasibleLimitError:
    asked = "this max_overhead" if limit is None else f"memory_limit {format_bytes(limit)} ({limit} bytes)"
    return InfeasibleLimitError(
        f"no plan fits {asked} for this step of {count} graphs: the least feasible limit is "
        f"{format_bytes(least)} ({least} bytes, {100 * least / max(1, plain_peak):.1f} % of the plain step's "
        f"{format_bytes(plain_peak)}). Raise the limit, or remove graph breaks: what crosses one is kept to "
        "the end of the step, and nothing is recomputed across it.",
        limit=limit or 0,
        least=least,
    )


def _part(planning: Planning, offered: Sequence[Candidate]) -> Part:
    graph = planning.graph
    replay = Replay(graph)
    released = sum(graph.values[value].bytes for value in graph.released_outputs)
    points = []
    for candidate in offered:
        schedule = candidate.point.schedule
        memory, split = replay(schedule), schedule.num_forward
        points.append(
            PartPoint(
                forward_peak=max(memory.profile[:split], default=0),
                backward_peak=max(memory.profile[split:], default=0),
                saved=memory.saved + released,
                time=candidate.point.time,
            )
        )
    return Part(tuple(points), sum(graph.values[value].bytes for value in graph.gradients))


def _more(value: int, plain: int) -> float:
    return value / plain - 1.0 if plain else 0.0


def _extra_flops(problem: PartedProblem, chosen: Mapping[str, Candidate]) -> float:
    flops = sum(chosen[problem.keys[g]].point.flops for g in problem.order)
    return _more(flops, sum(problem.plannings[g].plain.flops for g in problem.order))


def _summed(timings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for stages in timings:
        total.update(stages)
    return dict(total)
