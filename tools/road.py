"""How long the road is: our frames from ``wrap`` to the chain's table, and our modules that a step loads.

python tools/road.py
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import torch
from torch import nn

import hybridremat
from hybridremat.sequence import frontier

OURS = ("hybridremat", "graph", "blocks", "sequence")
ROOT = Path(__file__).resolve().parents[1]


class Net(nn.Module):
    """Layers enough for a chain of several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.layers(x).square().mean()


def main() -> None:
    """Wrap, train a step, and count."""
    found: list[list[str]] = []
    fill = frontier.chain_table

    def counted(*given: object, **how: object) -> object:
        files = (Path(frame.filename) for frame in inspect.stack()[1:])
        ours = [str(each.relative_to(ROOT)) for each in files if each.is_relative_to(ROOT)]
        found.append([each for each in ours if each.split("/")[0] in OURS])
        return fill(*given, **how)  # type: ignore[arg-type]

    frontier.chain_table = counted  # type: ignore[assignment]
    model, x = Net(), torch.randn(8, 16)
    hybridremat.wrap(model, (x,), memory_limit="95%", cost_model="flops", workers=1, cache=False)
    model(x).backward()
    loaded = [name for name in sys.modules if name.split(".")[0] == "hybridremat"]
    print(f"{len(found[0])} frames in {len(set(found[0]))} files; {len(loaded)} modules")


if __name__ == "__main__":
    main()
