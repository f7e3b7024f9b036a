"""A decoder under a memory limit in Lightning: a callback, and nothing else changes.

Needs a package that hybridremat does not install: pip install pytorch-lightning

python examples/lightning_callback.py [STEPS]
"""

import sys

import torch
from decoder import Decoder
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from hybridremat import HybridRematLightningCallback


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Decoder()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.net(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 6) -> None:
    texts = torch.randint(256, (8 * steps, 32), generator=torch.Generator().manual_seed(0))
    limit = {"memory_limit": "60%", "cost_model": "flops"}  # without cost_model, kernels are timed
    callback = HybridRematLightningCallback(module="net", report=False, **limit)  # what training_step calls
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="auto", max_epochs=1, callbacks=[callback], **quiet)
    trainer.fit(Lit(), DataLoader(TensorDataset(texts), batch_size=8))
    (plan,) = callback.plans
    print(f"a step takes {plan.predicted_peak:,} of {plan.memory_limit:,} bytes")
    measured = trainer.callback_metrics["hybridremat/measured_peak_bytes"]
    print(f"measured: {int(measured):,} bytes; last loss {trainer.callback_metrics['loss']:.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
