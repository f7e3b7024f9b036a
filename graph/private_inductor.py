"""Every private name of Inductor that hybridremat uses, with ``private_inductor_code``, which reads its code.

Only steps with ``compiler="inductor"`` import it, since importing Inductor's compiler takes about a second.
Read and run with torch 2.11 to 2.15.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol, cast
from unittest import mock

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import get_default_op_list
from torch._inductor import compile_fx, ir
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.wrapper import FreeLine
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import register_lowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from hybridremat.errors import GeneratedCodeError
from hybridremat.graph.generated_code import OP, LoweredCode
from hybridremat.graph.private_inductor_code import code_of
from hybridremat.graph.private_torch import OpOverload

_OPS = get_default_op_list()
_PARTITION = "custom_partitioner_fn"
_VISIBLE = "user_visible_output_idxs"  # results that keep the strides that they have in the graph

_RULES = 4
"""Goes up whenever other code is made of the same graph here: kept code and kept plans are then not used."""


class _LastUse(ir.FallbackKernel):
    """A call after which its first argument is the caller's: generated code holds it no longer."""

    def codegen(self, wrapper: Any) -> None:
        super().codegen(wrapper)
        (first, *_) = self.inputs
        buffer: Any = V.graph.get_buffer(cast(Any, first).get_name())
        if buffer.get_name() not in wrapper.freed:
            wrapper.freed.add(buffer.get_name())  # nobody else lets it go, or takes it for another
            wrapper.writeline(FreeLine(wrapper, buffer))


def let_buffer_go(op: Any) -> None:
    """Lower calls of an op that returns nothing as the last use of the buffer of their first argument.

    It changes this and the tensors of the second.
    """

    @register_lowering(op, type_promotion_kind=None)
    def lower(first: Any, changed: Sequence[Any], *others: Any) -> None:
        first.realize()
        for each in (first, *changed):  # what reads it is computed before the call, not when it is needed
            V.graph.mark_buffer_mutated(each.get_name())
        _LastUse.create(op.default, first, changed, *others)


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


class _Lowered(BaseException):
    """Ends a compilation once the code is generated."""


class _CodeReader:
    """Reads the code of one lowered graph. Inductor would wrap an error, so it is kept until ``read``."""

    def __init__(self) -> None:
        self._found: LoweredCode | GeneratedCodeError | None = None

    def look(self, lowering: Any) -> None:
        try:
            self._found = code_of(lowering)
        except GeneratedCodeError as error:
            self._found = error

    def read(self) -> LoweredCode | None:
        """The code, or None if none was generated."""
        if isinstance(self._found, GeneratedCodeError):
            raise self._found
        return self._found


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
def _storing_ops() -> Iterator[None]:
    """Store what an op of the plan makes and several kernels read, as it is counted.

    Inductor would compute some of it anew for each of them, and what it is computed from would live on.
    """
    with _patching:
        plain = inductor_graph.GraphLowering.run_node

        def run_node(self: Any, n: fx.Node) -> object:
            if OP not in n.meta:
                return plain(self, n)
            with inductor_config.patch(realize_reads_threshold=0):
                return plain(self, n)

        inductor_graph.GraphLowering.run_node = run_node  # type: ignore[method-assign]
        try:
            yield
        finally:
            inductor_graph.GraphLowering.run_node = plain  # type: ignore[method-assign]


@contextmanager
def _scheduling(*, lean: bool) -> Iterator[None]:
    """Inductor's own scheduling, or in the order of the graph, with every buffer freed at once."""
    if not lean:
        yield
        return
    with _storing_ops(), inductor_config.patch(_LEAN), V.set_choices_handler(_InOrder()):
        yield


def decompose(node: fx.Node) -> None:
    """Write what Inductor makes of a call in its place."""
    rules = select_decomp_table()
    inputs = node.all_input_nodes

    def called(*given: Any) -> Any:
        args: Any = fx.map_arg((node.args, node.kwargs), dict(zip(inputs, given, strict=True)).__getitem__)
        made = rules[cast(OpOverload, node.target)](*args[0], **args[1])
        return tuple(made) if isinstance(made, tuple) else made

    traced = make_fx(called, decomposition_table=rules)(*(each.meta["val"] for each in inputs))
    mapping: dict[fx.Node, fx.Node] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True)
    )
    with node.graph.inserting_before(node):
        made: Any = node.graph.graph_copy(traced.graph, mapping)
    if isinstance(made, fx.Node):
        node.replace_all_uses_with(made)
    for item in list(node.users):
        item.replace_all_uses_with(made[item.args[1]])
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def compiler_settings() -> str:
    """What code depends on beside the graph; it is the same in all processes that set none of Inductor's."""
    every = inductor_config.save_config_portable().items()
    others = sorted(item for item in every if item[0] != _PARTITION)
    return repr((_RULES, others, functorch_config.donated_buffer))


