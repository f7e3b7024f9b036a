"""Kernels that do the work of one ATen call in parts, with the same bits and less workspace.

Convolutions by samples, their weight gradients by halves of the output channels, BatchNorm's backward by
channels, dropout by rows, the gradient of a loss over classes by rows. Some may write their first result over
an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, fx

from hybridremat.graph.rewrites.by_chunks import loss_by_chunks, loss_by_rows
from hybridremat.graph.rewrites.loss_fusion import LOSS_BACKWARD
from hybridremat.graph.rewrites.rewrite import Form

ATEN: Final = torch.ops.aten
PARTS: Final = 8


def _slices(length: int, parts: int) -> Iterator[slice]:
    """So many slices of equal length; the last one may be shorter."""
    size = -(-length // parts)
    yield from (slice(start, start + size) for start in range(0, length, size))


def loss_backward_by_rows(
    gradient: Tensor, scores: Tensor, target: Tensor, *others: Any, parts: int, over: Tensor | None = None
) -> Tensor:
    """``nll_log_softmax_backward`` by rows, each written where its own log-probabilities (scores) were."""
    result = torch.empty_like(scores) if over is None else over
    each = others[1] == 0  # without a reduction every row has a gradient of its own
    for part in _slices(len(scores), parts):
        given = gradient[part] if each else gradient, scores[part], target[part], *others
        arrived = ATEN.nll_loss_backward.default(*given)
        ATEN._log_softmax_backward_data.out(arrived, scores[part], 1, arrived.dtype, out=result[part])
        del arrived
    return result


def dropout_by_rows(
    given: Tensor, probability: float, train: bool, *, parts: int, over: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``native_dropout``: masks are drawn part by part, in the order of memory."""
    result = torch.empty_like(given) if over is None else over
    mask = torch.empty_like(given, dtype=torch.bool)
    for part, kept, drawn in zip(*(t.view(-1).chunk(parts) for t in (given, result, mask)), strict=True):
        scaled, bits = ATEN.native_dropout.default(part, probability, train)
        kept.copy_(scaled)
        drawn.copy_(bits)
        del scaled, bits
    return result, mask


def dropout_backward_by_rows(
    gradient: Tensor, mask: Tensor, scale: float, *, parts: int, over: Tensor | None = None
) -> Tensor:
    """``native_dropout_backward``."""
    result = torch.empty_like(gradient) if over is None else over
    for arrived, kept, made in zip(*(t.view(-1).chunk(parts) for t in (gradient, mask, result)), strict=True):
        made.copy_(ATEN.native_dropout_backward.default(arrived, kept, scale))
    return result


