"""Name parts of a model that a line which cannot be captured is not in: what units could be.

A module has the line if a method of its class is among the frames that led there, and so has what it is in.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from types import CodeType
from typing import Final

from torch import nn

_SHOWN: Final = 3  # parts that an error names
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


def parts_beside(model: nn.Module, error: BaseException) -> str:
    """A sentence for an error, with the largest parts beside the line; empty if there are none."""
    named = dict(model.named_modules())
    found = _without(model, "", _on_the_way(model, _frames(error)))
    sizes: dict[str, int] = {}
    for name in filter(lambda name: has_several_ops(named[name]), found):
        pattern = _alike(name, found, named)
        parameters = sum(each.numel() for each in named[name].parameters() if each.requires_grad)
        sizes[pattern] = sizes.get(pattern, 0) + parameters
    largest = sorted((name for name, size in sizes.items() if size), key=lambda name: -sizes[name])[:_SHOWN]
    if not largest:
        return ""
    return (
        " Or plan parts that the line is not in, and let it run as it is: "
        f"hybridremat.wrap_each(model, {largest}, …)."
    )


def patterns_of(model: nn.Module, names: list[str]) -> tuple[str, ...]:
    """Patterns for some of a model's submodules, and no others: ``layers.*`` for all that a list has."""
    named = dict(model.named_modules())
    return tuple(dict.fromkeys(_alike(name, names, named) for name in names))


def has_several_ops(module: nn.Module) -> bool:
    """Whether there is something to plan: a linear layer alone saves what it is given."""
    return sum(bool(each._parameters) for each in module.modules()) > 1


def _frames(error: BaseException | None) -> Iterator[tuple[str, str, int]]:
    """File, function and line of the frames that led to an error and to what it came from."""
    while error is not None:
        stack = list(getattr(error, "real_stack", None) or ()) + list(
            traceback.extract_tb(error.__traceback__)
        )
        for frame in stack:
            resumed = _RESUMED.fullmatch(frame.name)
            yield frame.filename, resumed[1] if resumed else frame.name, frame.lineno or 0
        error = error.__cause__ or error.__context__


def _on_the_way(model: nn.Module, frames: Iterable[tuple[str, str, int]]) -> set[type]:
    """The classes of the model's modules that have a method among the frames; PyTorch's own have no break."""
    every, kinds = set(frames), {type(module) for module in model.modules()}
    kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.")}
    return {kind for kind in kinds if any(_has(kind, *frame) for frame in every)}


def _has(kind: type, file: str, name: str, line: int) -> bool:
    found = getattr(kind, name, None)
    if not callable(found) or found is getattr(nn.Module, name, None):
        return False
    method = inspect.unwrap(found)
    code = getattr(method, "__code__", None)
    if not isinstance(code, CodeType) or code.co_filename != file:
        return False
    return code.co_firstlineno <= line <= max((at for *_, at in code.co_lines() if at), default=0)


def _without(module: nn.Module, name: str, kinds: set[type]) -> list[str]:
    """The outermost modules in which none of these kinds is, in place of containers what is in them."""
    found: list[str] = []
    for key, child in module.named_children():
        inner = f"{name}.{key}" if name else key
        clean = kinds.isdisjoint(type(each) for each in child.modules())
        if clean and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found.append(inner)
        else:
            found += _without(child, inner, kinds)
    return found


def _alike(name: str, found: list[str], named: dict[str, nn.Module]) -> str:
    """The name with ``*`` for its numbers, if that names only parts that were found, or what is in them."""
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    inside = {each for each in named if any(each == part or each.startswith(part + ".") for part in found)}
    return pattern if all(each in inside for each in named if fnmatchcase(each, pattern)) else name
