"""The layers of a model that are alike: what is called a unit if nobody says otherwise."""

from __future__ import annotations

from torch import nn

from hybridremat.errors import ModelError


def repeated_layers(model: nn.Module) -> tuple[str, ...]:
    """Patterns for the children of each outermost container of two or more modules of one class.

    Raises
    ------
    ModelError
        If there is none.
    """
    if _are_alike(model):
        return tuple(name for name, _ in model.named_children())
    found: list[str] = []
    for name, module in model.named_modules():
        if _are_alike(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    if not found:
        raise ModelError(
            f"this {type(model).__name__} has no ModuleList and no Sequential of layers that are alike, to "
            'be sharded one by one: name its layers by units="blocks_*", for one (--units)'
        )
    return tuple(f"{name}.*" for name in found)


def _are_alike(container: nn.Module) -> bool:
    """Whether a module holds two or more of one class, with parameters."""
    children = list(container.children())
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(children) < 2:
        return False
    return len({type(each) for each in children}) == 1 and any(True for _ in children[0].parameters())
