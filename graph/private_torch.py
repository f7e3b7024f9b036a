"""Every private PyTorch name that hybridremat uses, in one place: a new torch release is this file's work.

Those of Inductor stand in ``private_inductor``, which is imported only where it is asked for.

Read and run with torch 2.11 to 2.15, the range of pyproject.toml; ``make test-torch`` runs the tests with
another release, and docs/releases.md says what is done when there is one.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, _neg_view
from torch._C import (
    DispatchKey,
    _current_autograd_node,
    _current_graph_task_id,
    _DisableAutocast,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
    _will_engine_execute_node,
)
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,
    _get_sequence_nr,
    _profiler_enabled,
    _saved_tensors_hooks_set_tracing,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import peek_interpreter_stack
from torch._C._profiler import _EventType
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo import trace_rules
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    TorchRuntimeError,
)
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import counters as dynamo_counters
from torch._dynamo.variables import misc as dynamo_misc
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    force_save_bw_mutation_src,
    force_save_effectful_ops,
)
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.effects import with_effects
from torch._inductor import config as inductor_config
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_symbols,
    free_unbacked_symbols,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    any_torch_dispatch_mode_on_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import (
    arg_tree_leaves,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from torch.utils._sympy.functions import Max
from torch.utils._sympy.value_ranges import bound_sympy
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store  # not there in builds without torch.distributed


def not_traced(function: Callable[..., Any], *, reason: str | None = None) -> Callable[..., Any]:
    """The function, which Dynamo lets run as it is; ``reason``: what it says where it must not break."""
    left: Callable[..., Any] = torch._dynamo.disable(function, reason=reason)
    left._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    return left


@contextmanager
def noting_breaks(reasons: list[str]) -> Iterator[None]:
    """Note why Dynamo's graphs break; a function that is not traced again has no break.

    Also why it gives up on functions, if that is for what depends on data.
    """
    breaks, captures = Counter(dynamo_counters["graph_break"]), len(dynamo_utils.get_compilation_metrics())
    usual = dynamo_utils._compilation_metrics.maxlen or MOST_METRICS
    dynamo_utils.set_compilation_metrics_limit(MOST_METRICS)
    try:
        yield
    finally:
        reasons += Counter(dynamo_counters["graph_break"]) - breaks
        given_up = (each.fail_reason or "" for each in dynamo_utils.get_compilation_metrics()[captures:])
        reasons += filter(_ON_DATA.search, given_up)
        dynamo_utils.set_compilation_metrics_limit(usual)


_ON_DATA = re.compile(r"data.dependent|depends on input tensor data|\.item\(\)", re.IGNORECASE)


MOST_METRICS = 16384  # what Dynamo keeps of its captures meanwhile


def group_store(prefix: str) -> Store | None:
    """The store of the default process group below a prefix, None if the group has no store.

    Only to be called where torch.distributed is available.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = _get_default_store()
    return None if store is None else PrefixStore(prefix, store)


ALLOCATION_EVENT = _EventType.Allocation

__all__ = [
    "ALLOCATION_EVENT",
    "BackendCompilerFailed",
    "CheckpointPolicy",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FailOnRecompileLimitHit",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "HigherOrderOperator",
    "LoggedByName",
    "OpOverload",
    "ShapeFacts",
    "TensorifyScalarRestartAnalysis",
    "TorchDynamoException",
    "TorchRuntimeError",
    "_disable_current_modes",
    "_extract_fwd_bwd_modules",
    "_make_graph_module",
    "_neg_view",
    "_profiler_enabled",
    "allow_second_backward",
    "allows_second_backward",
    "any_torch_dispatch_mode_on_stack",
    "arg_tree_leaves",
    "as_in_eager",
    "backward_number",
    "boxed_nop",
    "change_count",
    "code_unwritten",
    "detect_fake_mode",
    "dynamo_config",
    "exchanges_gradients",
    "expression",
    "failures_unlogged",
    "fake_on_meta",
    "fake_process_group",
    "force_save_bw_mutation_src",
    "force_save_effectful_ops",
    "free_symbols",
    "free_unbacked_symbols",
    "functions_in_graph",
    "get_gradient_edge",
    "gradient_hooks",
    "graph_is_retained",
    "group_store",
    "hooks_before_and_after",
    "inductor_config",
    "innermost_frame",
    "input_gradients",
    "inside_distributed_data_parallel",
    "inside_transform",
    "is_traceable_wrapper_subclass",
    "is_traced",
    "let_saved_vary",
    "mark_static",
    "new_node_number",
    "next_nodes_in_backward",
    "node_number",
    "not_traced",
    "ones_for_result",
    "overwritten_inputs",
    "run_and_save_rng_state",
    "saved_may_vary",
    "saved_tensor_hooks_are_set",
    "shape_facts",
    "specialize_floats",
    "step_inputs",
    "tangent_output",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unwritten_module",
    "will_run_in_this_backward",
    "with_effects",
    "without_autocast",
]


