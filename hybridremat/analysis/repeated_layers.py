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
    found = containers_of_layers(model)
    if not found:
        raise ModelError(
            f"this {type(model).__name__} has no ModuleList and no Sequential of layers that are alike, to "
            'be sharded one by one: name its layers by units="blocks_*", for one (--units)'
        )
    if found == [""]:
        return tuple(name for name, _ in model.named_children())
    return tuple(f"{name}.*" for name in found)


def containers_of_layers(model: nn.Module) -> list[str]:
    """Names of the outermost containers of two or more modules of one class; empty for the model itself."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = found == [""] or any(name.startswith(f"{outer}.") for outer in found)
        if _are_alike(module) and not inside:
            found.append(name)
    return found


def _are_alike(container: nn.Module) -> bool:
    """Whether a module holds two or more of one class, with parameters."""
    children = list(container.children())
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(children) < 2:
        return False
    return len({type(each) for each in children}) == 1 and any(True for _ in children[0].parameters())
