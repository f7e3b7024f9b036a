"""A model as tensor parallel makes it, on the first of several ranks that are not there: its local shapes.

The plan is that which a model from transformers brings, run by PyTorch's ``parallelize_module``. Collectives
of the fake process group move nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import distributed, nn

from hybridremat.errors import ModelError
from hybridremat.graph.private_torch import fake_process_group

STYLES: Final = (
    "colwise",
    "colwise_rep",
    "colwise_gather_output",
    "rowwise",
    "embedding_rowwise",
    "embedding_colwise",
)
"""Those of transformers that PyTorch has, too."""


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """The style of each module that is split, by its name.

    Raises
    ------
    ModelError
        If the model brings no plan, or styles that PyTorch does not have.
    """
    told: Any = getattr(model, "_tp_plan", None)
    patterns: Mapping[str, str] = told if isinstance(told, Mapping) else {}
    own = 'Call parallelize_module yourself, and hybridremat.plan for what it makes, or take shard="fsdp2"'
    names = [name for name, _ in model.named_modules()]
    found = {n: style for glob, style in patterns.items() for n in names if fnmatchcase(n, glob)}
    if not found:
        raise ModelError(
            f"this {type(model).__name__} brings no tensor parallel plan, as many models from transformers "
            f"do (llama, for one). {own}"
        )
    if unknown := sorted({*found.values()}.difference(STYLES)):
        raise ModelError(
            f"the tensor parallel plan of this {type(model).__name__} has styles that PyTorch does not have: "
            f"{', '.join(unknown)}. {own}"
        )
    return found


def why_not_split(model: nn.Module, plan: Mapping[str, str], ranks: int) -> str:
    """Why tensor parallel cannot split a model evenly among so many ranks; empty if it can."""
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            return f"{heads} {name} are not split evenly among {ranks}"
    for name, style in plan.items():
        weight = model.get_parameter(f"{name}.weight")
        length = weight.shape[0 if style.startswith("colwise") or style == "embedding_rowwise" else 1]
        if length % ranks:
            return f"{length} rows or columns of {name!r} are not split evenly among {ranks}"
    return ""


@contextmanager
def parallelized(
    model: nn.Module, plan: Mapping[str, str], ranks: int, *, on_paper: bool
) -> Iterator[nn.Module]:
    """A copy of a model, parallelized on the first of so many ranks; ``on_paper``: on the meta device.

    Raises
    ------
    ModelError
        If a process group is up: that of these ranks is not there.
    """
    if distributed.is_initialized():
        raise ModelError(
            'shard="tp" is looked at with a process group of its own, and this process has one already: call '
            "hybridremat.fit before init_process_group, or in another process"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    twin = copy.deepcopy(model, _on_meta(model) if on_paper else None)
    with fake_process_group(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        yield parallelize_module(twin, mesh, {name: _style(style) for name, style in plan.items()})


def _on_meta(model: nn.Module) -> dict[int, Any]:
    """For ``deepcopy``: parameters on the meta device."""
    return {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
        for each in model.parameters()
    }


def _style(name: str) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if name == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    if name == "rowwise":
        return RowwiseParallel()
    return ColwiseParallel() if name == "colwise" else ColwiseParallel(output_layouts=Replicate())
