"""What users reported of PyTorch's compiled steps, as small models on the CPU.

pytorch#193193: the blocks of a Transformer, each under ``torch.utils.checkpoint``, run twice in one compiled
graph, without a context and then with one (as in contrastive and caption training together), and the compiled
backward makes several blocks again before it uses them: 2.3 times (torch 2.13, on a GPU) the peak of the same
step uncompiled. Either traversal alone is fine, and so is a graph break between the two.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, DEPTH, BATCH, LENGTH, CLASSES = 128, 4, 8, 8, 128, 100


class CrossBlock(nn.Module):
    """A block with self-attention and an MLP, and attention to a context where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.own, self.own_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.given = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.cross_out = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Batch × length × width, and so is what is returned."""
        x = x + self.own_out(attention(*self.own(self.norms[0](x)).chunk(3, -1)))
        if context is not None:
            x = x + self.cross_out(attention(self.query(self.norms[1](x)), *self.given(context).chunk(2, -1)))
        return x + self.narrow(functional.gelu(self.wide(self.norms[2](x))))


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of several heads, causal within a sequence of the same length."""
    parts = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (query, key, value)]
    return functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


class Traversals(nn.Module):
    """Blocks that are run without a context, with one, or both; returns a loss.

    ``checkpointed``: each block under ``torch.utils.checkpoint``. ``broken``: a graph break between the two.
    """

    def __init__(self, which: str = "both", *, checkpointed: bool = False, broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.which, self.checkpointed, self.broken = which, checkpointed, broken
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, context: Tensor, labels: Tensor) -> Tensor:
        """Of x and context, batch × length × width; of labels, batch × length."""
        loss = x.new_zeros(())
        if self.which in ("both", "first"):
            loss = loss + self.run(x, None).mean(1).square().mean()
        if self.broken:
            torch._dynamo.graph_break()
        if self.which in ("both", "second"):
            scores = self.head(self.run(x, context))
            loss = loss + functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return loss

    def run(self, x: Tensor, context: Tensor | None) -> Tensor:
        """One traversal of the blocks."""
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.checkpointed else block
            x = run(x, context)
        return x


def traversals_batch() -> dict[str, Tensor]:
    """A batch, the same in every call."""
    draw = torch.Generator().manual_seed(1)
    x, context = (torch.randn(BATCH, LENGTH, WIDTH, generator=draw) for _ in range(2))
    return {
        "x": x,
        "context": context,
        "labels": torch.randint(0, CLASSES, (BATCH, LENGTH), generator=draw),
    }
