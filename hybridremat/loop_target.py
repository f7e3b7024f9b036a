"""Which module of a training loop's model is wrapped, or has been by its owner."""

from __future__ import annotations

from torch import nn

from hybridremat.errors import ModelError
from hybridremat.planned_call import planned_call


def find_target(model: nn.Module, name: str | None) -> nn.Module:
    """The module called ``name``; without a name the one that is wrapped already, or else the model itself.

    Raises
    ------
    ModelError
        If there is no such module, or others are wrapped already.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    wrapped = {inner: module for inner, module in modules.items() if planned_call(module) is not None}
    if name is None and len(wrapped) == 1:
        return next(iter(wrapped.values()))
    target = _submodule(model, name or "")
    others = [inner or "the model itself" for inner, module in wrapped.items() if module is not target]
    if others:
        raise ModelError(
            f"parts of this {type(model).__name__} are already wrapped: {', '.join(others)}. Name the one to "
            "be watched with module=, or call hybridremat.unwrap on what is not to be planned on its own."
        )
    return target


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        found: nn.Module = model.get_submodule(name)
    except AttributeError:
        children = ", ".join(inner for inner, _ in model.named_children()) or "none"
        raise ModelError(
            f"{type(model).__name__} has no submodule {name!r}; its own submodules are: {children}. "
            "named_modules() lists the names of all."
        ) from None
    return found
