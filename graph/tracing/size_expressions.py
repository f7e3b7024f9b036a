"""From PyTorch's symbolic sizes to expressions that are plain data (``graph/sizes.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.private_torch import ShapeFacts, expression
from hybridremat.graph.sizes import Domain, Size, Term, combined, evaluated, rounded_up, symbols_of
from hybridremat.graph.tracing.alias_analysis import TraceError
from hybridremat.graph.tracing.fx_nodes import CUDA_ALLOCATION

_OPERATIONS: Final = {
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "Max": "max",
    "Min": "min",
    "And": "and",
    "Or": "or",
    "Not": "not",
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
}
_TURNED: Final = {"StrictGreaterThan": "<", "GreaterThan": "<="}
"""By the class of PyTorch's expression: its operation, and the one that it is with its arguments turned."""


def size_of(number: int | torch.SymInt) -> Size:
    """A whole number, perhaps symbolic, as an expression.

    Raises
    ------
    TraceError
        If it depends on data, or is made by an operation that is not known here.
    """
    return number if isinstance(number, int) else size_expression(expression(number))


@lru_cache(maxsize=4096)
def size_expression(given: Any) -> Size:
    """An expression of PyTorch as plain data. Raises as :func:`size_of`."""
    kind = type(given).__name__
    if given.is_Integer:
        return int(given)
    if given.is_Boolean and not given.args:
        return int(bool(given))
    if given.is_Symbol:
        if not str(given).startswith("s"):
            raise TraceError(f"the size {given} depends on the data")
        return str(given)
    if given.is_Add or given.is_Mul:
        given = given.expand()  # of two texts for the same polynomial one
    if given.is_Add or given.is_Mul:
        return combined("+" if given.is_Add else "*", *map(size_expression, given.args))
    if given.is_Pow and given.exp.is_Integer and given.exp > 0:
        return combined("*", *[size_expression(given.base)] * int(given.exp))
    if kind in _TURNED:
        return Term(_TURNED[kind], tuple(map(size_expression, reversed(given.args))))
    if kind in _OPERATIONS:
        return Term(_OPERATIONS[kind], tuple(map(size_expression, given.args)))
    if kind == "ModularIndexing":
        base, divisor, modulus = map(size_expression, given.args)
        return Term("%", (Term("//", (base, divisor)), modulus))
    raise TraceError(f"the size {given} is made by an operation that is not known ({kind})")


def has_symbols(tensor: torch.Tensor) -> bool:
    """Whether anything of how a tensor is laid out is symbolic."""
    layout = *tensor.shape, *tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return not all(isinstance(number, int) for number in layout)


def storage_size(tensor: torch.Tensor) -> Size:
    """Bytes of the whole storage as they are allocated on its device (``fx_nodes.storage_bytes``)."""
    size = size_of(tensor.untyped_storage().nbytes())
    return rounded_up(size, CUDA_ALLOCATION) if tensor.device.type == "cuda" else size


def size_inputs(placeholders: Iterable[fx.Node]) -> dict[str, fx.Node]:
    """The inputs of a graph that are symbols, by name."""
    found: dict[str, fx.Node] = {}
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(size := size_of(value), str):
            found.setdefault(size, node)
    return found


def domain_of(facts: ShapeFacts, symbols: Iterable[str]) -> Domain:
    """The sizes that a capture is right for, as far as its symbols go. Raises as :func:`size_of`."""
    names = set(symbols)
    guards = dict.fromkeys(map(size_expression, facts.guards))
    ranges = {name: facts.ranges[name] for name in sorted(names)}
    unknown = set[str]().union(*map(symbols_of, guards)) - names
    if unknown:
        raise TraceError(f"the capture is bound to sizes that are no inputs of its graph: {sorted(unknown)}")
    always = [guard for guard in guards if not symbols_of(guard) and evaluated(guard, {})]
    return Domain(ranges, tuple(guard for guard in guards if guard not in always))