def batch_norm_backward_by_channels(
    gradient: Tensor, given: Tensor, *statistics: Any, parts: int, over: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``native_batch_norm_backward``: every channel has its own statistics."""
    *by_channel, train, epsilon, mask = statistics
    result = torch.empty_like(given) if over is None else over
    sums: list[tuple[Any, Any]] = []
    for part in _slices(given.shape[1], parts):
        tensors = gradient[:, part].contiguous(), given[:, part].contiguous()
        own = (None if each is None else each[part] for each in by_channel)
        made, *both = ATEN.native_batch_norm_backward.default(*tensors, *own, train, epsilon, mask)
        result[:, part].copy_(made)
        sums.append((both[0], both[1]))
        del tensors, made, both
    scale, shift = (None if each[0] is None else torch.cat(each) for each in zip(*sums, strict=True))
    return result, scale, shift


def convolution_by_samples(
    given: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any, parts: int, over: Tensor | None = None
) -> Tensor:
    """``convolution``. Of samples that are written over, each is read before."""
    result = over
    for part in _slices(len(given), parts):
        made = ATEN.convolution.default(given[part], weight, bias, *settings)
        if result is None:
            last = made.dim() == 4 and not made.is_contiguous()
            layout = torch.channels_last if last else torch.contiguous_format
            result = made.new_empty((len(given), *made.shape[1:])).contiguous(memory_format=layout)
        result[part].copy_(made)
        del made
    assert result is not None
    return result


def convolution_backward_by_samples(
    gradient: Tensor, given: Tensor, weight: Tensor, *settings: Any, parts: int, over: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``convolution_backward``: weight and bias first, then the input's gradient by samples."""
    *others, (of_input, *mask) = settings
    made = ATEN.convolution_backward.default(gradient, given, weight, *others, [False, *mask])
    of_given = _input_gradient(gradient, given, weight, others, parts, over) if of_input else None
    return of_given, made[1], made[2]


def convolution_backward_by_halves(
    gradient: Tensor, given: Tensor, weight: Tensor, *settings: Any, parts: int, over: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``convolution_backward_by_samples``, with the weight's gradient by halves of the output channels."""
    *others, (of_input, *mask) = settings
    of_weights = torch.empty_like(weight)
    biases: list[Tensor] = []
    sizes, *rest = others
    for part in _slices(len(weight), 2):
        half = gradient[:, part], given, weight[part], [len(weight) // 2] if sizes else sizes
        made = ATEN.convolution_backward.default(*half, *rest, [False, *mask])
        of_weights[part].copy_(made[1])
        biases += [made[2]] if mask[1] else []
        del made
    of_given = _input_gradient(gradient, given, weight, others, parts, over) if of_input else None
    return of_given, of_weights, torch.cat(biases) if biases else None


def _input_gradient(
    gradient: Tensor, given: Tensor, weight: Tensor, others: Sequence[Any], parts: int, over: Tensor | None
) -> Tensor:
    result = torch.empty_like(given) if over is None else over
    for part in _slices(len(given), parts):
        own = gradient[part], given[part], weight, *others
        made = ATEN.convolution_backward.default(*own, [True, False, False])
        result[part].copy_(made[0])
        del made
    return result


@dataclass(frozen=True)
class PartedKernel:
    """A function that does the work of an op in parts.

    Attributes
    ----------
    run
        Called with the op's own arguments, ``parts`` and ``over``, what its first result is written over.
    unit
        What it goes through: rows, samples or channels.
    parts
        How many parts a call with these arguments can be done in (their traced tensors); 0 for none.
    exact
        Whether it is to give the same bits.
    largest
        How many elements its first result has in the largest of so many parts. Only of kernels that compute
        and draw each element alike in any parts that ``parts`` allows: if the bits are the same at some
        sizes, they are at others. Kernels that are chosen by size do not.
    """

    run: Callable[..., Any]
    unit: str
    parts: Callable[..., int]
    exact: bool = True
    largest: Callable[[Tensor, int], int] | None = None

    def form(self, parts: int) -> Form:
        """The call in so many parts."""
        return Form(self.run, "over", {"parts": parts})


def _rows(given: Tensor, *_: object) -> int:
    return PARTS if given.is_contiguous() and given.numel() and given.numel() % (64 * PARTS) == 0 else 0


def _rows_of_both(gradient: Tensor, mask: Tensor, *_: object) -> int:
    return _rows(gradient) if mask.is_contiguous() and mask.shape == gradient.shape else 0


def _rows_of_loss(_: object, log_probabilities: Tensor, *__: object) -> int:
    whole = log_probabilities.is_contiguous() and len(log_probabilities) >= PARTS
    return PARTS if whole else 0


def _channels(gradient: Tensor, given: Tensor, *statistics: Any) -> int:
    whole = gradient.is_contiguous() and given.is_contiguous() and statistics[-1][0]
    return min(PARTS, given.shape[1]) if whole and given.shape[1] > 1 else 0


def _samples(given: Tensor, *_: object) -> int:
    return min(PARTS, len(given)) if len(given) > 1 else 0


def _pairs_of_samples(given: Tensor, *_: object) -> int:
    """A convolution of one sample alone often goes another way than that of several."""
    return min(PARTS, len(given) // 2) if len(given) >= 4 else 0


def _halves(_: object, given: Tensor, weight: Tensor, *settings: Any) -> int:
    transposed, groups, mask = settings[-4], settings[-2], settings[-1]
    fits = groups == 1 and not transposed and mask[1] and len(weight) > 2 and len(weight) % 2 == 0
    return min(PARTS, len(given)) if fits else 0


def _more_chunks(_body: object, _kinds: object, sizes: Any, rows: Sequence[Tensor], _whole: object) -> int:
    size, least = sizes
    return -(-len(rows[0]) // least) if least < size else 0


def _chunk(result: Tensor, parts: int) -> int:
    return -(-result.numel() // parts)


def _rows_at_once(result: Tensor, parts: int) -> int:
    return -(-len(result) // parts) * (result.numel() // max(1, len(result)))


_BY_OP: Final[dict[object, tuple[PartedKernel, ...]]] = {
    LOSS_BACKWARD: (
        PartedKernel(loss_backward_by_rows, "rows", _rows_of_loss, largest=_rows_at_once),
    ),
    ATEN.native_dropout.default: (PartedKernel(dropout_by_rows, "rows", _rows, largest=_chunk),),
    ATEN.native_dropout_backward.default: (
        PartedKernel(dropout_backward_by_rows, "rows", _rows_of_both, largest=_chunk),
    ),
    ATEN.native_batch_norm_backward.default: (
        PartedKernel(batch_norm_backward_by_channels, "channels", _channels),
    ),
    ATEN.convolution.default: (PartedKernel(convolution_by_samples, "samples", _pairs_of_samples),),
    ATEN.convolution_backward.default: (
        PartedKernel(convolution_backward_by_samples, "samples", _samples),
        PartedKernel(convolution_backward_by_halves, "samples and halves", _halves),
    ),
    loss_by_chunks: (PartedKernel(loss_by_rows, "rows", _more_chunks, exact=False),),
}
"""Of several kernels for one op, each does by parts what those before it do, and more."""
KERNELS: Final = {kernel.run.__name__: kernel for kernels in _BY_OP.values() for kernel in kernels}
"""By the name of the function."""


class Drawing(Enum):
    """The functions that draw from the generator, as arguments of a call: code can name a member."""

    DROPOUT = (dropout_by_rows,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self.value[0](*args, **kwargs)


DRAWING: Final = {member.value[0]: member for member in Drawing}


def parted_kernels(node: fx.Node) -> list[tuple[PartedKernel, int]]:
    """The kernels by parts that can do a call's work, as far as its sizes tell, each with its parts."""
    if node.target not in _BY_OP or node.kwargs:
        return []
    given = fx.map_arg(node.args, lambda source: source.meta.get("val"))
    found = [(kernel, kernel.parts(*given)) for kernel in _BY_OP[node.target]]
    return [(kernel, parts) for kernel, parts in found if parts]


# What follows is read by the checker, and shares nothing with the table above.

STANDS_FOR: Final[dict[object, Any]] = {
    loss_by_rows: loss_by_chunks,
    loss_backward_by_rows: LOSS_BACKWARD,
    dropout_by_rows: ATEN.native_dropout.default,
    Drawing.DROPOUT: ATEN.native_dropout.default,
    dropout_backward_by_rows: ATEN.native_dropout_backward.default,
    batch_norm_backward_by_channels: ATEN.native_batch_norm_backward.default,
    convolution_by_samples: ATEN.convolution.default,
    convolution_backward_by_samples: ATEN.convolution_backward.default,
    convolution_backward_by_halves: ATEN.convolution_backward.default,
}
"""The op whose arguments each of them takes, and whose results it gives."""
