"""The two ops of an opaque call, as PyTorch knows them.

``forward(Tensor first, Tensor[] others) -> Tensor[]`` returns the new storages of what the call returns and
of what its backward keeps, each once; ``backward(Tensor?[] grads, Tensor[] kept) -> Tensor[]`` those of the
gradients. Both are functional: they may run again, and random ones replay the generator as any other op does
(its device is that of the first tensor).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridremat.graph.opaque.places import Description
from hybridremat.graph.opaque.region import Region
from hybridremat.graph.opaque.trial import OpaqueOp, tried
from hybridremat.graph.outside import outside_tracing

NAMESPACE = "hybridremat_opaque"
_library = torch.library.Library(NAMESPACE, "DEF")
_ops: dict[str, OpaqueOp] = {}
_backward_of: dict[object, OpaqueOp] = {}


def backward_of(target: object) -> OpaqueOp | None:
    """The call that an op is the backward of, if it is one."""
    return _backward_of.get(target)


def is_opaque(target: object) -> bool:
    """Whether something is an op of an opaque call."""
    return getattr(target, "namespace", "") == NAMESPACE


def opaque_op(region: Region) -> OpaqueOp:
    """The ops of a region, defined and tried the first time.

    Raises
    ------
    CaptureError
        If it cannot be one op.
    """
    key = region.key
    if key not in _ops:
        with outside_tracing():
            op = tried(region)
        _define(key, op)
        _ops[key] = op
    return _ops[key]


def _define(key: str, op: OpaqueOp) -> None:
    """Register both ops with PyTorch."""
    tags = (torch.Tag.nondeterministic_seeded,) if op.random else ()
    _library.define(f"{key}(Tensor first, Tensor[] others) -> Tensor[]", tags=tags)
    _library.define(f"{key}_backward(Tensor?[] grads, Tensor[] kept) -> Tensor[]")
    _library.impl(key, lambda first, others: op.run([first, *others]), "CompositeExplicitAutograd")
    _library.impl(f"{key}_backward", op.run_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{key}", _fakes(lambda *_: op.described), lib=_library)
    of_grads = _fakes(lambda grads, _: op.gradients_for(grads).described)
    torch.library.register_fake(f"{NAMESPACE}::{key}_backward", of_grads, lib=_library)
    namespace = getattr(torch.ops, NAMESPACE)
    op.forward, op.backward = getattr(namespace, key).default, getattr(namespace, f"{key}_backward").default
    _backward_of[op.backward] = op


def _fakes(described: Callable[..., Description]) -> Callable[..., list[Tensor]]:
    def fake(*given: Any) -> list[Tensor]:
        return [layout.empty() for layout in described(*given).new]

    return fake
