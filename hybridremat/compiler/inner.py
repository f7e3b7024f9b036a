"""Inner compilers capture Dynamo's graphs, and run planned ones: here op by op, in ``inductor`` compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from hybridremat.compiler.constants import share_constants
from hybridremat.compiler.direct_calls import call_directly
from hybridremat.compiler.dispatch import Dispatch
from hybridremat.graph.private_joint import Compiled, ExportedGraph
from hybridremat.graph.private_torch import allow_second_backward, boxed_nop, let_saved_vary, not_traced


class Callbacks(Protocol):
    """What an inner compiler asks for between its stages (``backend.py``)."""

    def partition(
        self, joint: fx.GraphModule, inputs: object, *, num_fwd_outputs: int, **others: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and backward graph of a joint graph."""
        ...

    @property
    def lean(self) -> bool:
        """Whether the two graphs are to run in their own order, every buffer freed at once."""
        ...

    @property
    def dispatch(self) -> Dispatch | None:
        """What runs in place of the two graphs, if it is not they themselves."""
        ...

    @property
    def plain(self) -> bool:
        """Whether they are those of the plain step, which a compiler may lay out as it likes."""
        ...

    def begin(self, graph: fx.GraphModule, *, backward: bool) -> Finish:
        """Called with each graph before it is compiled; the result is called afterwards."""
        ...


class Finish(Protocol):
    """Called when a graph is compiled."""

    def __call__(self, run: Compiled, code: object = None, seconds: float = 0.0) -> Compiled:
        """What runs in place of ``run``.

        ``code`` is what the compiler generated, unless it was cached, and ``seconds`` is what it took.
        """
        ...


class Captured(Protocol):
    """One of Dynamo's graphs that has been captured, and can be compiled."""

    @property
    def joint(self) -> ExportedGraph | None:
        """Its joint graph; None if the compiler makes one when it compiles, or there is no backward."""
        ...

    def compiled(self, callbacks: Callbacks) -> Callable[..., Any]:
        """What runs the graph with autograd."""
        ...

    def again(self) -> Captured:
        """The same graph captured once more, to be compiled otherwise."""
        ...


class InnerCompiler(Protocol):
    """Captures one of Dynamo's graphs, in Dynamo's backend."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Captured:
        """The captured graph; nothing is planned."""
        ...


def forget_examples(module: fx.GraphModule) -> None:
    """Drop Dynamo's example values: their autograd graphs hold real scalars, which no plan counts."""
    for node in module.graph.nodes:
        node.meta.pop("example_value", None)


class OpByOp:
    """A captured graph whose kernels run one by one, as in eager mode."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._module, self._exported = module, ExportedGraph(module, inputs)
        share_constants(self._exported.graph)
        forget_examples(module)

    def again(self) -> OpByOp:
        """See :class:`Captured`."""
        other = object.__new__(OpByOp)
        other._module, other._exported = self._module, self._exported.again(self._module)
        share_constants(other._exported.graph)
        return other

    @property
    def joint(self) -> ExportedGraph | None:
        """See :class:`Captured`."""
        return self._exported if self._exported.has_backward else None

    def compiled(self, callbacks: Callbacks) -> Callable[..., Any]:
        """See :class:`Captured`."""
        graphs = None
        if (joint := self.joint) is not None:
            graphs = callbacks.partition(joint.graph, None, num_fwd_outputs=joint.num_outputs)

        def compiled(graph: fx.GraphModule, given: Sequence[Any], *, backward: bool) -> Compiled:
            finish = callbacks.begin(graph, backward=backward)
            if (dispatch := callbacks.dispatch) is not None:
                return finish(dispatch.backward if backward else dispatch.forward)
            call_directly(graph)
            return finish(boxed_nop(graph, list(given)))

        def forward(graph: fx.GraphModule, given: Sequence[Any]) -> Compiled:
            allow_second_backward()
            if callbacks.dispatch is not None:
                let_saved_vary()
            return compiled(graph, given, backward=False)

        @not_traced
        def backward(graph: fx.GraphModule, given: Sequence[Any]) -> Compiled:
            return not_traced(compiled(graph, given, backward=True))

        run = self._exported.compiled(graphs, forward, backward)
        return lambda *args: run(list(args))


def op_by_op(module: fx.GraphModule, inputs: Sequence[Any]) -> Captured:
    """Capture a graph that runs op by op; see :class:`InnerCompiler`."""
    return OpByOp(module, inputs)
