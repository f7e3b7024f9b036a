"""Bytes that an optimizer allocates for its state, found by a step of a copy on meta tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

SLOTS = 2  # of a parameter's size: Adam's two moments, the most that common optimizers keep


def state_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that the next step of ``optimizer`` allocates on its parameters' device.

    Parameters that have state need no more. For the others a copy of the optimizer takes a step on meta
    tensors; if it cannot (its step reads values), two slots of their size are assumed.
    """
    fresh = [_without_state(optimizer, group) for group in optimizer.param_groups]
    try:
        return sum(_twin_state(type(optimizer), group) for group in fresh if group["params"])
    except Exception as error:  # noqa: BLE001 (whatever an optimizer's own step raises)
        logger.info("%s takes no step on meta tensors (%s)", type(optimizer).__name__, error)
        return sum(guessed_state(group["params"]) for group in fresh)


def guessed_state(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of two slots for each parameter that is trained."""
    return SLOTS * sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)


def _without_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    fresh = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
    return {**group, "params": fresh}


def _twin_state(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> int:
    shadows = [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
    for shadow in shadows:
        shadow.grad = torch.empty_like(shadow)
    plain = {name: None if name in ("foreach", "fused") else value for name, value in group.items()}
    twin = kind([{**plain, "params": shadows}])  # type: ignore[call-arg]  # its own defaults are not used
    twin.step()
    items = [item for state in twin.state.values() for item in state.values() if isinstance(item, Tensor)]
    return sum(item.numel() * item.element_size() for item in items if item.device.type == "meta")
