"""A rewrite: another way to run calls of a step, and all that the stages of a step have to know of it.

A new one is a file with such a record, and a line in the list of this package's ``__init__.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.tracing.trace import TracedStep


@dataclass(frozen=True)
class Joint:
    """A joint graph before it is traced, and how many of its outputs belong to the forward."""

    module: fx.GraphModule
    num_outputs: int


@dataclass(frozen=True)
class Call:
    """A call as the checker reads it. Among its arguments are nodes, and calls that no node makes."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, node: fx.Node) -> Call:
        """What a node calls."""
        return cls(node.target, node.args, node.kwargs)


@dataclass(frozen=True)
class Form:
    """What runs in place of a call, tried and emitted: it is given the call's own arguments.

    ``out`` is the keyword for what it writes its first result over, empty for the first argument; ``fixed``
    are further keywords.
    """

    target: Any
    out: str
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def keywords(self, kwargs: Mapping[str, Any], over: Any) -> dict[str, Any]:
        """The keywords, from those of the plain call and what it writes over (None: nothing)."""
        return {**kwargs, **self.fixed, **({self.out: over} if self.out else {})}


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """Another way to run calls.

    A rewrite of the graph is written into the joint graph before that is traced (its stages take a
    :class:`Joint`), one of ops into the traced step, as what schedules may choose (a :class:`TracedStep`).

    Attributes
    ----------
    name
        What it is called.
    of_ops
        Whether it is one of ops.
    exact
        Whether it gives the same bits. One that does not is written only if that is asked for; the checker
        holds the graph with it against the one without (``compiler/chunked_losses.py``).
    find
        The places in a graph where it applies.
    proven
        Those that pass on this device: the same bits, the same state of the generator, how many bytes are
        allocated. They are tried (``trial.py``) where the store does not know. If it is None, all pass.
    write
        Writes what passed into the graph. A joint graph is changed in place.
    timed
        The step with the times of what it offers, in nanoseconds, measured.
    form
        What runs an op that may write over a value, or None, and which input of its node that is; None if
        this is not how the step runs it.
    term
        The call of the joint graph that an emitted call stands for, or None; the second argument gives the
        one that a node stands for. It reads the call alone, and nothing that ``find`` and ``form`` go by: by
        it the checker finds their mistakes.
    """

    name: str
    of_ops: bool = False
    exact: bool = True
    find: Callable[[Any], Sequence[Any]]
    proven: Callable[[Any, Sequence[Any], KernelStore], Sequence[Any]] | None = None
    write: Callable[[Any, Sequence[Any]], Any]
    timed: Callable[[TracedStep, KernelStore], TracedStep] | None = None
    form: Callable[[TracedStep, int, int | None], tuple[Form, fx.Node | None] | None] | None = None
    term: Callable[[Call, Callable[[fx.Node], Call]], Call | None] | None = None

    def applied(self, graph: Any, store: KernelStore) -> Any:
        """The graph with it, wherever it passes.

        Raises
        ------
        MeasurementError
            If no memory is left for a trial.
        """
        sites = self.find(graph)
        return self.write(graph, sites if self.proven is None else self.proven(graph, sites, store))
