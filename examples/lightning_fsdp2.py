"""A decoder under a memory limit in Lightning, sharded with FSDP2 by ModelParallelStrategy.

torchrun --nproc-per-node 2 examples/lightning_fsdp2.py
"""

import torch
from decoder import Decoder
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import hybridremat
from hybridremat import HybridRematLightningCallback


class Lit(LightningModule):
    def __init__(self, *, planned: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.planned, self.losses = Decoder(), planned, []

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):  # Lightning calls this before each fit, test, …
            return
        mesh = self.device_mesh["data_parallel"]
        if self.planned:
            how = {"memory_limit": "70%", "cost_model": "flops"}  # without cost_model, kernels are timed
            batch = [torch.zeros(8, 32, dtype=torch.long)]
            hybridremat.wrap_each(self.net, "layers.*", batch, fsdp=mesh.size(), **how)
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.net(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(module: Lit, *callbacks: object) -> Lit:
    made = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randint(256, (48, 32), generator=made))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = Trainer(devices=2, strategy=strategy, max_epochs=1, callbacks=list(callbacks), **quiet)
    torch.manual_seed(1 + trainer.global_rank)
    trainer.fit(module, DataLoader(data, batch_size=8))
    return module


if __name__ == "__main__":
    module = train(Lit(), HybridRematLightningCallback(module="net", report=False))
    found = hybridremat.get_plan(module.net)
    print(f"a step takes {found.predicted_peak:,} of {found.memory_limit:,} bytes; losses {module.losses}")
