"""What is known of the code that a compiler generates of an emitted graph: its memory, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

OP: Final = "hybridremat_op"
"""The key of an emitted node's ``meta`` under which the number of its op stands."""

PLACE: Final = "hybridremat_place"
"""The key under which the place of its execution in the schedule stands."""

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Size and strides of a tensor."""


@dataclass(frozen=True)
class BufferEvent:
    """One line of the code that Inductor generates, as far as memory goes.

    Attributes
    ----------
    kind
        ``alloc``: ``name`` gets ``size`` bytes of its own. ``alias``: ``name`` is one more name for what
        ``source`` holds. ``move``: what ``source`` holds is called ``name`` from now on. ``free``: the name
        is gone. ``call``: a kernel runs that Inductor did not generate.
    nodes
        For a call: the names of the nodes of the graph that it comes from.
    layouts
        For a call: size and strides of its tensor arguments.
    """

    kind: Literal["alloc", "alias", "move", "free", "call"]
    name: str
    size: int = 0
    source: str = ""
    nodes: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()


@dataclass(frozen=True)
class Result:
    """One result of a lowered graph.

    ``buffer`` is what holds it, ``size`` its bytes; 0 for an input that is handed through, and for numbers.
    ``strides`` are None for numbers.
    """

    buffer: str = ""
    size: int = 0
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LoweredCode:
    """What Inductor makes of one graph: its memory events in order, and its results."""

    events: tuple[BufferEvent, ...]
    results: tuple[Result, ...]
