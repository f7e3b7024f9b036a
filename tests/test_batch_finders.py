"""Batch-size finders take a batch that no plan fits for memory that ran out, and go on with a smaller one."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import hybridremat
from support.loop_cases import HOW, Rows

lightning = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

LIMIT = 150_000


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.layers = nn.Sequential(*blocks)
        self.head = nn.Linear(16, 4)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.head(self.layers(x)), labels)}


class Lit(lightning.LightningModule):
    def __init__(self, batch_size):
        super().__init__()
        self.net, self.batch_size = Net(), batch_size

    def training_step(self, batch, _):
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(rows(4096), batch_size=self.batch_size, drop_last=True)


def rows(number):
    return Rows(x=torch.randn(number, 16), labels=torch.randint(0, 4, (number,)))


def batch(size):
    return {"x": torch.randn(size, 16), "labels": torch.randint(0, 4, (size,))}


def fits(size):
    try:
        hybridremat.plan(Net(), kwargs=batch(size), memory_limit=LIMIT, **HOW)
    except hybridremat.InfeasibleLimitError:
        return False
    return True


def test_accelerates_finder_ends_at_a_batch_that_fits():
    tried = []

    @find_executable_batch_size(starting_batch_size=512)
    def train(batch_size):
        tried.append(batch_size)
        model = hybridremat.wrap(Net(), kwargs=batch(batch_size), memory_limit=LIMIT, **HOW)
        model(**batch(batch_size))["loss"].backward()

    train()
    assert len(tried) > 1
    assert fits(tried[-1])
    assert not fits(tried[-2])


def test_the_trainers_finder_ends_at_a_batch_that_fits(tmp_path):
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=512,
        auto_find_batch_size=True,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = hybridremat.HybridRematTrainerCallback(memory_limit=LIMIT, **HOW)
    trainer = Trainer(Net(), arguments, train_dataset=rows(2048), callbacks=[callback])
    trainer.train()
    assert trainer.state.global_step == 2
    size = trainer._train_batch_size
    assert size < 512
    assert fits(size)


def test_lightnings_finder_ends_at_a_batch_that_fits(tmp_path):
    model = Lit(batch_size=16)
    hybridremat.wrap(model.net, kwargs=batch(16), memory_limit=LIMIT, **HOW)  # callbacks are off in trials
    finder = lightning.callbacks.BatchSizeFinder(mode="power", steps_per_trial=1, init_val=16)
    trainer = lightning.Trainer(
        max_steps=2,
        callbacks=[finder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        accelerator="cpu",
    )
    trainer.fit(model)
    assert fits(model.batch_size)
    assert not fits(2 * model.batch_size)


def test_the_error_names_what_finds_the_largest_batch():
    with pytest.raises(RuntimeError, match="max_batch_size") as error:
        hybridremat.plan(Net(), kwargs=batch(512), memory_limit=LIMIT, **HOW)
    assert "out of memory" not in str(error.value)
