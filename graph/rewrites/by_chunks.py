"""A loss over classes and its gradients, made by chunks of rows: the logits of a chunk at a time.

The sum over rows of a weight's gradient is taken chunk by chunk, in float32 at least: its bits are others
than those of one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

Body = Callable[..., Sequence[Tensor]]
ROWS, SUM, PRODUCT = "rows", "sum", "product"
"""What is done with what a chunk gives: put in its rows' place, added up, multiplied and added up."""

_SLICES: Final = 8  # of a product of low precision, which is added to a sum of another type


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which chunks are added up."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def loss_by_chunks(
    body: Body, kinds: Sequence[str], sizes: Sequence[int], rows: Sequence[Tensor], whole: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run ``body`` for some rows at a time.

    Parameters
    ----------
    body
        Takes a chunk of each of ``rows``, and ``whole``; returns one tensor for each of ``kinds``, two
        factors for a product.
    kinds
        :data:`ROWS`, :data:`SUM` or :data:`PRODUCT`, for each result.
    sizes
        Rows of a chunk, and the fewest that it may have where memory is short; the last one may have fewer.
    rows, whole
        Tensors of equal length, and others.
    """
    return _run(body, kinds, sizes[0], rows, whole)


def loss_by_rows(
    body: Body, kinds: Sequence[str], _sizes: object, *given: Sequence[Tensor], parts: int, over: None = None
) -> tuple[Tensor, ...]:
    """``loss_by_chunks`` in more of them; sums round in another order. It is written over nothing."""
    del over
    rows, whole = given
    return _run(body, kinds, -(-len(rows[0]) // parts), rows, whole)


def _run(
    body: Body, kinds: Sequence[str], size: int, rows: Sequence[Tensor], whole: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    results: list[Tensor] = []
    length = len(rows[0])
    for start in range(0, length, size):
        made = list(body(*(each[start : start + size] for each in rows), *whole))
        for place, kind in enumerate(kinds):
            parts = [made.pop(0) for _ in range(1 + (kind == PRODUCT))]
            if not start:
                results.append(_empty(kind, length, *parts))
            _add(results[place], kind, start, *parts)
            del parts
    return tuple(results)


def _empty(kind: str, length: int, first: Tensor, *second: Tensor) -> Tensor:
    if kind == ROWS:
        return first.new_empty((length, *first.shape[1:]))
    shape = first.shape if kind == SUM else (len(first), second[0].shape[1])
    return first.new_zeros(shape, dtype=sum_dtype(first.dtype))


def _add(result: Tensor, kind: str, start: int, first: Tensor, *second: Tensor) -> None:
    if kind == ROWS:
        result[start : start + len(first)].copy_(first)
    elif kind == SUM:
        result.add_(first)
    elif result.dtype == first.dtype:
        torch.addmm(result, first, second[0], out=result)
    else:
        rows = -(-len(first) // _SLICES)
        for low in range(0, len(first), rows):
            result[low : low + rows].add_(torch.mm(first[low : low + rows], second[0]))


def chunk_sizes(rows: int, classes: int, width: int) -> tuple[int, int]:
    """Rows of a chunk, and the fewest: powers of two.

    Eight chunks, of 64 rows at least: on a CPU these were faster than one. At the fewest, the logits of a
    chunk are about as large as the inputs of all rows, in 32 chunks at most, of 16 rows at least.
    """
    chunks = min(32, -(-classes // width))
    size = max(64, _power(-(-rows // min(8, chunks))))
    return size, min(size, max(16, _power(-(-rows // chunks))))


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()