class LoggedByName(set[Callable[..., Any]]):
    """Functions for a setting of Dynamo; a copy has their names instead.

    Dynamo writes a copy of its settings to its log as JSON. 2.11 does not leave out the functions whose calls
    it ignores, and logged an error for each graph, which kept the graph alive.
    """

    def __deepcopy__(self, _: object) -> set[str]:
        return {function.__qualname__ for function in self}


def innermost_frame(error: BaseException) -> tuple[str, str, int] | None:
    """File, function and line where Dynamo was in the traced code; None if it does not say."""
    stack = getattr(error, "real_stack", None)
    return (stack[-1].filename, stack[-1].name, stack[-1].lineno or 0) if stack else None


@contextmanager
def failures_unlogged() -> Iterator[None]:
    """Where a kernel's error on fake tensors is raised, torch is not to log it with its traceback besides."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    log = logging.getLogger(FakeTensor.__module__)
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def change_count(tensor: Tensor) -> int:
    """How often a tensor has been changed in place; 0 if PyTorch does not count it."""
    return 0 if tensor.is_inference() else int(tensor._version)


def gradient_hooks(parameter: Tensor) -> Iterator[dict[int, Any]]:
    """The dictionaries in which autograd finds the hooks that were registered on a leaf."""
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        if hooks:
            yield hooks


def hooks_before_and_after(parameter: Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """What runs before a leaf's gradient is accumulated (tensor hooks), and after."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return list((before or {}).values()), list((after or {}).values())


def will_run_in_this_backward(leaf: Tensor) -> bool:
    """Called in a backward: whether it accumulates a gradient of a leaf."""
    return bool(_will_engine_execute_node(get_gradient_edge(leaf).node))


def inside_distributed_data_parallel() -> bool:
    """Whether the forward of a DistributedDataParallel is running."""
    return DistributedDataParallel._active_ddp_module is not None


def exchanges_gradients() -> bool:
    """Whether the forward of a DistributedDataParallel runs whose backward is to exchange gradients."""
    active = DistributedDataParallel._active_ddp_module
    return active is not None and active.require_backward_grad_sync and torch.is_grad_enabled()


def next_nodes_in_backward() -> Iterator[Any]:
    """Called in a backward: the nodes that take what the one that runs returns."""
    return (after for after, _ in _current_autograd_node().next_functions)


def without_autocast() -> AbstractContextManager[None]:
    """A context in which nothing is cast."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    disabled: AbstractContextManager[None] = _DisableAutocast()
    return disabled


def inside_transform() -> bool:
    """Whether a transform of ``torch.func`` (grad, vmap, jvp) is running."""
    return peek_interpreter_stack() is not None


def node_number(node: Any) -> int:
    """Grows with each node of autograd graphs that a thread makes; of leaves it is beyond all others."""
    return int(node._sequence_nr())


def new_node_number() -> int:
    """A number that no node before has, and none after is below."""
    with torch.enable_grad():
        return node_number(torch.zeros((), requires_grad=True).view(()).grad_fn)


def has_saved_hooks(node: Any) -> bool:
    """Whether an autograd node has saved something by hooks, which run where it is read."""
    raw = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    saved = (each for given in raw for each in (given if isinstance(given, (list, tuple)) else [given]))
    return any(getattr(each, "unpack_hook", None) is not None for each in saved)


def ones_for_result(node: Any, index: int, like: Tensor | None = None) -> Tensor:
    """A gradient for a result of an autograd node; of the strides of a tensor, which may be on meta."""
    described = node._input_metadata[index]
    if like is not None:
        return torch.ones_like(like, device=described.device)
    return torch.ones(described.shape, dtype=described.dtype, device=described.device)


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same layout on the meta device; one that is made of others is itself."""
    several: bool = is_traceable_wrapper_subclass(tensor)
    if several or tensor.layout != torch.strided:
        return tensor
    return torch.empty_like(tensor, device="meta")


def stand_in(node: Any, index: int) -> Tensor:
    """A gradient for a result of an autograd node that takes no memory: one number, everywhere."""
    described = node._input_metadata[index]
    return torch.ones((), dtype=described.dtype, device=described.device).expand(described.shape)


