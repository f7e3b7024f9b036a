"""Small nets, one for each class of ops whose kernels are particular about their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """A linear layer, what ``use`` makes of its output, and a mean of squares."""

    def __init__(self, use: Callable[..., torch.Tensor], *layers: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.first, self.layers, self.use = nn.Linear(width, width), nn.ModuleList(layers), use

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.use(self.first(x), *self.layers, *others).float().pow(2).mean()


class Under(nn.Module):
    """Runs a net under bfloat16 autocast."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(*args, **kwargs)


def _image(h: torch.Tensor) -> torch.Tensor:
    return h.view(len(h), 4, 2, 2)


def _normed(dims: int, norm: nn.Module) -> Net:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 6, 3, padding=1)
    shape = {1: (4, 4), 2: (4, 2, 2), 3: (4, 2, 2, 1)}[dims]
    return Net(lambda h, conv, norm: norm(conv(h.view(len(h), *shape))).relu(), conv, norm)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: _normed(1, nn.BatchNorm1d(6)),
    "BatchNorm2d": lambda: _normed(2, nn.BatchNorm2d(6)),
    "BatchNorm3d": lambda: _normed(3, nn.BatchNorm3d(6)),
    "BatchNorm of a matrix": lambda: Net(lambda h, norm: norm(h), nn.BatchNorm1d(16)),
    "GroupNorm": lambda: _normed(2, nn.GroupNorm(2, 6)),
    "LayerNorm": lambda: Net(lambda h, norm: norm(h), nn.LayerNorm(16)),
    "RMSNorm": lambda: Net(lambda h, norm: norm(h), nn.RMSNorm(16)),
    "InstanceNorm1d": lambda: _normed(1, nn.InstanceNorm1d(6, affine=True)),
    "InstanceNorm2d": lambda: _normed(2, nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
    "InstanceNorm3d": lambda: _normed(3, nn.InstanceNorm3d(6)),
    "LocalResponseNorm": lambda: _normed(2, nn.LocalResponseNorm(2)),
}


def _square(h: torch.Tensor) -> torch.Tensor:
    h = h.float()
    return h.T @ h / len(h) + torch.eye(h.shape[1], device=h.device)


LINALG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "solve": lambda h: torch.linalg.solve(_square(h), h.float().T),
    "solve on the right": lambda h: torch.linalg.solve(_square(h), h.float(), left=False),
    "inv": lambda h: torch.linalg.inv(_square(h)),
    "pinv": lambda h: torch.linalg.pinv(h.float()),
    "cholesky": lambda h: torch.linalg.cholesky(_square(h)),
    "cholesky_solve": lambda h: torch.cholesky_solve(h.float().T, torch.linalg.cholesky(_square(h))),
    "cholesky_inverse": lambda h: torch.cholesky_inverse(torch.linalg.cholesky(_square(h))),
    "slogdet": lambda h: torch.linalg.slogdet(_square(h))[1],
    "logdet": lambda h: torch.logdet(_square(h)),
    "det": lambda h: torch.linalg.det(_square(h)),
    "eigh": lambda h: torch.linalg.eigh(_square(h))[0],
    "eigvals": lambda h: torch.linalg.eigvals(_square(h)).abs(),
    "svd": lambda h: torch.linalg.svd(h.float(), full_matrices=False)[1],
    "qr": lambda h: torch.linalg.qr(h.float().T @ h.float())[1],
    "lu": lambda h: torch.linalg.lu(_square(h))[2],
    "lu_factor, lu_solve": lambda h: torch.linalg.lu_solve(*torch.linalg.lu_factor(_square(h)), h.float().T),
    "solve_triangular": lambda h: torch.linalg.solve_triangular(
        torch.linalg.cholesky(_square(h)), h.float().T, upper=False
    ),
    "matrix_exp": lambda h: torch.linalg.matrix_exp(0.01 * _square(h)),
    "batched inverse": lambda h: torch.linalg.inv(_square(h).expand(3, -1, -1) + torch.eye(16)),
    "householder": lambda h: torch.linalg.householder_product(h.float().T[:, :4], h.float()[0, :4]),
    "cdist": lambda h: torch.cdist(h.float(), h.float().flip(0)),
}


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda h: functional.cross_entropy(h, torch.arange(len(h)) % 16),
    "cross_entropy of one class": lambda h: functional.cross_entropy(h[:, :1], torch.zeros(len(h)).long()),
    "cross_entropy of images": lambda h: functional.cross_entropy(
        h.view(len(h), 4, 2, 2), torch.ones(len(h), 2, 2).long()
    ),
    "cross_entropy, weights and smoothing": lambda h: functional.cross_entropy(
        h, torch.arange(len(h)) % 16, torch.rand(16), label_smoothing=0.1, ignore_index=0
    ),
    "multi_margin": lambda h: functional.multi_margin_loss(h.float(), torch.arange(len(h)) % 16),
    "multilabel_margin": lambda h: functional.multilabel_margin_loss(
        h.float(), (torch.arange(16) - 1).expand(len(h), -1).contiguous()
    ),
    "binary": lambda h: functional.binary_cross_entropy(h.float().sigmoid(), torch.rand_like(h.float())),
    "binary with logits": lambda h: functional.binary_cross_entropy_with_logits(h, torch.ones_like(h)),
    "KL": lambda h: functional.kl_div(h.log_softmax(-1), torch.full_like(h, 0.1)),
    "cosine": lambda h: functional.cosine_embedding_loss(h, h.flip(0), torch.ones(len(h))),
    "triplet": lambda h: functional.triplet_margin_loss(h, h.flip(0), h.roll(1)),
    "huber": lambda h: functional.huber_loss(h, torch.ones_like(h)),
}


