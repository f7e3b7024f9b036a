"""A loop as torchtitan has it: a mesh, then a plan in place of activation checkpointing, then fully_shard.

torchrun --nproc-per-node 2 examples/plain_fsdp2.py
"""

import torch
from decoder import Decoder
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridremat


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(10 * number + rank))


def parallelize(model: nn.Module, mesh: DeviceMesh, *, planned: bool = True) -> nn.Module:
    if planned:  # where torchtitan applies activation checkpointing
        how = {"memory_limit": "70%", "cost_model": "flops"}  # without cost_model, kernels are timed
        fsdp = hybridremat.Fsdp(mesh.size(), tail=("norm", "head"))
        hybridremat.wrap_each(model, ["embed", "layers.*", "norm", "head"], [batch(0, 0)], fsdp=fsdp, **how)
    for unit in (model.embed, *model.layers):
        fully_shard(unit, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module, tokens: torch.Tensor) -> float:
    loss = model(tokens)
    loss.backward()
    return loss.item()


def train(mesh: DeviceMesh, *, planned: bool = True) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = parallelize(Decoder(), mesh, planned=planned)  # with parameters on the CPU, not on meta
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + mesh.get_rank())
    losses = []
    for number in range(3):
        losses.append(step(model, batch(number, mesh.get_rank())))
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    model, losses = train(init_device_mesh("cpu", (distributed.get_world_size(),)))
    found = hybridremat.get_plan(model)
    print(f"a step takes {found.predicted_peak:,} of {found.memory_limit:,} bytes; losses {losses}")