def lower_forward(
    module: GraphModule, inputs: Sequence[Any], *, visible: Sequence[int], lean: bool, plain: bool
) -> LoweredCode:
    """Lower, fuse and schedule a forward as Inductor does when it compiles it; nothing is built.

    ``visible`` are the results that the caller sees, which keep their strides; ``plain``: as the forward of a
    step without a plan. The graph is changed.
    """
    with _scheduling(lean=lean):
        return _lower(module, inputs, visible=visible, keep_inputs=not plain)


def lower_backward(
    module: GraphModule, inputs: Sequence[Any], *, owned: Sequence[int], lean: bool
) -> LoweredCode:
    """As :func:`lower_forward`; the inputs ``owned`` are read by nobody else, and may be overwritten."""
    (output,) = module.graph.find_nodes(op="output")
    visible = range(len(output.args[0])) if inductor_config.bw_outputs_user_visible else ()
    donated = list(owned) if functorch_config.donated_buffer else []
    with _scheduling(lean=lean), mock.patch.object(inductor_graph, "get_donated_idxs", lambda: donated):
        return _lower(module, inputs, visible=visible, backward=True)


def _keep_inputs(module: GraphModule) -> None:
    """Let the inputs among a forward's results be handed through as they are.

    Of every weight that a convolution reads, Inductor would save a copy that is laid out for it. The plain
    step keeps these copies, which save time in its backward.
    """
    (output,) = module.graph.find_nodes(op="output")
    inputs = (i for i, a in enumerate(output.args[0]) if isinstance(a, fx.Node) and a.op == "placeholder")
    output.meta[_VISIBLE] = sorted({*output.meta.get(_VISIBLE, ()), *inputs})


def _lower(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    visible: Sequence[int],
    backward: bool = False,
    keep_inputs: bool = False,
) -> LoweredCode:
    reader = _CodeReader()

    def stop(lowering: Any, _: Callable[[], Any]) -> Any:
        lowering.codegen()
        reader.look(lowering)
        raise _Lowered

    (output,) = module.graph.find_nodes(op="output")
    output.meta[_VISIBLE] = [i for i in visible if isinstance(output.args[0][i], fx.Node)]
    if keep_inputs:
        _keep_inputs(module)
    with ExitStack() as stack:
        for context in (suppress(_Lowered), _instead_of_building(stop), _disable_current_modes()):
            stack.enter_context(context)
        stack.enter_context(inductor_config.patch({"cpp.simdlen": 1}))  # vectors have no say in its memory
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
    code = reader.read()
    assert code is not None
    return code


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

    @property
    def plain(self) -> bool:
        """Whether the partition is that of the plain step."""
        ...

    def begin(self, graph: GraphModule, *, backward: bool) -> Callable[[Any, object, float], Any]:
        """Called with each graph before it is compiled.

        The result is called with what runs, its code if that was built, and the seconds that it took.
        """
        ...


def compile_step(
    module: GraphModule,
    inputs: Sequence[Any],
    callbacks: InnerCallbacks,
    *,
    identity: str,
    whole: Collection[OpOverload] = (),
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs with Inductor.

    ``identity`` is part of the keys of Inductor's caches; the ops ``whole`` are not decomposed.
    """
    table = {op: rule for op, rule in select_decomp_table().items() if op not in whole}

    def inner(graph: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        backward = bool(kwargs.get("is_backward"))
        finish = callbacks.begin(graph, backward=backward)
        if not backward and not callbacks.plain:
            _keep_inputs(graph)
        reader = _CodeReader()
        started = time.perf_counter()

        def record(lowering: Any, build: Callable[[], Any]) -> Any:
            made = build()
            reader.look(lowering)
            return made

        laid_out = _Partitioner(callbacks.partition, f"{key}, plain: {callbacks.plain}")
        # a key of Inductor's says what the results are, but not which of them keep their strides
        with ExitStack() as stack:
            stack.enter_context(inductor_config.patch({_PARTITION: laid_out}))
            stack.enter_context(_instead_of_building(record))
            stack.enter_context(_scheduling(lean=callbacks.lean))
            run = compile_fx.compile_fx_inner(graph, example_inputs, **kwargs)
        return finish(run, reader.read(), time.perf_counter() - started)

    # Inductor's own key does not say whether saved tensors may be overwritten
    key = f"{identity}, rules {_RULES}, donated: {functorch_config.donated_buffer}"
    patches: dict[str, Any] = {_PARTITION: _Partitioner(callbacks.partition, key)}
    patches["auto_chunker.enable"] = False  # it hides the loss head in subgraphs, whose memory has no lines
    # what AOTAutograd keeps would skip the partition; and the backward is to be compiled before anything runs
    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        compiled = compile_fx.compile_fx(
            module, list(inputs), inner_compile=inner, config_patches=patches, decompositions=table
        )
    return cast(Callable[..., Any], compiled)