def step_inputs(module: GraphModule) -> dict[int, Node]:
    """The placeholders of a joint graph that are whole inputs of the step, by the number of the input.

    Not tangents, the tokens that order ops with effects, and the parts of a tensor made of others (a
    quantized weight).
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    described = [(node.meta.get("desc"), node) for node in placeholders]
    return {desc.idx: node for desc, node in described if isinstance(desc, PlainAOTInput)}


def input_gradients(module: GraphModule) -> dict[int, int]:
    """Where a joint graph returns the gradients of :func:`step_inputs`: number of the input → flat output."""
    (output,) = module.graph.find_nodes(op="output")
    described = enumerate(output.meta.get("desc") or ())
    found = ((place, getattr(desc, "grad_of", None)) for place, desc in described)
    return {given.idx: place for place, given in found if isinstance(given, PlainAOTInput)}


def tangent_output(node: Node) -> int | None:
    """Which flat output of the graph a tangent placeholder is the gradient of, if it is one output's own."""
    described = node.meta.get("desc")
    output = described.output if isinstance(described, TangentAOTInput) else None
    return output.idx if isinstance(output, PlainAOTOutput) else None


def overwritten_inputs(module: GraphModule) -> tuple[Node, ...]:
    """Inputs of a joint graph that AOTAutograd overwrites itself, once the forward has returned.

    These are inputs that carry gradients and are changed in place; it writes the others inside the graph.
    """
    (output,) = module.graph.find_nodes(op="output")
    described = tree_leaves(output.meta.get("desc") or ())
    changed = {d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)}
    inputs = module.graph.find_nodes(op="placeholder")
    return tuple(node for node in inputs if node.meta.get("desc") in changed)


def allow_second_backward() -> None:
    """Called while a graph is compiled: say that its backward overwrites no saved tensor.

    AOTAutograd refuses ``retain_graph=True`` for saved tensors that an inner compiler may reuse. Graphs that
    run op by op reuse none.
    """
    donated = _donated()
    if donated:
        donated.clear()


class _NoInputs:
    """In place of a list that says of each saved tensor whether it is an input of the graph: none is."""

    def __getitem__(self, _: int) -> bool:
        return False


def let_saved_vary() -> None:
    """Called while a forward is compiled: it may save other tensors, and more or fewer, in each call.

    AOTAutograd takes what is saved by the number of outputs before it and behind it; what it has noted of
    single saved tensors goes.
    """
    saved_may_vary()()


def saved_may_vary() -> Callable[[], None]:
    """Called while a forward is compiled: what lets it save other tensors (:func:`let_saved_vary`) later."""
    context = TracingContext.try_get()
    known = context.fw_metadata if context is not None else None

    def vary() -> None:
        if known is not None:
            known.dynamic_saved_tensors_idxs.clear()
            if hasattr(known, "saved_tensor_is_graph_input"):  # from 2.14 on
                known.saved_tensor_is_graph_input = _NoInputs()

    return vary


def allows_second_backward() -> bool:
    """Called while a backward is compiled: whether its code overwrites no saved tensor."""
    return not (functorch_config.donated_buffer and _donated())


def _donated() -> list[int] | None:
    """Indices of the saved tensors that the backward which is compiled may overwrite, if any are."""
    context = TracingContext.try_get()
    return getattr(context.fw_metadata, "bw_donated_idxs", None) if context is not None else None


def graph_is_retained() -> bool:
    """Called in a backward: whether it was started with ``retain_graph=True``."""
    return bool(_get_current_graph_task_keep_graph())


def after_backward(call: Callable[[], None]) -> None:
    """Called in a backward: have something called when it has ended, what it saved is gone by then."""
    Variable._execution_engine.queue_callback(call)


def is_compiled_node(node: Any) -> bool:
    """Whether a node of an autograd graph is that of a graph that AOTAutograd has compiled."""
    return bool(node.name() == "CompiledFunctionBackward")


def next_node_number() -> int:
    """What :func:`node_number` is at least for nodes that this thread makes from now on."""
    return int(_get_sequence_nr())


def backward_number() -> int:
    """Called in a backward: a number that it has alone."""
    return int(_current_graph_task_id())


_AUTOGRAD = [
    key
    for name, key in DispatchKey.__members__.items()
    if name.startswith("Autograd") or name == "ADInplaceOrView"
]


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Run what comes as in eager mode, with autograd and its hooks for saved tensors.

    A kernel runs without autograd; while AOTAutograd traces, the hooks rest, and some ops are decomposed.
    """
    left_out = _dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        left_out = left_out.remove(key)
    tracing = _saved_tensors_hooks_set_tracing(False)
    try:
        with _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), left_out), no_python_dispatcher():
            yield
    finally:
        _saved_tensors_hooks_set_tracing(tracing)


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """A process group in which this process is the first of so many ranks, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def is_traced(values: object) -> bool:
    """Whether there is a tensor among some values that stands for another while PyTorch traces."""
    return any(isinstance(leaf, (FakeTensor, FunctionalTensor)) for leaf in tree_leaves(values))


