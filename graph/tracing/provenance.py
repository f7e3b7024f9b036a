"""Where a node comes from in the model: module path and source line."""

from __future__ import annotations

import re

from torch import fx

_STACK_KEYS = ("nn_module_stack", "fwd_nn_module_stack")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module, as in ``named_modules()``; empty for the model itself."""
    for key in _STACK_KEYS:
        stack = node.meta.get(key)
        if stack:
            return _clean(str(list(stack.values())[-1][0]))
    return ""


def _clean(path: str) -> str:
    """``L['model'].h._modules['0'].mlp`` → ``h.0.mlp``."""
    flat = _ITEM.sub(r".\1", path.replace("._modules", "")).replace("..", ".")
    parts = [part for part in flat.split(".") if part]
    roots = {"L", "self", "model", "fn", "_orig_mod"}
    start = 1
    if parts and parts[0] == "L":
        start = 2
    elif parts and parts[0] not in roots:
        start = 0
    return ".".join(parts[start:])


def source_line(node: fx.Node) -> str:
    """``file:line`` of the innermost frame of the model's own code, or empty."""
    frames = _LINE.findall(node.meta.get("stack_trace") or "")
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
