"""Small nets of kinds that no package here has: a diffusion transformer, a graph net, a Gaussian process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DiffusionBlock(nn.Module):
    """Attention and an MLP, each scaled, shifted and gated by the condition (DiT's adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(time)[:, None].chunk(6, dim=-1)
        parts = self.qkv(self.norm(x) * (1 + scale) + shift).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate * self.out(mixed)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """Predicts the noise of patches at a step of diffusion."""

    def __init__(self, width: int = 32, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads=4) for _ in range(2))
        self.last = nn.Linear(width, 3 * patch * patch)
        self.patch = patch

    def forward(self, noisy: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        waves = steps[:, None] * torch.arange(1, 9, device=steps.device)
        time = self.time(torch.cat([waves.sin(), waves.cos()], dim=-1))
        x = self.patches(noisy).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, time)
        found = functional.fold(self.last(x).transpose(1, 2), noisy.shape[2:], self.patch, stride=self.patch)
        return functional.mse_loss(found, noise)


class GraphConvolution(nn.Module):
    """A GCN layer over a list of edges that has self-loops: gather, weigh, add up."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(target.shape[0]))
        weight = degree.rsqrt()[source] * degree.rsqrt()[target]
        hidden = self.linear(x)
        return torch.zeros_like(hidden).index_add(0, target, hidden[source] * weight[:, None])


class GraphNet(nn.Module):
    """Two layers, and a class for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphConvolution(8, 32), GraphConvolution(32, 4)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.second(self.first(x, edges).relu(), edges), labels)


class Words(nn.Module):
    """Next words by a recurrent module of PyTorch's; ``breaks``: with a graph break around it."""

    def __init__(self, kind: type[nn.RNNBase], *, breaks: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.breaks = nn.Embedding(40, 24), nn.Linear(24, 40), breaks
        self.cells = kind(24, 24, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.breaks:
            torch._dynamo.graph_break()
        y, _ = self.cells(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return functional.cross_entropy(self.head(y[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class GaussianProcess(nn.Module):
    """Its negative log likelihood, by a Cholesky decomposition that checks for errors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.shifts = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        squares = (x[:, None] - x[None]).square().sum(-1)
        kernel = torch.exp(-squares * self.scale.exp()) + torch.eye(len(x)) * self.noise.exp()
        root = torch.linalg.cholesky(kernel)
        fit = (y * torch.cholesky_solve(y[:, None], root)[:, 0]).sum()
        # a broadcast gradient, which autograd would copy for the parameter
        return fit / 2 + root.diagonal().log().sum() + self.shifts.expand(2, 3).sum()
