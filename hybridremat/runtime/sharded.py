"""Whether a model whose units are planned is sharded by FSDP2 as it was planned for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from hybridremat.errors import ModelError
from hybridremat.graph.private_fsdp import ShardedModule, is_sharded, sharded_module
from hybridremat.plans.fsdp import Fsdp


def require_sharded_as_planned(
    model: nn.Module, units: Mapping[str, nn.Module], planned: Fsdp | None, *, again: bool = False
) -> None:
    """Refuse a step whose parameters are gathered and reduced in another way than was counted.

    ``again``: other modules than the units were looked at before a step that has run.

    Raises
    ------
    ModelError
        It says what is different, and what to do.
    """
    if planned is None and not any(map(is_sharded, model.modules())):
        return
    if (why := next(_differences(model, units, planned, again=again), "")):
        raise ModelError(f"nothing of this step has run: {why}")


def _differences(
    model: nn.Module, units: Mapping[str, nn.Module], planned: Fsdp | None, *, again: bool
) -> Iterator[str]:
    name = type(model).__name__
    found = {unit: sharded_module(module) for unit, module in units.items()}
    root = sharded_module(model)
    sharded = next((each for each in (*found.values(), root) if each is not None), None)
    if planned is None:
        every = (sharded, *map(sharded_module, model.modules()))
        ranks = next((each.ranks for each in every if each is not None), 1)
        yield (
            f"fully_shard was called for {name} or a part of it, which was planned with whole parameters. "
            f"Say so when it is planned: hybridremat.wrap_each(model, …, fsdp={ranks}), and then fully_shard"
        )
        return
    usual = f"for unit in units: fully_shard(unit), and then fully_shard(model), on a mesh of {planned.ranks}"
    if sharded is None:
        yield f"its units were planned with fsdp={planned}, and fully_shard was not called. Call it: {usual}"
        return
    if root is None:
        yield f"the units of {name} are sharded, and it is not itself: call fully_shard(model) at last"
        return
    missing = [unit for unit, each in found.items() if each is None]
    if missing:
        yield f"the unit {missing[0]!r} is not sharded. Call fully_shard for each unit: {usual}"
        return
    rest = (name for name, module in (() if again else model.named_modules()) if is_sharded(module))
    others = [other for other in rest if other and other not in units]
    if others:
        yield (
            f"{others[0]!r} is sharded by itself, and is no unit: name it as one when the model is planned "
            f"(hybridremat.wrap_each(model, […, {others[0]!r}], …)), or leave it to fully_shard(model)"
        )
    for where, each in (*((repr(unit), each) for unit, each in found.items()), ("the model", root)):
        assert each is not None
        yield from _other_settings(where, each, planned, is_root=each is root)


def _other_settings(where: str, found: ShardedModule, planned: Fsdp, *, is_root: bool) -> Iterator[str]:
    if found.unusual:
        yield f"{where} is sharded with {found.unusual}, whose memory is not counted: leave it out"
    if found.ranks not in (0, planned.ranks):
        yield (
            f"{where} is sharded over {found.ranks} ranks, and was planned with fsdp={planned}: plan it "
            f"with fsdp={found.ranks}"
        )
    for name in ("param_dtype", "reduce_dtype"):
        here, there = getattr(found, name), getattr(planned, name)
        if here != there:
            yield (
                f"{where} is sharded with {name}={here}, and the step was planned with {there}: plan it with "
                f"fsdp=hybridremat.Fsdp({planned.ranks}, {name}={here!r}, …)"
            )
    wanted = not is_root and planned.reshard_after_forward
    reshards = not is_root if found.reshards is None else found.reshards
    if reshards != wanted:
        yield (
            f"{where} is sharded with reshard_after_forward={reshards}, and was planned with {wanted}"
            + (": leave it out for the model itself" if is_root else f": plan it with {reshards}")
        )
