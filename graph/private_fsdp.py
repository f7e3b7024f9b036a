"""What torch's FSDP2 does for a module: read from states that have no public face.

Read and run with torch 2.11 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ShardedModule:
    """How FSDP2 shards the parameters of one module.

    Attributes
    ----------
    ranks
        How many ranks they are split among.
    param_dtype, reduce_dtype, output_dtype
        In which they are gathered, their gradients reduced, and what it returns; None for their own.
    reshards
        Whether they are freed after the forward; None where FSDP2 decides (the model itself).
    unusual
        What else was set, of which the memory is not known; empty for nothing.
    group
        Identifies what is gathered together: modules of one call of ``fully_shard`` have the same.
    """

    ranks: int
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    reshards: bool | None
    unusual: str
    group: int


def sharded_module(module: nn.Module) -> ShardedModule | None:
    """How ``fully_shard`` has been called for a module; None if it has not."""
    state = _state(module)
    if state is None:
        return None
    groups = _groups(state)
    policy = state._mp_policy
    unusual = next(_unusual(state, groups), "")
    ranks = {getattr(each.mesh_info, "shard_mesh_size", 1) for each in groups} or {0}
    reshards = next((each.post_forward_mesh_info is not None for each in groups), None)
    return ShardedModule(
        max(ranks),
        _name(policy.param_dtype),
        _name(policy.reduce_dtype),
        _name(getattr(policy, "output_dtype", None)),
        None if state._auto_reshard_after_forward else reshards,
        unusual,
        id(state),
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called for a module itself."""
    return _state(module) is not None


def _state(module: nn.Module) -> Any:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: no module is one of its
    kind = getattr(fsdp, "FSDPModule", None)
    return module._get_fsdp_state() if kind is not None and isinstance(module, kind) else None


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # one, in older releases
    found = [state._fsdp_param_group] if several is None else [*several]
    return [each for each in found if each is not None]


def _name(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _unusual(state: Any, groups: list[Any]) -> Iterator[str]:
    """What is set in another way than by default."""
    if len(groups) > 1:
        yield "a shard_placement_fn with several meshes"
    if not state._mp_policy.cast_forward_inputs:
        yield "MixedPrecisionPolicy(cast_forward_inputs=False)"
    if state._states_to_forward_prefetch or state._states_to_backward_prefetch:
        yield "set_modules_to_forward_prefetch or set_modules_to_backward_prefetch"
    for group in groups:
        yield from _unusual_in_group(group)


def _unusual_in_group(group: Any) -> Iterator[str]:
    if type(group.mesh_info).__name__ != "FSDPMeshInfo":
        yield "a mesh of two dimensions (HSDP), or replication"
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        yield f"offload_policy={type(group.offload_policy).__name__}(…)"
    after = group.post_forward_mesh_info
    if after is not None and after is not group.mesh_info and after != group.mesh_info:
        yield "reshard_after_forward= a number of ranks"
    if not group.reduce_grads:
        yield "set_requires_gradient_sync(False)"
    if not group.reshard_after_backward:
        yield "set_reshard_after_backward(False)"
    if not getattr(group, "unshard_in_backward", True):
        yield "set_unshard_in_backward(False)"
    if getattr(group, "unshard_async_op", False):
        yield "a changed unshard_async_op"
    if getattr(group, "reduce_scatter_max_input_buffers", 1) != 1:
        yield "set_reduce_scatter_max_input_buffers"
    for name in ("_all_gather_comm", "_reduce_scatter_comm"):
        if not type(getattr(group, name, None)).__name__.startswith(("Default", "NoneType")):
            yield "a custom all-gather or reduce-scatter"
    if any(each.fsdp_placement.dim != 0 for each in group.fsdp_params):
        yield "a shard_placement_fn with other dimensions than the first"
