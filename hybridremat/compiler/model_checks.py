"""Checks of models and sample inputs before anything is captured."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from hybridremat.compiler.sample_inputs import input_leaves
from hybridremat.errors import InputError, ModelError
from hybridremat.graph.tracing.fx_nodes import tensors

_CALLS = {"super", "__call__", "_wrapped_call", "_wrapped_call_impl"}


def require_capturable(model: nn.Module) -> None:
    """Refuse a model that cannot be captured whole on one device.

    Raises
    ------
    ModelError
    """
    require_local(model)


def require_current_device(module: fx.GraphModule, inputs: Iterable[object]) -> None:
    """Refuse one of Dynamo's graphs, with its inputs, on a CUDA device that is not the current one.

    Memory, times and generator states are those of the current device.

    Raises
    ------
    ModelError
    """
    values = (*inputs, *(node.meta.get("example_value") for node in module.graph.nodes))
    found = {item.device for value in values for item in tensors(value) if item.device.type == "cuda"}
    if not found:
        return
    current = torch.cuda.current_device()
    others = sorted({each.index for each in found if each.index not in (None, current)})
    if others:
        names = ", ".join(f"cuda:{index}" for index in others)
        raise ModelError(
            f"tensors of the model or its inputs are on {names}, and the current device is cuda:{current}: a "
            "step is planned and run on the current device alone. Call "
            f"torch.cuda.set_device({others[0]}) before, or move model and inputs to cuda:{current}."
        )


def require_trainable(model: object, inputs: object = ()) -> None:
    """Refuse what is no module, and one whose parameters have no shapes, or without a backward.

    It has one if parameters are trained, or tensors among ``inputs`` require a gradient.

    Raises
    ------
    ModelError
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if any(is_lazy(each) for each in (*model.parameters(), *model.buffers())):
        raise ModelError(
            f"{type(model).__name__} has parameters without a shape yet (nn.LazyLinear and the like): run it "
            "on one batch first."
        )
    if _calls_around(type(model).__call__):
        raise ModelError(
            f"{type(model).__name__}.__call__ does not call nn.Module's, so that no plan would run: call "
            "super().__call__(…) there"
        )
    given = (each for each in input_leaves(inputs) if isinstance(each, torch.Tensor))
    if not any(each.requires_grad for each in (*model.parameters(), *given)):
        raise ModelError(
            f"{type(model).__name__} has no trainable parameters, and no sample input requires a gradient, "
            "so it has no backward pass to plan. Set requires_grad on the parameters to be trained before "
            "planning, or on the inputs whose gradients are wanted."
        )


def _calls_around(call: object) -> bool:
    """Whether the ``__call__`` of a class is its own, and names nothing that calls the usual one."""
    own = inspect.unwrap(call) if callable(call) else call
    if call is nn.Module.__call__ or not isinstance(own, FunctionType):
        return False
    return _CALLS.isdisjoint(own.__code__.co_names)


def require_matching_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse sample inputs that the model's ``forward`` does not take.

    Raises
    ------
    InputError
    """
    _require_containers(args, kwargs)
    if torch.is_inference_mode_enabled():
        raise InputError(
            "a training step cannot be planned under torch.inference_mode(), where nothing has gradients: "
            "call this outside of it"
        )
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the sample inputs do not fit {type(model).__name__}.forward: {error}. Pass what one training "
            "step passes: args=(…) and kwargs={…}."
        ) from error
    except ValueError:
        return  # a forward without a signature: capture tells


def _require_containers(args: object, kwargs: object) -> None:
    """Refuse one tensor as ``args``, a mapping there, or anything else as ``kwargs``."""
    if isinstance(args, Mapping):
        raise InputError("args= is a mapping, whose names would be lost: pass kwargs=batch")
    if isinstance(args, torch.Tensor | str) or not isinstance(args, Sequence):
        raise InputError(f"args= is a {type(args).__name__}, not a sequence of arguments: pass args=(x,)")
    if not isinstance(kwargs, Mapping):
        raise InputError(f"kwargs= is a {type(kwargs).__name__}, not a mapping: pass kwargs={{'name': x}}")


def require_local(model: nn.Module) -> None:
    """Refuse a model with a module that spreads it over devices or processes.

    Raises
    ------
    ModelError
    """
    outer, sharded = (nn.parallel.DistributedDataParallel, nn.DataParallel), _sharded_types()
    for name, module in model.named_modules():
        where = f"{type(model).__name__}.{name}" if name else "the model"
        if isinstance(module, outer):
            kind = type(module).__name__
            raise ModelError(
                f"{where} is a {kind}. Wrap the module inside it instead, and spread what comes back: "
                f"model = {kind}(hybridremat.wrap(module, …))."
            )
        if isinstance(module, sharded):
            raise ModelError(
                f"{where} is sharded by FSDP already, which gathers parameters while a step runs. Plan the "
                'units first, and shard them then: hybridremat.wrap_each(model, "layers.*", …, fsdp=ranks), '
                "fully_shard of each unit and of the model. FullyShardedDataParallel (FSDP1) is not planned."
            )


def _sharded_types() -> tuple[type, ...]:
    """FSDP's classes, if they have been imported: else no module is one of them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found = (getattr(fsdp, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))
    return tuple(kind for kind in found if isinstance(kind, type))
