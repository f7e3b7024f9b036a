"""The ways that the steps of one input shape take through their graphs, and what is known of each."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from hybridremat.graph_breaks.survey import Survey
from hybridremat.planning.plan import Plan
from hybridremat.sequence.joined_graphs import StepPart, largest_part

Path = tuple[str, ...]  # fingerprints of graphs, in the order of the forward


@dataclass(frozen=True)
class SurveyedPath:
    """What a survey showed of one path; the figures are those of ``Survey``."""

    order: Path
    breaks: tuple[tuple[str, str] | None, ...] = ()
    between: tuple[StepPart | None, ...] = ()
    joined_bytes: int = 0

    @staticmethod
    def of(survey: Survey) -> SurveyedPath:
        """The path that a survey took."""
        return SurveyedPath(
            tuple(survey.order), tuple(survey.breaks), tuple(survey.between), survey.joined_bytes
        )


class Paths:
    """Surveyed paths, and the plans of whole steps by path: ``most`` of them, the latest used last."""

    def __init__(self, most: int) -> None:
        self.surveyed: list[SurveyedPath] = []
        self.plans: OrderedDict[Path, Plan] = OrderedDict()
        self._most = most

    def remember(self, path: Path, plan: Plan) -> None:
        """Keep the plan of a path; the least recently used is dropped if there are too many."""
        self.plans[path] = plan
        self.plans.move_to_end(path)
        while len(self.plans) > self._most:
            self.plans.popitem(last=False)

    def starting(self, ran: Path) -> Path | None:
        """The path used last among those that start with the graphs that ran, if not a surveyed one."""
        known = (*reversed(self.plans), *(path.order for path in self.surveyed))
        return next((path for path in known if path[: len(ran)] == ran), None)

    def is_surveyed(self, order: Path) -> bool:
        """Whether a survey took this path to its end."""
        return any(path.order == order for path in self.surveyed)

    def surroundings(self, order: Path) -> tuple[tuple[StepPart | None, ...], int | None]:
        """The code between the graphs of a path, and the bytes to add up gradients that several make.

        Those of its survey; on a path that was not surveyed, the most of any survey everywhere, and None.
        """
        for path in self.surveyed:
            if path.order == order:
                return path.between, path.joined_bytes
        found = [part for path in self.surveyed for part in path.between if part is not None]
        return ((largest_part(found),) * (len(order) + 1) if found else ()), None

    def breaks(self, order: Path) -> tuple[tuple[str, str] | None, ...]:
        """Places and reasons of the breaks of a path, as far as a survey has met them."""
        return max(self.surveyed, key=lambda path: _common(path.order, order)).breaks[: len(order)]


def _common(first: Path, second: Path) -> int:
    """How many graphs two paths share from their start."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
