"""Modules that spread a model over devices or processes: they go around a wrapped model, never inside."""

from __future__ import annotations

import sys

from torch import nn

from hybridremat.errors import ModelError


def require_local(model: nn.Module) -> None:
    """Refuse a model that is, or has in it, a module that spreads it over devices or processes.

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
    """FSDP's classes, if anything has imported them: without that, no module is one of them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found = (getattr(fsdp, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))
    return tuple(kind for kind in found if isinstance(kind, type))
