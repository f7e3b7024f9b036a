"""Constant tensors of captured graphs, each kept once.

Steps are captured again and again, some of them while they run, and PyTorch copies what backwards are
compiled of: every time, constants would take their bytes anew, beyond what a plan counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from hybridremat.graph.private_torch import _disable_current_modes

_KNOWN: Final[defaultdict[Hashable, WeakValueDictionary[int, Tensor]]] = defaultdict(WeakValueDictionary)


def share_constants(module: fx.GraphModule) -> None:
    """Put known constants in the place of a graph's that have the same bits; no graph writes to any."""
    names = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    with _disable_current_modes():  # also called in the middle of a compilation
        for name in names:
            own = getattr(module, name, None)
            if type(own) is Tensor and _is_its_own(own):
                setattr(module, name, _known_as(own))


def _is_its_own(tensor: Tensor) -> bool:
    """Whether PyTorch has allocated a tensor: the memory of another library's may change."""
    strided = tensor.layout == torch.strided and not tensor.is_meta
    return strided and tensor.untyped_storage().resizable()


def _known_as(own: Tensor) -> Tensor:
    alike = _KNOWN[own.dtype, own.device, own.shape, own.stride()]
    for known in list(alike.values()):
        if known is own or _bits(known).equal(_bits(own)):
            return known
    alike[id(own)] = own
    return own


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
