"""The children of a model between which it may be cut."""

from __future__ import annotations

from torch import nn

from hybridremat.errors import ModelError


def layers_of(model: nn.Module, container: str | None, stages: int) -> tuple[str, ...]:
    """Names of the children of the longest ModuleList or Sequential, or of the one that is named.

    Raises
    ------
    ModelError
        If there is none, or it has fewer children than there are to be stages.
    """
    found = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part)
    }
    if not found:
        raise ModelError(
            f"this {type(model).__name__} has no ModuleList and no Sequential to cut between its children: "
            "put its layers into one"
        )
    if container is not None and container not in found:
        raise ModelError(
            f"layers={container!r} is no ModuleList or Sequential of this {type(model).__name__}; it has "
            + ", ".join(map(repr, found))
        )
    name = max(found, key=lambda each: len(found[each])) if container is None else container
    children = tuple(f"{name}.{child}" if name else child for child, _ in found[name].named_children())
    if len(children) < stages:
        raise ModelError(
            f"{stages} stages, and {name or type(model).__name__!r} has {len(children)} children to cut "
            f"between: ask for at most {len(children)} stages"
            + (", or name another container by layers=" if len(found) > 1 else "")
        )
    return children