def _attention(**how: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def use(h: torch.Tensor) -> torch.Tensor:
        q = h.view(1, 2, -1, 8)
        return functional.scaled_dot_product_attention(q, q.sin(), q.cos(), **how)

    return use


def _sampled(h: torch.Tensor, mode: str) -> torch.Tensor:
    grid = h.float()[:, :8].reshape(len(h), 2, 2, 2).tanh()
    return functional.grid_sample(_image(h.float()), grid, mode=mode, align_corners=False)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": _attention(),
    "causal attention": _attention(is_causal=True),
    "attention with a mask": _attention(attn_mask=torch.ones(16, 16).tril().bool()),
    "grid_sample": lambda h: _sampled(h, "bilinear"),
    "grid_sample, bicubic": lambda h: _sampled(h, "bicubic"),
    "fft": lambda h: torch.fft.fft(h.float()).abs(),
    "rfft, irfft": lambda h: torch.fft.irfft(torch.fft.rfft(h.float()) * 2),
    "stft": lambda h: torch.stft(
        h.float().flatten(), 16, window=torch.hann_window(16), return_complex=True
    ).abs(),
    "bucketize": lambda h: h * torch.bucketize(h.float().detach(), torch.linspace(-1, 1, 5)),
    "searchsorted": lambda h: h * torch.searchsorted(torch.linspace(-1, 1, 5), h.float().detach()),
    "sort": lambda h: h.sort(-1)[0] * torch.arange(16),
    "top-k": lambda h: h.topk(3)[0],
    "cumulative": lambda h: h.float().cumsum(0) * h.float().cumprod(1) + h.logcumsumexp(1),
    "gather, scatter": lambda h: torch.zeros(len(h), 16).scatter(
        1, h.argsort(-1)[:, :4], h.float().gather(1, h.argsort(-1)[:, :4])
    ),
    "index": lambda h: h[:, torch.tensor([3, 1, 15])] + h[torch.arange(len(h)), 5][:, None],
    "index_add": lambda h: torch.zeros(4, 16).index_add(0, torch.arange(len(h)) % 4, h.float()),
    "scatter_reduce": lambda h: torch.zeros(4, 16).scatter_reduce(
        0, (torch.arange(len(h)) % 4)[:, None].expand(-1, 16), h.float(), "amax"
    ),
    "median": lambda h: h.median(-1)[0] + h.quantile(0.3) if h.dtype == torch.float32 else h.median(-1)[0],
    "pooling": lambda h: functional.max_pool2d(_image(h), 2) + functional.adaptive_avg_pool2d(_image(h), 1),
    "unpooling": lambda h: functional.max_unpool2d(
        *functional.max_pool2d(_image(h.float()), 2, return_indices=True), 2
    ),
    "upsampling": lambda h: functional.interpolate(_image(h), scale_factor=2, mode="bicubic"),
    "fold": lambda h: functional.fold(functional.unfold(_image(h), 2), (2, 2), 2),
    "renorm": lambda h: h.float().renorm(2, 0, 0.5) + torch.trapezoid(h.float())[:, None],
    "special functions": lambda h: torch.lgamma(h.float().abs() + 1) + torch.erfinv(h.float().tanh() * 0.9),
    "embedding": lambda h: functional.embedding(torch.arange(4) % 16, h),
    "one_hot": lambda h: h * functional.one_hot(torch.arange(len(h)) % 16, 16),
    "one_hot of one class": lambda h: h * functional.one_hot(torch.zeros(len(h)).long(), 1),
    "conv_transpose": lambda h: functional.conv_transpose2d(_image(h), h[:4, :4].reshape(4, 4, 1, 1)),
    "prelu": lambda h: functional.prelu(h, h[0, :1]) + functional.rrelu(h, training=True),
    "kron, einsum": lambda h: torch.kron(h[:2], h[:1]).sum() + torch.einsum("ab,cb->ac", h, h),
    "segment means": lambda h: torch.segment_reduce(h.float(), "mean", lengths=torch.tensor([4, len(h) - 4])),
}


class Bags(nn.Module):
    """Sums of sine of some embeddings or bags with sparse gradients."""

    def __init__(self, kind: type[nn.Module], count: int, rows: int = 100, **how: Any) -> None:
        super().__init__()
        self.bags = nn.ModuleList(kind(rows, 16, **{"sparse": True, **how}) for _ in range(count))
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(sum(bag(x).sin() for bag in self.bags)).pow(2).mean()
