"""Capture attention as a CUDA device would, without one.

``scaled_dot_product_attention`` is put together of other ops, and of which ones depends on the device. While
a step for another device is captured, CPU tensors that stand for others while PyTorch traces get what CUDA
ones would (``scaled_dot_product_attention`` in ``aten/src/ATen/native/transformers/attention.cpp``): the
kernels exist there alone, but their fake kernels and their derivatives exist here, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridremat.compiler.attention_kernels import AttentionCall, Kernel, kernel_of
from hybridremat.graph.private_torch import is_traced, traced_as

_ATEN: Final = torch.ops.aten
_ATTENTION: Final = _ATEN.scaled_dot_product_attention.default
_FLASH_MULTIPLE, _BIAS_MULTIPLE = 8, 16  # of numbers in a head, and of a bias' strides

_lock = threading.RLock()


@contextmanager
def cuda_attention(capability: int) -> Iterator[None]:
    """Capture attention as on a CUDA device of this compute capability.

    What runs on real tensors meanwhile, and in other threads, is as ever.
    """
    here, chosen = threading.get_ident(), capability

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if threading.get_ident() != here or not is_traced((query, key, value)):
            return _ATTENTION.decompose(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
        names = ("attn_mask", "dropout_p", "is_causal")
        call = AttentionCall(query, key, value, **dict(zip(names, args, strict=False)), **kwargs)
        return _ATTENTIONS[kernel_of(call, chosen)](call)

    with _lock, traced_as(_ATTENTION, attention):
        yield


def _cudnn(call: AttentionCall) -> Tensor:
    dropped = call.dropout_p, call.is_causal, False
    bias = _added(call.attn_mask, call.query.dtype)
    made = _ATEN._scaled_dot_product_cudnn_attention(
        *call.tensors, bias, call.trained, *dropped, scale=call.scale
    )
    return made[0]  # type: ignore[no-any-return]


def _flash(call: AttentionCall) -> Tensor:
    head = call.query.shape[-1]
    scale = 1 / math.sqrt(head) if call.scale is None else call.scale
    padded = [_padded(each, _FLASH_MULTIPLE) for each in call.tensors]
    dropped = call.dropout_p, call.is_causal, False
    made: Tensor = _ATEN._scaled_dot_product_flash_attention(*padded, *dropped, scale=scale)[0]
    return made[..., :head] if made.shape[-1] != head else made


def _efficient(call: AttentionCall) -> Tensor:
    bias = _added(call.attn_mask, call.query.dtype)
    if bias is not None:
        if bias.stride(-1) != 1 or any(stride % _BIAS_MULTIPLE for stride in bias.stride()[:-1]):
            size = bias.shape[-1]
            # as many again where it is a multiple and other strides are not
            bias = pad(bias, [0, _BIAS_MULTIPLE - size % _BIAS_MULTIPLE])[..., :size]
        bias = bias.expand(*call.query.shape[:3], call.key.shape[2])
    dropped = call.dropout_p, call.is_causal
    made = _ATEN._scaled_dot_product_efficient_attention(
        *call.tensors, bias, call.trained, *dropped, scale=call.scale
    )
    return made[0]  # type: ignore[no-any-return]


def _math(call: AttentionCall) -> Tensor:
    bias = _added(call.attn_mask, call.query.dtype)
    made = _ATEN._scaled_dot_product_attention_math(
        *call.tensors, bias, call.dropout_p, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
    )
    return made[0]  # type: ignore[no-any-return]


_ATTENTIONS: Final[dict[Kernel, Callable[[AttentionCall], Tensor]]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return pad(tensor, [0, missing]) if missing else tensor


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of truth values as what is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))
