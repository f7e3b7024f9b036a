"""Every private name of Inductor that hybridremat uses: the second half of ``private_torch``.

Only steps with ``compiler="inductor"`` import it, since importing Inductor's compiler takes about a second.
Read and run with torch 2.11, 2.12 and 2.13.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast
from unittest import mock

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import get_default_op_list
from torch._inductor import compile_fx, ir
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import wrapper
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.debug import DebugContext
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from hybridremat.graph.private_torch import OpOverload, tree_leaves

_OPS = get_default_op_list()
_PARTITION = "custom_partitioner_fn"


class InductorFusion:
    """What Inductor fuses, by its own tables (:class:`~hybridremat.graph.tracing.fusion.FusionRules`)."""

    @staticmethod
    def is_fusible(node: fx.Node) -> bool:
        """Whether Inductor computes the node in a kernel that it generates, beside others."""
        if not isinstance(node.target, OpOverload):
            return False
        return torch.Tag.pointwise in node.target.tags or bool(_OPS.is_fusible(node))

    @staticmethod
    def is_view(node: fx.Node) -> bool:
        """Whether Inductor only reads the node's input in another way."""
        return isinstance(node.target, OpOverload) and bool(_OPS.is_view(node))


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


class _Lowered(BaseException):
    """Ends a compilation once the code is generated."""


_patching = threading.RLock()


