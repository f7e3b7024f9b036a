"""Whether a model whose units are planned is sharded by FSDP2 as it was planned for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from hybridremat.errors import ModelError
from hybridremat.graph.private_fsdp import ShardedModule, is_sharded, sharded_module
from hybridremat.plans.fsdp import Fsdp

_CHECKPOINTED = "_checkpoint_wrapped_module"  # the name of what PyTorch's checkpoint_wrapper is around


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
    if not again and (inside := next((n for n, _ in model.named_modules() if _CHECKPOINTED in n), "")):
        yield (
            f"{inside.partition(_CHECKPOINTED)[0].rstrip('.')!r} was put into a checkpoint after it was "
            "planned: turn activation checkpointing off (activation_checkpointing=False of accelerate's "
            "plugin or of fsdp_config), as the plan decides what is recomputed"
        )
    missing = [unit for unit, each in found.items() if each is None]
    if missing:
        yield f"the unit {missing[0]!r} is not sharded. Call fully_shard for each unit: {usual}"
        return
    sharded_units = {unit: each for unit, each in found.items() if each is not None}
    if not again:
        yield from _no_units(model, sharded_units, planned)
    yield from _other_groups(sharded_units, planned)
    for unit, each in sharded_units.items():
        stays = unit in planned.tail or not planned.reshard_after_forward
        yield from _other_settings(repr(unit), each, planned, reshards=not stays)
    yield from _other_settings("the model", root, planned, reshards=False, is_root=True)


def _no_units(model: nn.Module, units: Mapping[str, ShardedModule], planned: Fsdp) -> Iterator[str]:
    """Modules that are sharded by themselves, and are no units."""
    every = {name: sharded_module(module) for name, module in model.named_modules() if name}
    others = {name: each for name, each in every.items() if each is not None and name not in units}
    if others:
        names = ", ".join(map(repr, others))
        tail = tuple(name for name, each in others.items() if each.reshards is False)
        stays = tail and planned.reshard_after_forward
        more = f", fsdp=hybridremat.Fsdp({planned.ranks}, tail={tail!r})" if stays else ""
        yield (
            f"{next(iter(others))!r} is sharded by itself, and is no unit: name it as one when the model is "
            f"planned (hybridremat.wrap_each(model, […, {names}]{more}, …)), or leave it to "
            "fully_shard(model)"
        )


def _other_groups(units: Mapping[str, ShardedModule], planned: Fsdp) -> Iterator[str]:
    """Units that are one group, and were planned as several, or the other way round."""
    groups: dict[int, list[str]] = {}
    for unit, each in units.items():
        groups.setdefault(each.group, []).append(unit)
    several = [tuple(names) for names in groups.values() if names[1:]]
    for names in several:
        if set(names) != set(planned.tail):
            yield (
                f"{' and '.join(map(repr, names))} are sharded together, by one call of fully_shard: plan "
                f"them so, with fsdp=hybridremat.Fsdp({planned.ranks}, tail={names!r}), and with "
                "reshard_after_forward=False in that call"
            )
    if len({units[name].group for name in planned.tail}) > 1:
        yield (
            f"the tail {planned.tail!r} was planned as one group, and is sharded as several: call "
            "fully_shard([…], reshard_after_forward=False) once with all of it, or plan without tail="
        )


def _other_settings(
    where: str, found: ShardedModule, planned: Fsdp, *, reshards: bool, is_root: bool = False
) -> Iterator[str]:
    """``reshards``: whether it was planned to be freed after its forward."""
    if found.unusual:
        yield f"{where} is sharded with {found.unusual}, whose memory is not counted: leave it out"
    if found.ranks not in (0, planned.ranks):
        yield (
            f"{where} is sharded over {found.ranks} ranks, and was planned with fsdp={planned}: plan it "
            f"with fsdp={found.ranks}"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        here, there = getattr(found, name), getattr(planned, name)
        if here != there:
            yield (
                f"{where} is sharded with {name}={here}, and the step was planned with {there}: plan it with "
                f"fsdp=hybridremat.Fsdp({planned.ranks}, {name}={here!r}, …)"
            )
    here = not is_root if found.reshards is None else found.reshards
    if here != reshards:
        yield (
            f"{where} is sharded with reshard_after_forward={here}, and was planned with {reshards}"
            + (": leave it out for the model itself" if is_root else f": plan it with {here}")
        )
