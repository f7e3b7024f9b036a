"""``memory_limit="auto"``: what a CUDA device has left for the training step, computed before planning.

That is what the driver reports as free plus what PyTorch's allocator holds unused, less a margin and the
optimizer's state, which the first ``optimizer.step()`` allocates and keeps. Parameter gradients are step
memory.

The margin is the larger of 2 % and 256 MiB, as the device loses more than the bytes that a plan counts. The
allocator takes memory from the driver in segments: 2 MiB for requests up to 1 MiB, 20 MiB up to 10 MiB,
multiples of 2 MiB beyond; a segment in partial use cannot serve a larger request. cuBLAS and cuBLASLt take
workspaces at their first call (on Hopper 32 MiB each, for each stream), CUDA loads kernels at their first
launch, and the driver does not guarantee what it reports as free (``cudaMemGetInfo``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hybridremat.compiler.model_checks import require_trainable
from hybridremat.errors import LimitError
from hybridremat.planning.settings import Settings
from hybridremat.runtime.optimizer_state import guessed_state, state_to_come
from hybridremat.units import format_bytes, parse_bytes

AUTO = "auto"
MARGIN_SHARE, LEAST_MARGIN = 0.02, 256 << 20


@dataclass(frozen=True)
class AutoLimit:
    """How a limit was computed; all but the device in bytes.

    Attributes
    ----------
    device
        As PyTorch names it.
    free
        What the driver reports as free, no more than the process may take
        (``torch.cuda.set_per_process_memory_fraction``).
    cached
        What the allocator holds unused.
    optimizer_state
        State that the optimizer has yet to allocate.
    margin
        Kept free for fragmentation, workspaces and kernels.
    """

    device: str
    free: int
    cached: int
    optimizer_state: int
    margin: int

    @property
    def limit(self) -> int:
        """Bytes that are left for the step."""
        return self.free + self.cached - self.optimizer_state - self.margin

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.limit)} left on {self.device}: free {format_bytes(self.free)}, "
            f"+ {format_bytes(self.cached)} held by the allocator and unused, "
            f"− {format_bytes(self.optimizer_state)} of optimizer state to come, "
            f"− {format_bytes(self.margin)} margin"
        )


def auto_limit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    margin: int | str | None = None,
) -> AutoLimit:
    """Compute the step memory that a model's CUDA device has left.

    Parameters
    ----------
    model
        On its device, together with everything else that is to stay there: inputs, other models.
    optimizer
        The optimizer, or several. The state that it has yet to allocate is exact if its step runs on meta
        tensors. None: twice the trained parameters, as Adam needs, all yet to be allocated.
    margin
        Bytes or a size; by default the larger of 2 % of what is left and 256 MiB.

    Raises
    ------
    LimitError
        If the model is not on one CUDA device, the margin cannot be read, or nothing is left.
    ModelError
        If the model has no trainable parameters.

    Notes
    -----
    ``wrap(model, kwargs=batch, memory_limit=auto_limit(model, optimizer).limit)`` is ``memory_limit="auto"``
    for a given optimizer.
    """
    require_trainable(model)
    device = _one_cuda_device(model)
    kept = None if margin is None else parse_bytes(margin, name="margin")
    free, cached = _free(device), torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if kept is None:
        kept = max(int(MARGIN_SHARE * (free + cached)), LEAST_MARGIN)
    found = AutoLimit(str(device), free, cached, _state(model, optimizer), kept)
    if found.limit <= 0:
        raise LimitError(
            f"nothing is left for a step: {found}. Free memory on the device, train fewer parameters, or "
            'give a limit in bytes (6442450944, "6GiB").'
        )
    return found


def with_auto_limit(settings: Settings, model: nn.Module) -> Settings:
    """The settings with ``memory_limit="auto"`` replaced by bytes, and how these were computed.

    Raises
    ------
    LimitError, ModelError
        As :func:`auto_limit`.
    """
    if settings.memory_limit != AUTO:
        return settings
    found = auto_limit(model)
    return replace(settings, memory_limit=found.limit, reckoning=str(found))


def _one_cuda_device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        return next(iter(devices))
    names = ", ".join(sorted(map(str, devices)))
    raise LimitError(
        f'memory_limit="auto" reads the free memory of one CUDA device, and this model is on {names}: give '
        'bytes (6442450944), a size ("6GiB"), or a share of the plain step\'s memory ("40%")'
    )


def _free(device: torch.device) -> int:
    """Bytes that the process can still get from the driver."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
) -> int:
    if optimizer is None:
        return guessed_state(model.parameters())
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return sum(map(state_to_come, several))