@contextmanager
def _instead_of_building(do: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Call ``do(lowering, build)`` where Inductor builds the code of a lowered graph with ``build()``."""
    with _patching:
        plain = inductor_graph.GraphLowering.compile_to_module
        inductor_graph.GraphLowering.compile_to_module = lambda self: do(self, lambda: plain(self))  # type: ignore[method-assign]
        try:
            yield
        finally:
            inductor_graph.GraphLowering.compile_to_module = plain  # type: ignore[method-assign]


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


class _InOrder(InductorChoices):
    """Fuses only what no call of a library's kernel stands between, so that these keep their order."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether two nodes of the scheduler may become one kernel."""
        if not hasattr(scheduler, "_hybridremat_calls"):
            scheduler._hybridremat_calls = sorted(
                node.min_order
                for node in scheduler.nodes
                if isinstance(node, ExternKernelSchedulerNode) and not isinstance(node.node, ir.MultiOutput)
            )
        calls = scheduler._hybridremat_calls
        first = bisect(calls, min(node1.min_order, node2.min_order))
        last = bisect(calls, max(node1.max_order, node2.max_order))
        return first == last and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


# Inductor's own scheduling moves kernels and keeps buffers for later ones. ``pattern_matcher``: a product is
# moved to the sum that it can be made together with, however late that is.
_LEAN = {"allow_buffer_reuse": False, "reorder_for_peak_memory": False, "pattern_matcher": False}


@contextmanager
def _scheduling(*, lean: bool) -> Iterator[None]:
    """Inductor's own scheduling, or in the order of the graph, with every buffer freed at once."""
    if not lean:
        yield
        return
    with inductor_config.patch(_LEAN), V.set_choices_handler(_InOrder()):
        yield


def compiler_settings() -> str:
    """The settings of Inductor that code depends on; they are the same in all processes that set none."""
    every = inductor_config.save_config_portable().items()
    return repr((sorted(item for item in every if item[0] != _PARTITION), functorch_config.donated_buffer))


def lower_forward(
    module: GraphModule, inputs: Sequence[Any], *, visible: Sequence[int], lean: bool
) -> LoweredCode:
    """Lower, fuse and schedule a forward as Inductor does when it compiles it; nothing is built.

    ``visible`` are the results that the caller sees, which keep their strides. The graph is changed.
    """
    with _scheduling(lean=lean):
        return _lower(module, inputs, visible=visible, backward=False)


def lower_backward(
    module: GraphModule, inputs: Sequence[Any], *, owned: Sequence[int], lean: bool
) -> LoweredCode:
    """As :func:`lower_forward`; the inputs ``owned`` are read by nobody else, and may be overwritten."""
    (output,) = module.graph.find_nodes(op="output")
    visible = range(len(output.args[0])) if inductor_config.bw_outputs_user_visible else ()
    donated = list(owned) if functorch_config.donated_buffer else []
    with _scheduling(lean=lean), mock.patch.object(inductor_graph, "get_donated_idxs", lambda: donated):
        return _lower(module, inputs, visible=visible, backward=True)


def _lower(
    module: GraphModule, inputs: Sequence[Any], *, visible: Sequence[int], backward: bool
) -> LoweredCode:
    found: list[LoweredCode] = []

    def stop(lowering: Any, _: Callable[[], Any]) -> Any:
        lowering.codegen()
        found.append(_code(lowering))
        raise _Lowered

    (output,) = module.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = [i for i in visible if isinstance(output.args[0][i], fx.Node)]
    with ExitStack() as stack:
        for context in (suppress(_Lowered), _instead_of_building(stop), _disable_current_modes()):
            stack.enter_context(context)
        stack.enter_context(DebugContext())
        stack.enter_context(torch.no_grad())
        compile_fx.fx_codegen_and_compile(
            module,
            list(inputs),
            (),
            cudagraphs=BoxedBool(False),
            static_input_idxs=(),
            is_backward=backward,
            graph_id=None,
            is_inference=False,
            boxed_forward_device_index=None,
        )
    return found[0]


def _code(lowering: Any) -> LoweredCode:
    results = tuple(_result(lowering, result) for result in lowering.graph_outputs)
    return LoweredCode(tuple(_events(lowering)), results)


def _result(lowering: Any, result: Any) -> Result:
    if not isinstance(result, ir.IRNode) or not result.has_tensor_output():
        return Result()
    name, strides = result.get_name(), tuple(int(stride) for stride in result.get_layout().stride)
    buffer = lowering.name_to_buffer.get(name)
    return Result(name, 0 if buffer is None else _bytes(lowering, buffer), strides)


def _bytes(lowering: Any, buffer: Any) -> int:
    return int(lowering.get_allocation_storage_size(buffer)) * int(buffer.get_dtype().itemsize)


def _call(node: Any) -> BufferEvent:
    layouts = []
    for given in node.inputs:
        if isinstance(given, ir.IRNode) and given.has_tensor_output():
            size, strides = given.get_size(), given.get_stride()
            layouts.append((tuple(map(int, size)), tuple(map(int, strides))))
    return BufferEvent("call", node.get_name(), nodes=_origins(node), layouts=tuple(layouts))


def _origins(node: Any) -> tuple[str, ...]:
    own = getattr(node, "origin_node", None)
    first = [own.name] if own is not None else []
    return tuple(dict.fromkeys([*first, *(origin.name for origin in node.get_origins())]))


def _events(lowering: Any) -> Iterator[BufferEvent]:
    """The memory events of a lowered graph whose code has been generated."""
    for line in lowering.wrapper_code.lines:
        if isinstance(line, wrapper.AllocateLine):
            yield BufferEvent("alloc", line.node.get_name(), _bytes(lowering, line.node))
        elif isinstance(line, wrapper.ReuseLine):
            kind: Literal["move", "alias"] = "move" if line.delete_old else "alias"
            yield BufferEvent(kind, line.reused_as.get_name(), source=line.node.get_name())
        elif isinstance(line, wrapper.ReinterpretLine):
            yield BufferEvent("alias", line.reused_as.get_name(), source=line.node.get_name())
        elif isinstance(line, wrapper.FreeIfNotReusedLine):
            if not line.is_reused:
                yield from (BufferEvent("free", name) for name in _names(line.node))
        elif isinstance(line, wrapper.FreeLine):
            yield BufferEvent("free", line.node.get_name())
        elif isinstance(line, wrapper.ExternKernelAllocLine):
            yield from _made_by_call(lowering, line.node)
        elif isinstance(line, wrapper.ExternKernelOutLine):
            yield _call(line.node)
        elif isinstance(line, wrapper.MultiOutputLine):
            yield BufferEvent("alias", line.result_name, source=f"{line.arg_name}:{line.result_name}")


def _names(node: Any) -> Iterator[str]:
    """The names under which a buffer is held: for a tuple of results one for each of them."""
    yield node.get_name()
    if isinstance(node.get_output_spec(), ir.MultiOutputLayout):
        yield from (f"{node.get_name()}:{item.get_name()}" for item in _items(node))


def _items(node: Any) -> Iterator[Any]:
    """The tensors in the tuple that a kernel returns, without views of its inputs."""
    for item in tree_leaves(getattr(node, "outputs", ())):
        if isinstance(item, ir.Buffer) and not item.get_inputs_that_alias_output():
            yield item


def _made_by_call(lowering: Any, node: Any) -> Iterator[BufferEvent]:
    """A kernel that allocates its own results: one tensor, or a tuple that holds several."""
    name = node.get_name()
    results = []
    if isinstance(node.get_output_spec(), ir.MultiOutputLayout):
        results = [(f"{name}:{item.get_name()}", item) for item in _items(node)]
    elif not isinstance(node.get_output_spec(), ir.NoneLayout) and not node.get_inputs_that_alias_output():
        results = [(name, node)]
    yield from (BufferEvent("alloc", held, _bytes(lowering, item)) for held, item in results)
    yield _call(node)


class _Partitioner(CustomPartitionerFn):
    def __init__(self, partition: Callable[..., tuple[GraphModule, GraphModule]], identity: str) -> None:
        self._partition, self._identity = partition, identity

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self._identity

    def __deepcopy__(self, _: object) -> _Partitioner:  # Inductor copies its whole configuration
        return self

    def __getstate__(self) -> str:  # and pickles it for the keys of its caches
        return self._identity


class InnerCallbacks(Protocol):
    """What :func:`compile_step` asks for (``hybridremat.compiler.inner``)."""

    def partition(
        self, joint: GraphModule, inputs: object, *, num_fwd_outputs: int, **others: object
    ) -> tuple[GraphModule, GraphModule]:
        """The forward and backward graph of a joint graph."""
        ...

    @property
    def lean(self) -> bool:
        """Whether the graphs of the partition are to run in their own order, every buffer freed at once."""
        ...

    def begin(self, graph: GraphModule, *, backward: bool) -> Callable[[Any, object, float], Any]:
        """Called with each graph before it is compiled.

        The result is called with what runs, its code if that was built, and the seconds that it took.
        """
        ...


def compile_step(
    module: GraphModule, inputs: Sequence[Any], callbacks: InnerCallbacks, *, identity: str
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs with Inductor; ``identity`` is part of the keys of Inductor's caches."""

    def inner(graph: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        finish = callbacks.begin(graph, backward=bool(kwargs.get("is_backward")))
        built: list[LoweredCode] = []
        started = time.perf_counter()

        def record(lowering: Any, build: Callable[[], Any]) -> Any:
            made = build()
            built.append(_code(lowering))
            return made

        with _instead_of_building(record), _scheduling(lean=callbacks.lean):
            run = compile_fx.compile_fx_inner(graph, example_inputs, **kwargs)
        return finish(run, built[0] if built else None, time.perf_counter() - started)

    # Inductor's own key does not say whether saved tensors may be overwritten
    key = f"{identity}, donated: {functorch_config.donated_buffer}"
    patches: dict[str, Any] = {_PARTITION: _Partitioner(callbacks.partition, key)}
    patches["auto_chunker.enable"] = False  # it hides the loss head in subgraphs, whose memory has no lines
    # what AOTAutograd keeps would skip the partition; and the backward is to be compiled before anything runs
    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        compiled = compile_fx.compile_fx(module, list(inputs), inner_compile=inner, config_patches=patches)
    return cast(Callable[..., Any], compiled)
