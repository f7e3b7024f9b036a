"""Which dimensions of a step's inputs are symbols when it is captured.

PyTorch makes dimensions that are equal in the sample one symbol, as tokens and labels of one length have to
be; so a sample in which batch and length are equal would tie them together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hybridremat.compiler.sample_inputs import input_leaves, with_tensors
from hybridremat.errors import InputError
from hybridremat.graph.private_torch import mark_static

Dimensions = Mapping[int, Collection[int]]
"""By the number of an input, as ``input_leaves`` counts them, dimensions of it."""


def differing_dimensions(first: tuple[Any, Any], second: tuple[Any, Any]) -> dict[int, tuple[int, ...]]:
    """The dimensions of inputs that differ between two calls, each its arguments and keywords.

    Raises
    ------
    InputError
        If they differ in more than sizes.
    """
    leaves, others = input_leaves(first), input_leaves(second)
    found: dict[int, tuple[int, ...]] = {}
    if len(leaves) != len(others):
        raise InputError("the calls have other arguments, not only other sizes")
    for number, (one, other) in enumerate(zip(leaves, others, strict=True)):
        shapes = [each.shape if isinstance(each, torch.Tensor) else () for each in (one, other)]
        if type(one) is not type(other) or len(shapes[0]) != len(shapes[1]):
            raise InputError(f"input {number} has another type or number of dimensions, not only other sizes")
        pairs = enumerate(zip(*shapes, strict=True))
        if differing := tuple(dim for dim, (size, other_size) in pairs if size != other_size):
            found[number] = differing
    return found


def ties(first: tuple[Any, Any], second: tuple[Any, Any], dimensions: Dimensions) -> set[int]:
    """Sizes that two dimensions share in the first call and not in the second: one symbol, wrongly.

    Empty if the first call can be the sample of a capture with these dimensions as symbols.
    """
    seen: dict[int, int] = {}
    tied = set()
    leaves, others = input_leaves(first), input_leaves(second)
    for number, dims in dimensions.items():
        for dim in dims:
            size, other = leaves[number].shape[dim], others[number].shape[dim]
            if seen.setdefault(size, other) != other:
                tied.add(size)
    return tied


def sample_with_symbols(
    args: Sequence[Any], kwargs: Mapping[str, Any], dimensions: Dimensions
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Clones of the inputs, all of whose other dimensions are marked as static (marks stay with a tensor).

    A tensor that is passed twice (tokens that are their own labels) is one clone: Dynamo has a guard for it.
    """
    given = tuple(args), dict(kwargs)
    clones: dict[int, torch.Tensor] = {}
    for number, leaf in enumerate(input_leaves(given)):
        if isinstance(leaf, torch.Tensor) and id(leaf) not in clones:
            clone = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            symbols = dimensions.get(number, ())
            mark_static(clone, [dim for dim in range(clone.dim()) if dim not in symbols])
            clones[id(leaf)] = clone
    return with_tensors(given, clones)
