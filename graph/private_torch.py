"""Every private PyTorch name that hybridremat uses, in one place: a new torch release is this file's work.

Those of Inductor stand in ``private_inductor``, which is imported only where it is asked for.

Read and run with torch 2.11, 2.12 and 2.13, the range of pyproject.toml; ``make test-torch`` runs the tests
with another release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, _neg_view
from torch._C import _will_engine_execute_node
from torch._C._autograd import _get_current_graph_task_keep_graph, _profiler_enabled
from torch._C._dynamo.eval_frame import reset_code
from torch._C._profiler import _EventType
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    TorchRuntimeError,
)
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTOutput, TangentAOTInput
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    force_save_bw_mutation_src,
    force_save_collectives,
    force_save_effectful_ops,
)
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.effects import with_effects
from torch._inductor import config as inductor_config
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import arg_tree_leaves, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store  # not there in builds without torch.distributed


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
    "FailOnRecompileLimitHit",
    "FakeTensor",
    "HigherOrderOperator",
    "LoggedByName",
    "OpOverload",
    "TorchDynamoException",
    "TorchRuntimeError",
    "_disable_current_modes",
    "_extract_fwd_bwd_modules",
    "_make_graph_module",
    "_neg_view",
    "_profiler_enabled",
    "allow_second_backward",
    "allows_second_backward",
    "aot_autograd",
    "arg_tree_leaves",
    "boxed_nop",
    "change_count",
    "detect_fake_mode",
    "dynamo_config",
    "force_save_bw_mutation_src",
    "force_save_collectives",
    "force_save_effectful_ops",
    "gradient_hooks",
    "graph_break",
    "graph_is_retained",
    "group_store",
    "hooks_before_and_after",
    "inductor_config",
    "inside_distributed_data_parallel",
    "new_node_number",
    "node_number",
    "ones_for_result",
    "overwritten_inputs",
    "reset_code",
    "run_and_save_rng_state",
    "tangent_output",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "will_run_in_this_backward",
    "with_effects",
]


class LoggedByName(set[Callable[..., Any]]):
    """Functions for a setting of Dynamo; a copy has their names instead.

    Dynamo writes a copy of its settings to its log as JSON. 2.11 does not leave out the functions whose calls
    it ignores, and logged an error for each graph, which kept the graph alive.
    """

    def __deepcopy__(self, _: object) -> set[str]:
        return {function.__qualname__ for function in self}


def graph_break(error: TorchDynamoException) -> str:
    """Why Dynamo breaks a graph, in its words, and the two innermost lines of code that it was in."""
    reason, _, stack = str(error).partition("from user code:")
    lines = [line.rstrip() for line in reason.splitlines() if line.strip()][:8]
    code = [line for line in stack.partition("\nSet ")[0].splitlines() if line.strip(" ^")]
    return "\n".join([*lines, "from user code:", *code[-4:]] if code else lines)


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


def node_number(node: Any) -> int:
    """Grows with each node of autograd graphs that a thread makes; of leaves it is beyond all others."""
    return int(node._sequence_nr())


def new_node_number() -> int:
    """A number that no node before has, and none after is below."""
    with torch.enable_grad():
        return node_number(torch.zeros((), requires_grad=True).view(()).grad_fn)


def ones_for_result(node: Any, index: int) -> Tensor:
    """A gradient for a result of an autograd node."""
    described = node._input_metadata[index]
    return torch.ones(described.shape, dtype=described.dtype, device=described.device)


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
