"""Checks of models and sample inputs before anything is captured."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hybridremat.errors import CaptureError, InputError, ModelError


def require_capturable(model: nn.Module) -> None:
    """Refuse a model that cannot be captured whole on one device.

    Raises
    ------
    ModelError, CaptureError
    """
    require_local(model)
    require_traceable(model)


def require_trainable(model: object) -> None:
    """Refuse what is no module, and a module without trainable parameters.

    Raises
    ------
    ModelError
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} has no trainable parameters, so it has no backward pass to plan. "
            "Set requires_grad on the parameters to be trained before planning."
        )


def require_traceable(model: nn.Module) -> None:
    """Refuse ``nn.LSTM`` and its kind, which PyTorch does not trace.

    Dynamo's ``allow_rnn`` is no way out: the fused kernels hand opaque workspaces to their backward, which
    crash the process when timed alone on random numbers, and dropout between layers draws other masks than
    plain PyTorch (torch 2.13).

    Raises
    ------
    CaptureError
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            kind = type(module).__name__
            raise CaptureError(
                f"{name or 'the model'} is an nn.{kind}, which PyTorch cannot trace into a graph whose "
                "memory is known. Run its steps yourself with nn.LSTMCell, nn.GRUCell or nn.RNNCell in a "
                "loop, or wrap the part of the model without it."
            )


def require_matching_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse sample inputs that the model's ``forward`` does not take.

    Raises
    ------
    InputError
    """
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the sample inputs do not fit {type(model).__name__}.forward: {error}. Pass what one training "
            "step passes: args=(…) and kwargs={…}."
        ) from error
    except ValueError:
        return  # a forward without a signature: capture tells


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
                f"{where} is sharded by FSDP, which gathers parameters while a step runs; such steps are "
                "not planned. Use DistributedDataParallel(hybridremat.wrap(module, …)), or FSDP with its own "
                "activation checkpointing and without hybridremat."
            )


def _sharded_types() -> tuple[type, ...]:
    """FSDP's classes, if they have been imported: else no module is one of them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found = (getattr(fsdp, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))
    return tuple(kind for kind in found if isinstance(kind, type))
