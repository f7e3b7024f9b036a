"""What a node of a joint graph is, what it does, and where in the model it comes from."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.private_torch import OpOverload, arg_tree_leaves, detect_fake_mode, with_effects


def joint_outputs(module: fx.GraphModule) -> list[Any]:
    """The flat outputs of a joint graph: forward outputs, then gradients."""
    output = next(iter(module.graph.find_nodes(op="output")))
    return list(arg_tree_leaves(*output.args))


def fake_call(target: Any, args: Any, kwargs: Any, like: fx.Node) -> Any:
    """What a call on nodes gives, as fake tensors; ``like``: a node that has some."""
    mode = detect_fake_mode([like.meta["val"]])
    assert mode is not None
    given: Any = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
    with mode:
        return target(*given[0], **given[1])


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's storages: its indices and values if it is sparse, else itself."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors in a node's ``meta['val']``; the parts of sparse ones."""
    given = value if isinstance(value, (list, tuple)) else [value]
    return [part for item in given if isinstance(item, torch.Tensor) for part in strided_parts(item)]


def storages(node: fx.Node) -> set[int]:
    """Names of the storages that the node's tensors live in, as traced."""
    return {int(part.untyped_storage()._cdata) for part in tensors(node.meta.get("val"))}


CUDA_ALLOCATION = 512
"""Bytes: the caching allocator of CUDA rounds sizes up to multiples of it."""


