"""Nets with parts that PyTorch does not capture: a solver's adjoint, two backwards, gradients in a loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def stage(channels: int, out: int, **how: int) -> nn.Sequential:
    """A convolution with its normalization and dropout."""
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, **how), nn.GroupNorm(4, out), nn.SiLU(), nn.Dropout(0.1)
    )


class Dynamics(nn.Module):
    """The right-hand side of an ordinary differential equation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, time: Tensor, x: Tensor) -> Tensor:
        return self.second(functional.softplus(self.first(x))) * (1 - time)


class OdeNet(nn.Module):
    """Convolutions, torchdiffeq's adjoint, convolutions."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.before = nn.Sequential(stage(3, channels), *(stage(channels, channels) for _ in range(5)))
        self.dynamics = Dynamics(channels)
        self.after = nn.Sequential(*(stage(channels, channels) for _ in range(6)))
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        from torchdiffeq import odeint_adjoint

        x = self.before(x)
        x = odeint_adjoint(
            self.dynamics, x, torch.tensor([0.0, 1.0]), method="rk4", options={"step_size": 0.5}
        )[-1]
        return functional.cross_entropy(self.head(self.after(x).mean((2, 3))), labels)


class Generator(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(16, channels * 64)
        self.stages = nn.Sequential(
            stage(channels, channels), nn.Upsample(scale_factor=2), stage(channels, channels)
        )
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, noise: Tensor) -> Tensor:
        return self.last(self.stages(self.inner(noise).unflatten(1, (-1, 8, 8)))).tanh()


class Discriminator(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            stage(3, channels), stage(channels, channels, stride=2), stage(channels, channels)
        )
        self.head = nn.Linear(channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))[:, 0]


class TwoLosses:
    """A loss each for discriminator and generator, and a backward each."""

    def __init__(self, discriminator: Tensor, generator: Tensor) -> None:
        self.discriminator, self.generator = discriminator, generator

    def backward(self) -> None:
        self.discriminator.backward()
        self.generator.backward()

    def detach(self) -> Tensor:
        return torch.stack([self.discriminator.detach(), self.generator.detach()])


class Gan(nn.Module):
    """A step of both nets, the generator's output detached for the discriminator's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(noise)
        right, wrong = self.discriminator(real), self.discriminator(fake.detach())
        told = functional.softplus(-right).mean() + functional.softplus(wrong).mean()
        return told, functional.softplus(-self.discriminator(fake)).mean()


class Penalized(nn.Module):
    """A critic's loss with a penalty on its gradients between real and generated pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()

    def forward(self, real: Tensor, noise: Tensor, mix: Tensor) -> Tensor:
        fake = self.generator(noise)
        between = (mix * real + (1 - mix) * fake).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return self.discriminator(fake).mean() - self.discriminator(real).mean() + 10 * penalty


class GraphNet(nn.Module):
    """Two of PyG's graph convolutions, which add self-loops as they find them missing."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.convs = nn.ModuleList(GCNConv(16 if not n else width, width) for n in range(3))
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(width, 4)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.dropout(conv(x, edges).relu())
        return functional.cross_entropy(self.head(x), labels)
