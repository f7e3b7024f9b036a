"""A step under less memory than recomputation alone can reach: values wait in a file, or in host memory.

python examples/offload.py [BASE [PIXELS [BATCH]]]
"""

import sys
import tempfile

import torch

import hybridremat
from hybridremat.zoo.unet import UNet


def main(base: int = 16, pixels: int = 128, batch: int = 8) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = UNet(base=base).to(device).train()
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(0, 2, (batch, pixels, pixels), device=device)
    how = {"args": (images, labels), "cost_model": "flops"}  # without cost_model, kernels are timed
    where = "host" if device == "cuda" else f"file:{tempfile.mkdtemp()}"
    least = hybridremat.plan(model, memory_limit="100%", **how).least_peak
    moving = hybridremat.plan(model, memory_limit="100%", offload=where, **how).least_peak
    print(f"the least limit is {least:,} bytes, and {moving:,} where values may wait elsewhere")
    hybridremat.wrap(model, memory_limit=(least + moving) // 2, offload=where, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(images, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = hybridremat.get_plan(model)
    print(f"a step takes {plan.predicted_peak:,} of {plan.memory_limit:,} bytes")
    print(f"{plan.host_bytes:,} wait elsewhere")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