def allocated_bytes(size: int, device: str) -> int:
    """What a kind of device allocates where ``size`` bytes are asked for."""
    return -(-size // CUDA_ALLOCATION) * CUDA_ALLOCATION if device == "cuda" else size


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the whole storage, as they are allocated on its device."""
    return allocated_bytes(int(tensor.untyped_storage().nbytes()), tensor.device.type)


def is_mutation(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_check(node: fx.Node) -> bool:
    """Whether the node returns nothing, and is there for the error that it may raise: an ``assert``."""
    if not isinstance(node.target, OpOverload):
        return False
    return not node.target._schema.returns and not is_mutation(node)


def argument(node: fx.Node, name: str, op: object = None) -> Any:
    """The value bound to schema argument ``name``, or None where the op has no such argument.

    ``op``: whose schema it is, if not that of the node's target.
    """
    op = op or node.target
    if not isinstance(op, OpOverload):
        return None
    for position, entry in enumerate(op._schema.arguments):
        if entry.name == name:
            if entry.name in node.kwargs:
                return node.kwargs[name]
            return node.args[position] if position < len(node.args) else entry.default_value
    return None


NUMBERS: Final = "hybridremat_numbers"
"""The meta of a call that a rewrite has made: a :class:`Numbers`, if it is one at other sizes of the step."""


@dataclass(frozen=True)
class Numbers:
    """What the whole numbers are that a call is given, where a step is planned for other sizes as well.

    A list of them that is the shape of ``shape_of`` stands for it; all others depend on no size.
    """

    shape_of: fx.Node | None = None


def put_back(node: fx.Node) -> tuple[Any, list[int], int, int | None, int | None, int] | None:
    """Of a call that puts a slice into zeros: what it puts there, their sizes, dimension, start, end, step.

    None for any other call.
    """
    args: Any = node.args
    if node.target is torch.ops.aten.slice_backward.default:
        source, size, dim, start, end, step = args
        return source, list(size), dim, start, end, step
    if node.target is not torch.ops.aten.slice_scatter.default or not is_zero(args[0]):
        return None
    dim, start, end, step = (argument(node, name) for name in ("dim", "start", "end", "step"))
    return args[1], [int(each) for each in node.meta["val"].shape], dim, start, end, step


def is_zero(node: object) -> bool:
    """Whether a node makes zeros."""
    filled = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)
    return isinstance(node, fx.Node) and node.target in filled and bool(node.args[-1] == 0)


def slice_arguments(node: fx.Node) -> tuple[int, int | None, int | None, int]:
    """Dimension, start, end and step of a slice."""
    dim, start, end, step = (argument(node, name) for name in ("dim", "start", "end", "step"))
    return dim, start, end, step


def is_random(node: fx.Node) -> bool:
    """Whether running the node draws from the generator.

    Attention kernels carry the tag even where their dropout probability is 0 and nothing is drawn.
    """
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return bool(argument(node, "dropout_p") != 0.0)


_CHECKS = ("aten._linalg_check_errors.default",)
"""Ops whose effect is an error about what they are given: on inputs that are fine they can be tried."""


def has_effects(node: fx.Node) -> bool:
    """Whether a run of the node shows outside the step: an op registered with an effect, or a collective."""
    if node.target is with_effects:
        return str(node.args[1]) not in _CHECKS
    return is_collective(node)


def is_collective(node: fx.Node) -> bool:
    """Whether the node is an op in which all ranks take part, or waits for one."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional"


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective: it returns what it was given, and may run again."""
    return is_collective(node) and "wait_tensor" in str(node.target)


def is_gather(node: fx.Node) -> bool:
    """Whether the node gathers what ranks hold parts of: it computes nothing."""
    return is_collective(node) and "all_gather_into_tensor" in str(node.target)


def is_scalar(node: fx.Node) -> bool:
    """Whether the node is a 0-dimensional tensor (a loss)."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


_IN_TRAINING = ("training", "train", "update")
_STATISTICS = ("running_mean", "running_var")


def ignored_statistics(node: fx.Node, op: object = None) -> tuple[fx.Node, ...]:
    """The running statistics that a normalization in training mode is given.

    They only enter the updated statistics (:func:`updated_statistics`) and no other result, forward or
    backward. Empty for every other node.
    """
    op = op or node.target
    if not isinstance(op, OpOverload):
        return ()
    if not any(argument(node, name, op) is True for name in _IN_TRAINING):
        return ()
    names = [entry.name for entry in op._schema.arguments]
    others = [argument(node, name, op) for name in names if name not in _STATISTICS]
    given = [argument(node, name, op) for name in _STATISTICS]
    return tuple(item for item in given if isinstance(item, fx.Node) and item not in others)


def updated_statistics(node: fx.Node) -> tuple[fx.Node, ...]:
    """The getitems of a normalization that hold its updated running statistics."""
    if not isinstance(node.target, OpOverload):
        return ()
    named = [(entry.name or "").startswith("running_") for entry in node.target._schema.returns]
    return tuple(
        user
        for user in node.users
        if user.target is operator.getitem and isinstance(user.args[1], int) and named[user.args[1]]
    )


_STACK_KEYS = ("nn_module_stack", "fwd_nn_module_stack")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module, as in ``named_modules()``; empty for the model itself."""
    for key in _STACK_KEYS:
        stack = node.meta.get(key)
        if stack:
            return _clean(str(list(stack.values())[-1][0]))
    return ""


def name_modules(module: fx.GraphModule, unit: str) -> None:
    """Put the name of a unit before the paths of modules in one of Dynamo's graphs, which begin in it."""
    for node in module.graph.nodes if unit else ():
        own = {unit: (f"L['self'].{unit}", None)}  # ops of its own have no path
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            own[key] = (f"L['self'].{unit}.{_clean(str(path))}".rstrip("."), kind)
        node.meta["nn_module_stack"] = own


def _clean(path: str) -> str:
    """``L['model'].h._modules['0'].mlp`` → ``h.0.mlp``."""
    flat = _ITEM.sub(r".\1", path.replace("._modules", "")).replace("..", ".")
    parts = [part for part in flat.split(".") if part]
    roots = {"L", "self", "model", "fn", "_orig_mod"}
    start = 1
    if parts and parts[0] == "L":
        start = 2
    elif parts and parts[0] not in roots:
        start = 0
    return ".".join(parts[start:])


def source_line(node: fx.Node) -> str:
    """``file:line`` of the innermost frame of the model's own code, or empty."""
    frames = _LINE.findall(node.meta.get("stack_trace") or "")
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
