"""A Llama of 8 billion parameters planned for one GPU of 80 GB, on a laptop without a GPU.

python examples/device_not_here.py [LAYERS [WIDTH [LENGTH]]]      (a minute and a half, 0.7 GB, on 2 cores)

Parameters, AdamW's state, batch and step are added up; nothing of that size is allocated.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybridremat


def make(layers: int, width: int, length: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The sizes of Llama 3.1 8B on the device meta: shapes and no values."""
    heads = max(width // 128, 1)
    sizes = {"hidden_size": width, "intermediate_size": 7 * width // 2, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": max(heads // 4, 1)}
    config = LlamaConfig(vocab_size=128256, use_cache=False, **sizes, **attention)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        tokens = torch.zeros(1, length, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def main(layers: int = 32, width: int = 4096, length: int = 4096) -> None:
    model, batch = make(layers, width, length)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters")
    # kernels' workspaces are unknown here: a margin for them
    found = hybridremat.fit(model, kwargs=batch, optimizer="adamw", device_spec="h100", margin="4GiB")
    print(found)
    if found.plan is not None:
        found.plan.save("plan.json")
        print('on the device: hybridremat.wrap(model, kwargs=batch, plan="plan.json")')


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
