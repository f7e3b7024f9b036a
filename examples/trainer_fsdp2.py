"""A GPT-2 under a memory limit in Hugging Face's Trainer, which shards it with FSDP2.

torchrun --nproc-per-node 2 examples/trainer_fsdp2.py
"""

import torch
from on_cpu import shard_on_cpu
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

import hybridremat
from hybridremat import HybridRematTrainerCallback

TOKENS = torch.randint(256, (24, 64), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=64, use_cache=False)
    )


def plan(model: nn.Module, arguments: TrainingArguments) -> nn.Module:
    # What accelerate shards: each layer, and the tied embedding and head with the last norm.
    tail = ("transformer.wte", "transformer.ln_f", "lm_head")
    fsdp = hybridremat.Fsdp(arguments.world_size, tail=tail)
    # What the Trainer calls the model with: a batch, and how many labels count, as float32.
    batch = {**default_data_collator(ROWS[:4]), "num_items_in_batch": torch.tensor(504.0)}
    how = {"memory_limit": "70%", "cost_model": "flops"}  # without cost_model, kernels are timed
    return hybridremat.wrap_each(model, ["transformer.h.*", *tail], kwargs=batch, fsdp=fsdp, **how)


def make_arguments(folder: str = "output") -> TrainingArguments:
    settings = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    steps = {"per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    quiet["use_cpu"] = not torch.cuda.is_available()
    return TrainingArguments(folder, fsdp=True, fsdp_config=settings, **steps, **quiet)


def train(model: nn.Module, arguments: TrainingArguments, *callbacks: object) -> Trainer:
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS, callbacks=list(callbacks))
    trainer.train()
    return trainer


if __name__ == "__main__":
    arguments = make_arguments()
    shard_on_cpu()
    trainer = train(plan(make_model(), arguments), arguments, HybridRematTrainerCallback())
    if trainer.is_world_process_zero():
        found = hybridremat.get_plan(trainer.model)
        print(f"a step takes {found.predicted_peak:,} of {found.memory_limit:,} bytes")
        print("losses", *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
