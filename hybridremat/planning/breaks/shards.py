"""What FSDP2 gathers and reduces of one group of parameters, in bytes.

Sizes are those of ``torch.distributed.fsdp._fully_shard``: each parameter's first dimension is split evenly,
with rows added where it has to be. On the CPU, gradients to which rows are added are copied before they go
into the buffer that is reduced, and so is each in turn where that has another dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hybridremat.compiler.model_state import Gathered, in_dtype
from hybridremat.graph.costs.collectives import scatters_a_copy
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.plans.fsdp import Fsdp


@dataclass(frozen=True)
class Shard:
    """Parameters that are gathered together: bytes.

    Attributes
    ----------
    gathered
        Of all of them, with padding.
    buffer
        Of the buffer into which they are gathered first; none on one rank.
    gradients
        Of the gradients that a backward makes.
    reduced
        Of the buffer in which they are reduced, with padding.
    copied
        Of copies of gradients from which that buffer is filled: of all with padding and, where it has
        another dtype, one by one of each.
    kept
        Of the gradients that stay on each rank.
    cast
        Of this rank's part of the parameters in the dtype in which they are gathered, if it is another; on
        one rank, of the largest parameter.
    scattered
        Of this rank's part of the gradients as they are reduced, if that is not what stays.
    again
        Of a copy of the reduced buffer that the backend makes while it reduces.
    last
        Of the last gradient, which FSDP2 holds until all are reduced.
    """

    gathered: int = 0
    buffer: int = 0
    gradients: int = 0
    reduced: int = 0
    copied: int = 0
    kept: int = 0
    cast: int = 0
    scattered: int = 0
    again: int = 0
    last: int = 0

    @staticmethod
    def of(
        parameters: Iterable[nn.Parameter],
        fsdp: Fsdp,
        trained: Collection[int] | None = None,
        spec: DeviceSpec | None = None,
    ) -> Shard:
        """These parameters, as they are split.

        ``trained``: identities of those that get a gradient; None for all that require one. ``spec``: the
        device that this is for; None for the one that they are on.
        """
        given = list(dict.fromkeys(parameters))
        every = [_local(each) for each in given]
        used = [each.requires_grad and (trained is None or id(each) in trained) for each in given]
        made = [each for each, is_used in zip(every, used, strict=True) if is_used]
        ranks, gathers, reduces = fsdp.ranks, gathered_dtype(fsdp), _dtype(fsdp.reduce_dtype)
        rounded = _same if spec is None else spec.rounded
        on_cpu = [each for each in made if spec is None and each.device.type == "cpu"]
        copies = [_padded(each, ranks, gathers) for each in on_cpu if _padding(each, ranks)]
        if any(_itemsize(each, gathers) != _itemsize(each, reduces or gathers) for each in on_cpu):
            copies.append(max(_padded(each, ranks, gathers) for each in on_cpu))
        parts = [_padded(each, ranks, gathers) for each in every]
        whole = [rounded(each.numel() * _itemsize(each, gathers)) for each in made]
        reduced = sum(_padded(each, ranks, reduces or gathers) for each in made)
        own = sum(_padded(each, ranks, None) for each in made)
        cast = max(parts, default=0) if ranks == 1 else sum(parts) // ranks
        again = spec is None and ranks > 1 and any(scatters_a_copy(each.device.type) for each in made)
        return Shard(
            sum(map(rounded, parts)),
            rounded(sum(parts)) if ranks > 1 else 0,
            sum(whole),
            rounded(reduced),
            sum(copies),
            rounded(own // ranks),
            0 if gathers is None else rounded(cast),
            0 if own == reduced else rounded(reduced // ranks),
            reduced if again else 0,
            whole[-1] if made and ranks > 1 else 0,
        )

    @property
    def gathering(self) -> int:
        """Most bytes while parameters are gathered; on one rank one by one, without a buffer."""
        if not self.buffer:
            return self.gathered + self.cast
        return self.buffer + max(self.gathered, self.cast)

    @property
    def ahead(self) -> int:
        """Most bytes while they are gathered ahead, not yet copied out of the buffer."""
        return self.buffer + self.cast if self.buffer else 0

    def reducing(self, counted: int) -> int:
        """Most bytes while gradients are reduced, beside what is ``counted`` of them in full."""
        scattering = self.reduced + self.scattered + self.again + self.kept + self.last
        return max(self.gradients + self.reduced + self.copied, scattering) - counted


def part_of(parameter: nn.Parameter, ranks: int) -> torch.Tensor:
    """What the first rank keeps of a parameter, without values: its rows and those of the padding."""
    local = _local(parameter)
    rows = -(-local.shape[0] // ranks) if local.ndim else 1
    part = torch.empty((rows, *local.shape[1:]), dtype=local.dtype, device="meta")
    return part.requires_grad_(parameter.requires_grad)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank has of a parameter that is split by tensors, or the whole one."""
    local = getattr(parameter, "to_local", None)
    return parameter if local is None else local().detach().requires_grad_(parameter.requires_grad)


def _same(size: int) -> int:
    return size


def as_gathered(fsdp: Fsdp | None, *, on_paper: bool = False) -> Gathered | None:
    """What FSDP2 makes of a parameter: in its dtype, at the beginning of memory with the padding.

    ``on_paper``: nobody reads its values.
    """
    if fsdp is None:
        return None
    dtype, ranks = gathered_dtype(fsdp), fsdp.ranks

    def gathered(parameter: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = in_dtype(parameter, None if on_paper else dtype)
        if on_paper and dtype not in (None, parameter.dtype):
            found = torch.empty_like(parameter, dtype=dtype)
        more = _padding(found, ranks)
        if not more or not found.is_contiguous():
            return found
        padded = found.new_empty(_padded(found, ranks, None) // found.itemsize)
        if not on_paper:
            padded[: found.numel()].copy_(found.flatten())
        return padded.as_strided(found.size(), found.stride())

    return gathered


def gathered_dtype(fsdp: Fsdp | None) -> torch.dtype | None:
    """The dtype in which parameters are gathered; None for their own."""
    return None if fsdp is None else _dtype(fsdp.param_dtype)


def returned_dtype(fsdp: Fsdp | None) -> torch.dtype | None:
    """The dtype of what modules return; None for their own."""
    return None if fsdp is None else _dtype(fsdp.output_dtype)


def _dtype(name: str | None) -> torch.dtype | None:
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found


def _itemsize(parameter: torch.Tensor, dtype: torch.dtype | None) -> int:
    return (dtype or parameter.dtype).itemsize


def _padding(parameter: torch.Tensor, ranks: int) -> int:
    """Rows that are added to a parameter, so that its first dimension is split evenly."""
    return -(parameter.shape[0] if parameter.ndim else 1) % ranks


def _padded(parameter: torch.Tensor, ranks: int, dtype: torch.dtype | None) -> int:
    """Bytes of a parameter with these rows."""
    rows = parameter.shape[0] if parameter.ndim else 1
    numbers = parameter.numel() // max(1, rows) * (rows + _padding(parameter, ranks))
    return numbers * _itemsize(parameter, dtype)
