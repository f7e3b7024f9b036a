"""Which attention kernel PyTorch takes on a CUDA device, by the rules of its sources.

``select_sdp_backend`` in ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, for dense tensors of sizes
that are known; cuDNN as in builds for CUDA 13, which have one that is preferred on sm_90 and sm_10x.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["cudnn", "flash", "efficient", "math"]

_HALVES = (torch.float16, torch.bfloat16)
_CUDNN_HEAD, _FLASH_HEAD = 128, 256  # most numbers in a head
_SIZE_OF_CUDNN = 65535  # most samples, and most heads


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of ``scaled_dot_product_attention``, with the names that it gives them."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value: (samples, heads, tokens, numbers in a head)."""
        return self.query, self.key, self.value

    @property
    def trained(self) -> bool:
        """Whether one of them needs a gradient."""
        return torch.is_grad_enabled() and any(each.requires_grad for each in self.tensors)


def kernel_of(call: AttentionCall, capability: int) -> Kernel:
    """The kernel of a call on a device of this compute capability (90 for sm_90)."""
    if not _dense(call) or len({each.dtype for each in call.tensors}) > 1:
        return "math"
    if capability // 10 in (9, 10) and _takes_cudnn(call):
        return "cudnn"
    if capability >= 80 and _takes_flash(call, capability):
        return "flash"
    return "efficient" if _takes_efficient(call, capability) else "math"


def _dense(call: AttentionCall) -> bool:
    """Four dimensions, none of them of no size, of the same samples."""
    if any(each.dim() != 4 or 0 in each.shape for each in call.tensors):
        return False
    return len({each.shape[0] for each in call.tensors}) == 1


def _adjacent(call: AttentionCall, *, one_is_enough: bool) -> bool:
    """Whether the numbers of a head lie side by side; ``one_is_enough``: or are one."""
    return all(each.stride(-1) == 1 or (one_is_enough and each.shape[-1] == 1) for each in call.tensors)


def _heads_fit(call: AttentionCall, *, grouped: bool = True) -> bool:
    """As many heads of each, or (``grouped``) of queries a multiple of those of keys and values."""
    query, key, value = (each.shape[1] for each in call.tensors)
    if query == key == value:
        return True
    return grouped and call.enable_gqa and key == value and query % key == 0


def _mask_fits(call: AttentionCall) -> bool:
    """Whether cuDNN takes the mask."""
    mask = call.attn_mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    whole = (*call.query.shape[:3], call.key.shape[2])
    return all(size in (1, most) for size, most in zip(mask.shape, whole[-mask.dim() :], strict=True))


def _takes_cudnn(call: AttentionCall) -> bool:
    strict = torch.are_deterministic_algorithms_enabled()
    if strict and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    heads = {each.shape[-1] for each in call.tensors}
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and call.query.dtype in _HALVES
        and _mask_fits(call)
        and call.dropout_p * 16 % 1 == 0
        and all(size % 8 == 0 and size <= _CUDNN_HEAD for size in heads)
        and max(call.query.shape[:2]) <= _SIZE_OF_CUDNN
        and call.key.shape[2] > 1
        and (call.query.shape[2] > 1 or not call.dropout_p)
        and _heads_fit(call)
        and _adjacent(call, one_is_enough=True)
    )


def _takes_flash(call: AttentionCall, capability: int) -> bool:
    head = call.query.shape[-1]
    small_chip = 86 <= capability <= 89 or capability >= 120
    too_large = (head > 224 and call.dropout_p > 0) or 192 < head <= 224
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and call.query.dtype in _HALVES
        and call.attn_mask is None
        and head <= _FLASH_HEAD
        and all(left.shape[-1] == right.shape[-1] for left, right in pairwise(call.tensors))
        and not (call.trained and small_chip and too_large)
        and not (call.is_causal and call.query.shape[2] != call.key.shape[2])
        and _heads_fit(call)
        and _adjacent(call, one_is_enough=True)
    )


def _takes_efficient(call: AttentionCall, capability: int) -> bool:
    dtype = call.query.dtype
    aligned = 4
    if dtype in _HALVES:
        aligned = 8 if capability >= 70 else 1
    elif capability < 80:
        aligned = 1
    known = (*_HALVES, torch.float32) if capability >= 80 else (torch.float16, torch.float32)
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and dtype in known
        and call.query.shape[-1] == call.key.shape[-1]
        and call.query.shape[-1] % aligned == 0
        and call.value.shape[-1] % aligned == 0
        and _heads_fit(call, grouped=False)
        and _adjacent(call, one_is_enough=False)
    )