@contextmanager
def traced_as(op: OpOverload, function: Callable[..., Any]) -> Iterator[None]:
    """Let an op on CPU tensors be what ``function`` makes of it while PyTorch traces.

    Only the dispatcher in Python that tracing takes looks at such kernels. One of ``torch.library`` would not
    do: what autograd does with the op is not what it was once the library has gone.
    """
    key = torch._C.DispatchKey.AutogradCPU
    assert key not in op.py_kernels
    op.py_kernels[key] = function
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()


@contextmanager
def functions_in_graph(
    classes: Collection[type[torch.autograd.Function]],
    node_for: Callable[[type[torch.autograd.Function]], Callable[..., Any]],
) -> Iterator[None]:
    """Let Dynamo write calls of these ``autograd.Function`` classes into its graph as they are.

    ``node_for``: what the node of a class calls.
    """
    own = {id(each) for each in classes}
    with _IN_GRAPH_LOCK:
        if own and not _IN_GRAPH:
            dynamo_misc.produce_trampoline_autograd_apply = _node_or_trampoline  # type: ignore[assignment]
        for each in own:
            allowed = each in trace_rules._allowed_callable_ids()
            _, users, before = _IN_GRAPH.get(each, (node_for, 0, allowed))
            _IN_GRAPH[each] = node_for, users + 1, before
            trace_rules._allowed_callable_ids.add(each)
    try:
        yield
    finally:
        with _IN_GRAPH_LOCK:
            for each in own:
                _, users, before = _IN_GRAPH.pop(each)
                if users > 1:
                    _IN_GRAPH[each] = node_for, users - 1, before
                elif not before:
                    trace_rules._allowed_callable_ids.remove(each)
            if own and not _IN_GRAPH:
                dynamo_misc.produce_trampoline_autograd_apply = _TRAMPOLINE


_IN_GRAPH: dict[int, tuple[Callable[..., Callable[..., Any]], int, bool]] = {}
"""By identity of a class: what makes its node, for how many callers, and whether it was allowed before."""

_IN_GRAPH_LOCK: Final = threading.Lock()
_TRAMPOLINE: Final = dynamo_misc.produce_trampoline_autograd_apply


