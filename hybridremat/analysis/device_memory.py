"""What a device has for training: its memory, and what is kept free of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn

from hybridremat.compiler.capture import model_device
from hybridremat.errors import LimitError
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.runtime.auto_limit import LEAST_MARGIN, MARGIN_SHARE
from hybridremat.units import parse_bytes

CONTEXT = 512 << 20
"""Bytes that CUDA takes of a card for a process before its first tensor, some 300 to 600 MiB: our guess."""


@dataclass(frozen=True)
class Room:
    """A device by name, the bytes that it has for training, and those of them that are kept free."""

    device: str
    memory: int
    margin: int


def device_memory(
    model: nn.Module, spec: DeviceSpec | None, memory: int | str | None, resident: int
) -> tuple[str, int]:
    """The device's name, and the bytes that it has for this; ``resident`` of them may be there already.

    Raises
    ------
    LimitError
        If ``memory`` is nothing, or cannot be read.
    """
    name = model_device(model) if spec is None else spec.name
    if memory is not None:
        available = parse_bytes(memory, name="memory")
        if available < 1:
            raise LimitError(f"memory={memory!r} is nothing: give what the device has, in bytes or \"6GiB\"")
        return name, available
    if spec is not None:
        return name, spec.memory
    if name == "cuda":
        device = next(model.parameters()).device
        held = torch.cuda.memory_reserved(device)
        others = max(0, torch.cuda.memory_allocated(device) - resident)
        return str(device), torch.cuda.mem_get_info(device)[0] + held - others
    return name, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def kept_free(model: nn.Module, spec: DeviceSpec | None, margin: int | str | None, left: int) -> int:
    """Bytes that are kept free of those that are ``left``: as asked for, or for allocator and context.

    Raises
    ------
    LimitError
        If ``margin`` cannot be read.
    """
    if margin is not None:
        return parse_bytes(margin, name="margin")
    if spec is None and model_device(model) != "cuda":
        return 0
    kept = max(int(MARGIN_SHARE * max(0, left)), LEAST_MARGIN)
    return kept if spec is None else kept + CONTEXT
