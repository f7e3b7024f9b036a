"""A Llama under a memory limit, sharded by accelerate with FSDP2.

torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from on_cpu import shard_on_cpu
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hybridremat


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": tokens, "labels": tokens}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, attention_dropout=0.1, use_cache=False, **sizes))


def plan(model: nn.Module, ranks: int) -> nn.Module:
    # What accelerate shards: each layer, the embedding, and norm and head together.
    units = ["model.embed_tokens", "model.layers.*", "model.norm", "lm_head"]
    fsdp = hybridremat.Fsdp(ranks, tail=("model.norm", "lm_head"))
    how = {"memory_limit": "70%", "cost_model": "flops"}  # without cost_model, kernels are timed
    return hybridremat.wrap_each(model, units, kwargs=batch(0, 0), fsdp=fsdp, **how)


def step(accelerator: Accelerator, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**inputs).loss
    accelerator.backward(loss)
    return loss.detach()


def train(model: nn.Module, accelerator: Accelerator) -> tuple[nn.Module, list[torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(1 + accelerator.process_index)  # of dropout
    losses = []
    for number in range(3):
        losses.append(step(accelerator, model, batch(number, accelerator.process_index)))
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


if __name__ == "__main__":
    shard_on_cpu()
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    )
    model, losses = train(plan(make_model(), accelerator.num_processes), accelerator)
    found = hybridremat.get_plan(model)
    accelerator.print(f"a step takes {found.predicted_peak:,} of {found.memory_limit:,} bytes")
    accelerator.print("losses", *(f"{loss:.4f}" for loss in losses))
