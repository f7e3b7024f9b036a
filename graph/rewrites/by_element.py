"""Kernels that compute each element by itself, and whether its bits depend on where in memory it lies.

On a CPU many of them take elements that lie side by side in vectors, and by other code those that are left at
the end or lie apart. Some have other bits there (sigmoid, GELU).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx

from hybridremat.graph.costs.random_numbers import DRAWN
from hybridremat.graph.rewrites.trial import bits_of, random_like
from hybridremat.graph.tracing.signature import fake_value

_UNTAGGED: Final = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_to_copy", "elu_backward", "leaky_relu_backward", "softplus_backward", "mse_loss_backward")
)


def same_by_element(node: fx.Node, given: fx.Node, *strides: tuple[int, ...]) -> bool:
    """Whether a kernel is such a one, and has the same bits for one of its inputs with either strides.

    It is run on numbers that lie side by side, and apart. Where its bits differ, the input is filled with
    these numbers in both layouts: every element then tells by which code it is computed.
    """
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target not in _UNTAGGED:
        return False
    values = {source: fake_value(source) for source in node.all_input_nodes}
    dense = {source: _numbers(value, seed) for seed, (source, value) in enumerate(values.items())}
    apart = {source: torch.stack([each, each], -1)[..., 0] for source, each in dense.items()}
    differ = bits_of(_run(node, dense)) != bits_of(_run(node, apart))
    if not differ.any():
        return True
    layouts = {source: value for source, value in values.items() if isinstance(value, Tensor) and value.dim()}
    shapes, steps = zip(*((value.shape, value.stride()) for value in layouts.values()), strict=True)
    if len(set(shapes)) > 1 or any(0 in each for each in steps):
        return False  # of what is broadcast not every element can be chosen

    def filled(source: fx.Node, stride: tuple[int, ...]) -> Tensor:
        made: Tensor = dense[source].new_empty_strided(shapes[0], stride)
        telling = dense[source][differ]
        numbers: Tensor = telling.repeat(-(-made.numel() // len(telling)))[: made.numel()]
        return made.copy_(numbers.view(made.shape))

    whole = {source: filled(source, value.stride()) for source, value in layouts.items()}
    one, other = (_run(node, {**dense, **whole, given: filled(given, each)}) for each in strides)
    return torch.equal(bits_of(one), bits_of(other))


def _numbers(value: Any, seed: int) -> Any:
    """As many numbers as are drawn in place of a tensor, one for one number."""
    if isinstance(value, Tensor) and value.dim():
        value = torch.empty(DRAWN, dtype=value.dtype, device=value.device)
    return random_like(value, seed)


def _run(node: fx.Node, given: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), given.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]
