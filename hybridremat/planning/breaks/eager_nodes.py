"""Autograd nodes that code between graphs makes in a run, beside those that surveys have counted.

More of them tell that the code runs more than was measured: what it saves is not known without a survey.
"""

from __future__ import annotations

from hybridremat.planning.breaks.paths import GraphPath, Paths


class EagerNodes:
    """Counts them from the start of a forward on, for the code before each graph and after the last."""

    def __init__(self) -> None:
        self._since: int | None = None  # the number that nodes have from here on; None: they are not counted
        self._made: list[int] = []
        self._accepted: dict[tuple[GraphPath, int], int] = {}

    def begin(self, number: int) -> None:
        """A forward starts, from which on nodes have these numbers."""
        self._since, self._made = number, []

    def stop(self) -> None:
        """Count no more in this run: something else makes nodes, too."""
        self._since = None

    def note(self, number: int) -> bool:
        """A graph starts, or the forward has ended; returns whether nodes are counted up to it."""
        if self._since is not None:
            self._made.append(number - self._since)
        return self._since is not None

    def go_on(self, number: int) -> None:
        """The graph has run, and nodes have numbers from this one on."""
        if self._since is not None:
            self._since = number

    def exceed(self, paths: Paths, path: GraphPath) -> bool:
        """Whether the last code made more than surveys of the path have counted, or was accepted before."""
        place = len(self._made) - 1
        return self._made[place] > max(paths.nodes(path, place), self._accepted.get((path, place), 0))

    def accept(self, path: GraphPath) -> None:
        """Take what the last code made for granted from now on: it cannot be surveyed."""
        place = len(self._made) - 1
        self._accepted[path, place] = self._made[place]
