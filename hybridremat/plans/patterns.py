"""Patterns ``MODULE[:OP]`` over the forward ops of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from hybridremat.graph.joint import JointGraph, Op, Phase, short_op

SUGGESTED = 5  # names that an error shows


@dataclass(frozen=True)
class Pattern:
    """Two case-sensitive globs; ``*`` matches dots too. ``op`` is None without ``:OP``."""

    module: str
    op: str | None

    @staticmethod
    def of(text: str) -> Pattern:
        """Read ``MODULE`` or ``MODULE:OP``."""
        module, colon, op = text.partition(":")
        return Pattern(module, op if colon else None)

    def matches(self, op: Op) -> bool:
        """Whether the op's name and its module, or one above it, match."""
        return any(fnmatchcase(path, self.module) for path in ancestors(op.module)) and self._is_kind(op)

    def _is_kind(self, op: Op) -> bool:
        names = short_op(op.target), op.target, op.target.split(".")[1] if "." in op.target else op.target
        return self.op is None or any(fnmatchcase(name, self.op) for name in names)


def ancestors(module: str) -> list[str]:
    """A module path and all paths above it; ops of the model itself have the empty path."""
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def pinnable(graph: JointGraph) -> list[Op]:
    """The ops that patterns can match: those of the forward."""
    return [op for op in graph.ops if op.phase is not Phase.BACKWARD]


def needed_values(graph: JointGraph) -> frozenset[int]:
    """Values that the backward reads, directly or to recompute others."""
    needed: set[int] = set()
    for op in reversed(graph.ops):
        wanted = op.phase is not Phase.FORWARD or (op.recomputable and not needed.isdisjoint(op.writes))
        if wanted:
            needed.update(op.reads)
    return frozenset(needed)


def near_misses(text: str, ops: Iterable[Op]) -> str:
    """The names closest to a pattern that matches nothing, as a clause of an error."""
    pattern, ops = Pattern.of(text), tuple(ops)
    below = [op for op in ops if Pattern(pattern.module, None).matches(op)]
    if pattern.op is not None and below:
        names = sorted({short_op(op.target) for op in below})
        return f"the ops in {pattern.module} are {_some(names, pattern.op)}"
    modules = sorted({path for op in ops for path in ancestors(op.module) if path})
    if not modules:
        return "no op of this model knows its module; use * for MODULE"
    return f"modules of this model are {_some(modules, pattern.module)}"


def _some(names: list[str], like: str) -> str:
    """The closest names, or the first ones if none is close."""
    close = get_close_matches(like, names, SUGGESTED, cutoff=0.5)
    shown = close or names[:SUGGESTED]
    more = len(names) - len(shown)
    return ", ".join(map(repr, shown)) + (f" and {more} more" if more else "")
