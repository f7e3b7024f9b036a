"""Inner compilers make AOTAutograd's graphs and run them: here op by op, in ``inductor`` compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from hybridremat.compiler.direct_calls import call_directly
from hybridremat.graph.private_torch import allow_second_backward, aot_autograd, boxed_nop, inductor_config

Compiled = Callable[[list[Any]], Any]
"""What runs a graph; it takes its arguments in a list, which it empties."""


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
    def plain(self) -> bool:
        """Whether they are those of the plain step, which a compiler may lay out as it likes."""
        ...

    def begin_inference(self, graph: fx.GraphModule) -> None:
        """Called with a graph that has no backward."""
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


class InnerCompiler(Protocol):
    """Compiles one of Dynamo's graphs."""

    def __call__(
        self, module: fx.GraphModule, inputs: Sequence[Any], callbacks: Callbacks
    ) -> Callable[..., Any]:
        """What runs the graph with autograd."""
        ...


def run_op_by_op(
    module: fx.GraphModule, inputs: Sequence[Any], callbacks: Callbacks
) -> Callable[..., Any]:
    """Compile nothing: kernels run one by one, as in eager mode. See :class:`InnerCompiler`."""

    def run(graph: fx.GraphModule, given: Sequence[Any], *, backward: bool) -> Compiled:
        finish = callbacks.begin(graph, backward=backward)
        call_directly(graph)
        return finish(boxed_nop(graph, list(given)))

    def compile_forward(graph: fx.GraphModule, given: Sequence[Any]) -> Compiled:
        allow_second_backward()
        return run(graph, given, backward=False)

    def compile_backward(graph: fx.GraphModule, given: Sequence[Any]) -> Compiled:
        return run(graph, given, backward=True)

    def compile_inference(graph: fx.GraphModule, given: Sequence[Any]) -> Compiled:
        callbacks.begin_inference(graph)
        return compile_forward(graph, given)

    compile_graphs = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        partition_fn=callbacks.partition,
        keep_inference_input_mutations=True,
    )
    with inductor_config.patch(fallback_random=True):  # as in eager mode, unread draws stay
        compiled: Callable[..., Any] = compile_graphs(module, inputs)
    return compiled
