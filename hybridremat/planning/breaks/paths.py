"""The paths that steps of one input shape take through their graphs, with their surveys and plans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hybridremat.planning.breaks.sharding import Sharding
from hybridremat.planning.breaks.survey import Survey
from hybridremat.planning.plan import Plan
from hybridremat.sequence.joined_graphs import StepPart, largest_part, most_of

GraphPath = tuple[str, ...]  # fingerprints of graphs, in the order of the forward


@dataclass(frozen=True)
class SurveyedPath:
    """What a survey found on one path; fields as in ``Survey``."""

    order: GraphPath
    breaks: tuple[tuple[str, str] | None, ...] = ()
    eager_code: tuple[StepPart | None, ...] = ()
    joined_bytes: int = 0
    nodes: tuple[int, ...] = ()
    passing: Mapping[str, frozenset[int]] = field(default_factory=dict)
    staying: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, frozenset[int]] = field(default_factory=dict)
    fading: Mapping[str, frozenset[int]] = field(default_factory=dict)
    released_outputs: Mapping[str, frozenset[int]] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    sharding: Sharding | None = None

    @staticmethod
    def of(survey: Survey) -> SurveyedPath:
        """The path that a survey took."""
        return SurveyedPath(
            tuple(survey.order),
            tuple(survey.breaks),
            tuple(survey.eager_code),
            survey.joined_bytes,
            tuple(survey.nodes),
            dict(survey.passing),
            dict(survey.staying),
            dict(survey.dropped),
            dict(survey.fading),
            survey.released_outputs,
            tuple(survey.units),
            survey.sharding,
        )

    def with_most_of(self, other: SurveyedPath) -> SurveyedPath:
        """The same path with the most that was held in two surveys of it."""
        if not self.eager_code:
            return other
        pairs = zip(self.eager_code, other.eager_code, strict=True)
        return replace(
            self,
            eager_code=tuple(most_of(ours, theirs) for ours, theirs in pairs),
            joined_bytes=max(self.joined_bytes, other.joined_bytes),
            nodes=tuple(map(max, self.nodes, other.nodes)),
            passing=_in_both(self.passing, other.passing),
            staying={key: max(size, other.staying.get(key, size)) for key, size in self.staying.items()},
            dropped=_in_both(self.dropped, other.dropped),
            fading={key: values | other.fading.get(key, values) for key, values in self.fading.items()},
            released_outputs=_in_both(self.released_outputs, other.released_outputs),
        )


def _in_both(
    first: Mapping[str, frozenset[int]], second: Mapping[str, frozenset[int]]
) -> dict[str, frozenset[int]]:
    return {key: values & second.get(key, frozenset()) for key, values in first.items()}


class Paths:
    """Surveyed paths, and at most ``most`` plans of whole steps by path, least recently used first."""

    def __init__(self, most: int) -> None:
        self.surveyed: list[SurveyedPath] = []
        self.plans: OrderedDict[GraphPath, Plan] = OrderedDict()
        self._most = most

    def remember(self, path: GraphPath, plan: Plan) -> None:
        """Keep the plan of a path; the least recently used is dropped to make room."""
        self.plans[path] = plan
        self.plans.move_to_end(path)
        while len(self.plans) > self._most:
            self.plans.popitem(last=False)

    def starting(self, ran: GraphPath) -> GraphPath | None:
        """A path that starts with the graphs that ran: the last one used, or else a surveyed one."""
        known = (*reversed(self.plans), *(path.order for path in self.surveyed))
        return next((path for path in known if path[: len(ran)] == ran), None)

    def is_surveyed(self, order: GraphPath) -> bool:
        """Whether a survey took this path to its end."""
        return self.surveyed_as(order) is not None

    def surveyed_as(self, order: GraphPath) -> SurveyedPath | None:
        """What surveys found on a path that they took to its end; None if none did."""
        return next((path for path in self.surveyed if path.order == order), None)

    @contextmanager
    def replacing(self, known: SurveyedPath | None, path: SurveyedPath) -> Iterator[None]:
        """Put a path in the place of what was known of it, unless that raises."""
        before = list(self.surveyed)
        self.surveyed = [each for each in before if each is not known] + [path]
        try:
            yield
        except BaseException:
            self.surveyed = before
            raise

    def eager_code(self, order: GraphPath) -> tuple[tuple[StepPart | None, ...], int | None]:
        """Eager code and ``joined_bytes`` of a path; without a survey, the maximum of others, and None."""
        for path in self.surveyed:
            if path.order == order:
                return path.eager_code, path.joined_bytes
        found = [part for path in self.surveyed for part in path.eager_code if part is not None]
        return ((largest_part(found),) * (len(order) + 1) if found else ()), None

    def nodes(self, order: GraphPath, place: int) -> int:
        """The autograd nodes of the code before a graph, or after the last, of a path as it is counted."""
        found = self.surveyed_as(order)
        if found is not None and found.nodes:
            return found.nodes[place]
        return max((each for path in self.surveyed for each in path.nodes), default=0)

    def passing(self, order: GraphPath, key: str) -> frozenset[int]:
        """Gradients that a graph makes for the next one in the backward; none if they are not known."""
        return self._surveyed(order).passing.get(key, frozenset())

    def staying(self, order: GraphPath, key: str) -> int:
        """Bytes of outputs of a graph that are held after its backward; 0 if they are not known."""
        return self._surveyed(order).staying.get(key, 0)

    def units(self, order: GraphPath) -> tuple[str, ...]:
        """The module that each graph of a path is of; empty where none was named, or it is not known."""
        return self._surveyed(order).units or ("",) * len(order)

    def sharding(self, order: GraphPath) -> Sharding | None:
        """What FSDP2 gathers and reduces on a path; None if parameters are whole."""
        return self._surveyed(order).sharding

    def dropped(self, order: GraphPath, key: str) -> frozenset[int]:
        """Outputs of a graph that are gone when the forward has returned; none if they are not known."""
        return self._surveyed(order).dropped.get(key, frozenset())

    def fading(self, order: GraphPath, key: str) -> frozenset[int]:
        """Inputs of a graph that nothing else keeps for the backward; none if they are not known."""
        return self._surveyed(order).fading.get(key, frozenset())

    def _surveyed(self, order: GraphPath) -> SurveyedPath:
        """What a survey found on a path, nothing without one."""
        return self.surveyed_as(order) or SurveyedPath(())

    def held_outputs(self, order: GraphPath, key: str, released: frozenset[int]) -> frozenset[int]:
        """Of outputs that a graph releases on other paths, those that are held on this one, or may be."""
        found = self.surveyed_as(order)
        return released - (frozenset() if found is None else found.released_outputs.get(key, released))

    def breaks(self, order: GraphPath) -> tuple[tuple[str, str] | None, ...]:
        """Places and reasons of the breaks of a path, as far as surveys know them."""
        return max(self.surveyed, key=lambda path: _common(path.order, order)).breaks[: len(order)]


def _common(first: GraphPath, second: GraphPath) -> int:
    """The number of graphs that two paths share from the start."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
