"""Real inputs for kernels that are tried alone: made up, and such as the kernel accepts.

Uniform random numbers, zeros and truths will do for most. Indices, and numbers that are compared, are tried
both equal and distinct. Factorizations get symmetric, positive definite matrices and pivots that change
nothing. A kernel that takes none of these (a custom op that checks what it is given) gets what the ops before
it make of such numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from operator import attrgetter
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.costs.index_ranges import index_ranges
from hybridremat.graph.costs.random_numbers import drawn, repeated
from hybridremat.graph.costs.scattered import scatter_mask, with_as_many_places
from hybridremat.graph.costs.whole_numbers import whole_inputs
from hybridremat.graph.opaque.ops import backward_of, is_opaque
from hybridremat.graph.private_torch import FakeTensor, OpOverload, _neg_view, possible
from hybridremat.graph.tracing.flops import group_ends, grouped_rows
from hybridremat.graph.tracing.fx_nodes import argument, has_effects, is_mutation, tensors
from hybridremat.graph.tracing.signature import fake_value

Layouts = Sequence[tuple[Sequence[int], Sequence[int]]]

_SEEDS: Final = cycle(range(8))
"""Of the numbers in each input in turn: those of one kernel are not the same."""

DEPTHS: Final = (0, 1, 2, 4, 8)
"""How many ops before a kernel make its inputs, tried in turn."""

_FACTORIZATIONS: Final = ("linalg", "cholesky", "lu_", "triangular_solve", "ormqr", "inverse", "logdet")
_ON_HOST: Final = {
    "_scaled_dot_product_efficient_attention_backward": ("philox_seed", "philox_offset"),
    "_efficient_attention_backward": ("philox_seed", "philox_offset"),
}
"""By the name of the op, what it reads on the host, where its forward puts it outside of graph capture, and
not on the device that is traced (PyTorch's attention.cu, Note [Seed and Offset Device])."""


def spreads(node: fx.Node) -> tuple[bool, ...]:
    """Whether indices are spread, in each way to make inputs up that a kernel's workspace may depend on."""
    return (False, True) if index_ranges(node) else (False,)


def prepared(
    node: fx.Node,
    layouts: Layouts = (),
    *,
    spread: bool = False,
    depth: int = 0,
    known: dict[fx.Node, Any] | None = None,
) -> partial[object]:
    """Make real inputs; the result calls the node's kernel on them.

    Parameters
    ----------
    layouts
        Size and strides of tensor inputs that are laid out in another way than they were traced, in the
        order of the arguments; an input that none of them fits is made as it was traced.
    spread
        Whether indices are spread over their range, and compared numbers distinct; otherwise all are equal.
    depth
        How many ops before it make its inputs, one after the other.
    known
        What such ops have made already.
    """
    assert callable(node.target)
    known = {} if known is None else known
    ends, ranges, on_host = group_ends(node), index_ranges(node), _on_host(node)
    fitted, factorization, scattered = _fitted(layouts), _is_factorization(node), scatter_mask(node)
    first, filled = _first_index(node), whole_inputs(node)

    once: dict[fx.Node, Any] = {}

    def made(source: fx.Node) -> Any:
        if not is_opaque(node.target):
            return made_once(source)
        if source not in once:  # what it takes may depend on whether two inputs are one
            once[source] = made_once(source)
        return once[source]

    def made_once(source: fx.Node) -> Any:
        if depth and (computed := _computed(source, depth, known)) is not None:
            return computed
        value = fitted(fake_value(source))
        if source in on_host:
            return torch.zeros(value.shape, dtype=value.dtype)
        real = real_like(value)
        if source is scattered:
            return with_as_many_places(real, node)
        if source is ends:
            return real.fill_(grouped_rows(node))
        if source in filled:
            return filled[source](real)
        if source in ranges:
            return _indices(real, ranges[source], first, spread=spread)
        return _for_factorization(real) if factorization else real

    args: Any = fx.map_arg(node.args, made)
    kwargs: Any = fx.map_arg(node.kwargs, made)
    opaque = backward_of(node.target)
    if opaque is not None:  # what a kernel has kept for itself cannot be made up
        sources: Any = node.args[1]
        args = args[0], opaque.made_up_kept(sources)
    return partial(node.target, *args, **kwargs)


def _computed(source: fx.Node, depth: int, known: dict[fx.Node, Any]) -> Any:
    """What a node makes of inputs at one op less; a constant is itself. None for what has to be made up."""
    if source.op == "get_attr":
        value = attrgetter(str(source.target))(source.graph.owning_module)
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return value.clone() if is_real else None
    if source.op != "call_function" or is_mutation(source) or has_effects(source):
        return None
    if source not in known:
        before = depth - (source.target is not operator.getitem)
        known[source] = prepared(source, depth=before, known=known)()
    return known[source]


def _fitted(layouts: Layouts) -> Callable[[Any], Any]:
    left = [(tuple(size), tuple(strides)) for size, strides in layouts]

    def fitted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            fitting = [layout for layout in left if layout[0] == tuple(value.shape)]
            if fitting:
                left.remove(fitting[0])
                return value.new_empty_strided(*fitting[0])
        return value

    return fitted


def real_like(value: Any) -> Any:
    """A real tensor like the fake one: numbers that almost every kernel accepts."""
    if not isinstance(value, torch.Tensor):
        return possible(value)
    if value.layout is torch.sparse_coo:
        indices, values = map(real_like, tensors(value))
        return torch.sparse_coo_tensor(
            indices, values, value.shape, is_coalesced=value.is_coalesced(), check_invariants=False
        )
    extent = int(value.untyped_storage().nbytes()) // value.element_size()
    if value.dtype.is_floating_point:
        numbers = drawn(next(_SEEDS), torch.float32, value.device, normal=False)
        base = repeated(extent, lambda count: numbers[:count].to(value.dtype, copy=True))
    elif value.dtype == torch.bool:
        base = torch.ones(extent, dtype=torch.bool, device=value.device)
    else:
        base = torch.zeros(extent, dtype=value.dtype, device=value.device)
    real = torch.as_strided(base, value.shape, value.stride(), possible(value.storage_offset()))
    # kernels that cannot read a conjugated or negated view make a copy first
    real = real.conj() if value.is_conj() else real
    return _neg_view(real) if value.is_neg() else real


def _on_host(node: fx.Node) -> tuple[object, ...]:
    if not isinstance(node.target, OpOverload):
        return ()
    names = _ON_HOST.get(node.target._schema.name.removeprefix("aten::"), ())
    return tuple(argument(node, name) for name in names)


def _first_index(node: fx.Node) -> int:
    """An index that a kernel does not leave out as padding."""
    return int(argument(node, "padding_idx") == 0)


def _indices(real: torch.Tensor, places: int, first: int, *, spread: bool) -> torch.Tensor:
    """Indices in range, all the same or spread: a kernel's workspace may depend on how many are distinct."""
    if real.dtype == torch.bool or places <= first or not _is_dense(real):
        return real
    if spread:
        return real.copy_(torch.arange(real.numel(), device=real.device).remainder_(places).view(real.shape))
    return real.fill_(first)


def _is_factorization(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    return any(part in node.target._schema.name for part in _FACTORIZATIONS)


def _for_factorization(real: Any) -> Any:
    """Square matrices that are symmetric, positive definite and far from singular; pivots in their places."""
    if not isinstance(real, torch.Tensor) or not _is_dense(real) or not real.dim():
        return real
    length = real.shape[-1]
    if real.dtype == torch.int32:
        return real.copy_(torch.arange(1, length + 1, device=real.device).expand(real.shape))
    if real.dim() < 2 or real.shape[-2] != length or not (real.is_floating_point() or real.is_complex()):
        return real
    identity = torch.eye(length, dtype=real.dtype, device=real.device)
    return real.copy_((real + real.mT).div_(2 * max(1, length)).add_(identity))


def _is_dense(real: torch.Tensor) -> bool:
    """Whether every element has a place of its own, so that it can be written."""
    return real.layout is torch.strided and all(
        step or size < 2 for step, size in zip(real.stride(), real.shape, strict=True)
    )