def _node_or_trampoline(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    found = _IN_GRAPH.get(id(function))
    return found[0](function) if found is not None else _TRAMPOLINE(function)


def saved_tensor_hooks_are_set() -> bool:
    """Whether something is to be called with each tensor that autograd saves from now on."""
    return _top_saved_tensors_default_hooks(True) is not None


def is_other_subclass(value: object) -> bool:
    """Whether a value is a tensor of a class that says nothing of how ops run (``as_subclass``)."""
    known = type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return isinstance(value, Tensor) and not known and not is_traceable_wrapper_subclass(value)


def calls_custom_ops(module: GraphModule) -> bool:
    """Whether a graph, or one inside of it, calls ops of others than PyTorch and us."""
    graphs = (each.graph for each in module.modules() if isinstance(each, GraphModule))
    ops = (node.target for graph in graphs for node in graph.nodes)
    names = {str(op).partition(".")[0] for op in ops if isinstance(op, (OpOverload, OpOverloadPacket))}
    return not names <= {"aten", "prim", "prims", "c10d", "_c10d_functional", "onednn", "hybridremat"}


@contextmanager
def without_alias_check() -> Iterator[None]:
    """Leave out what PyTorch looks for in custom ops when a graph first runs.

    It refuses subclasses of tensors, and meanwhile numbers in calls become tensors, which take memory.
    """
    usual = getattr(functorch_config, "check_custom_op_aliasing", None)
    if usual is None:
        yield
        return
    functorch_config.check_custom_op_aliasing = False  # its patch() takes four times as long
    try:
        yield
    finally:
        functorch_config.check_custom_op_aliasing = usual


def storage_reference(tensor: torch.Tensor) -> Callable[[], bool]:
    """Tells whether a tensor's storage is still there; it is not kept by that.

    True without end for tensors that have no one storage of their own.
    """
    several: bool = is_traceable_wrapper_subclass(tensor)
    if several or tensor.layout != torch.strided:
        return lambda: True
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


def unguarded(module: GraphModule) -> AbstractContextManager[None]:
    """While it is entered, what is asked of the symbols of a captured graph becomes no guard."""
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    number = next((value for value in values if isinstance(value, torch.SymInt)), None)
    if number is None:
        return nullcontext()
    suppressed: AbstractContextManager[None] = number.node.shape_env.suppress_guards()
    return suppressed


def unwritten_module(root: torch.nn.Module, graph: torch.fx.Graph) -> GraphModule:
    """A graph as a module whose code is not written before it is called; most are only read."""
    with _use_lazy_graph_module(True):
        module: GraphModule = _make_graph_module(root, graph)
    return module


def code_unwritten() -> AbstractContextManager[None]:
    """While it is entered, modules of graphs that PyTorch makes have no code until they are called."""
    context: AbstractContextManager[None] = _use_lazy_graph_module(True)
    return context


def mark_static(tensor: Tensor, dimensions: Iterable[int]) -> None:
    """Let dimensions of a tensor be numbers where it is captured with symbols for sizes."""
    torch._dynamo.mark_static(tensor, list(dimensions))


def fake_on_meta(tensor: Tensor, *, like: Tensor) -> Tensor:
    """A tensor on ``meta`` as a fake one of the mode and on the device of another; they share the storage."""
    assert isinstance(like, FakeTensor)
    return FakeTensor(like.fake_mode, tensor, like.device)


def expression(number: torch.SymInt) -> Any:
    """A symbolic number as an expression of sympy, by what is known of its symbols so far.

    Strides of a slice are products of ``Max(1, s - 1)``, where all sizes that the trace is right for are
    larger than 1: of two numbers the larger is taken if it is known.
    """
    environment = number.node.shape_env
    known = _EXPRESSIONS.setdefault(environment, {})
    given = number.node.expr
    if given not in known:
        found = given
        while told := _told_maxima(found, environment.var_to_range):
            found = found.xreplace(told)
        known[given] = found
    return known[given]


def possible(number: Any) -> Any:
    """The least that a number of the data (``start.item()``) can be from 0 on; other numbers as they are."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    ranges, symbols = number.node.shape_env.var_to_range, number.node.expr.free_symbols
    least = {each: max(0, _whole(ranges[each].lower) or 0) for each in symbols}
    return number.node.pytype(number.node.expr.subs(least))


_EXPRESSIONS: Final[WeakKeyDictionary[Any, dict[Any, Any]]] = WeakKeyDictionary()


def _told_maxima(given: Any, ranges: Any) -> dict[Any, Any]:
    """The maxima in an expression of which it is known which number is the largest, each with that."""
    found = {}
    for each in given.atoms(Max):
        bounds = [(part, bound_sympy(part, ranges)) for part in each.args]
        for part, bound in bounds:
            if all(bound.lower >= other.upper for its, other in bounds if its is not part):
                found[each] = part
    return found


@dataclass(frozen=True)
class ShapeFacts:
    """What PyTorch knows of the symbols of a trace, and relies on.

    Attributes
    ----------
    ranges
        By the name of a symbol its least and greatest number; None if there is none.
    sample
        By the name of a symbol its number in the sample that was traced.
    guards
        Conditions, as expressions of sympy: where one fails, another graph would have been traced.
    """

    ranges: dict[str, tuple[int | None, int | None]]
    sample: dict[str, int]
    guards: tuple[Any, ...]


def specialize_floats(module: GraphModule) -> None:
    """Let Dynamo capture a graph again with numbers for the floats that are symbols in it, if there are any.

    Raises
    ------
    TensorifyScalarRestartAnalysis
        What Dynamo captures again for.
    """
    values = (node.meta.get("example_value") for node in module.graph.nodes)
    floats = {str(value.node.expr) for value in values if isinstance(value, torch.SymFloat)}
    found = [name for name in floats if name.startswith("zf")]
    if found:
        for name in found:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis


def _whole(end: Any) -> int | None:
    return int(end) if end.is_Integer else None


def shape_facts(module: GraphModule) -> ShapeFacts | None:
    """What is known of the symbols of a captured graph; None if it has none."""
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    number = next((value for value in values if isinstance(value, torch.SymInt)), None)
    if number is None:
        return None
    environment = number.node.shape_env
    known = {str(symbol): int(value) for symbol, value in environment.backed_var_to_val.items()}
    ranges = {
        str(symbol): (_whole(found.lower), _whole(found.upper))
        for symbol, found in environment.var_to_range.items()
        if str(symbol) in known
    }
    guards = tuple(environment.replace(guard.expr) for guard in environment.guards)
    return ShapeFacts(ranges, known, guards)
