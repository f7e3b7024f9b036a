"""A Llama with LoRA under a memory limit in the Trainer: texts of several lengths, and one callback.

Needs a package that hybridremat does not install: pip install peft

python examples/trainer_lora.py [STEPS [LAYERS [WIDTH]]]
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hybridremat import HybridRematTrainerCallback

VOCABULARY = 1024


def make_model(layers: int, width: int) -> nn.Module:
    """Yours would be LlamaForCausalLM.from_pretrained(…)."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, use_cache=False, **sizes)
    lora = LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)  # first this, then the plan


def texts(count: int, lengths: tuple[int, ...] = (64, 96)) -> list[dict[str, torch.Tensor]]:
    """Batches are of one length each here; a collator that pads does the same."""
    rows = [torch.randint(VOCABULARY, (lengths[number // 4 % len(lengths)],)) for number in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


class InOrder(Trainer):
    def _get_train_sampler(self, dataset: object = None) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(dataset)  # so that equal lengths stay together


def main(steps: int = 12, layers: int = 4, width: int = 128) -> None:
    how = {"use_cpu": not torch.cuda.is_available(), "report_to": [], "save_strategy": "no"}
    args = TrainingArguments("output", per_device_train_batch_size=4, max_steps=steps, logging_steps=1, **how)
    limit = {"memory_limit": "60%", "cost_model": "flops"}  # without cost_model, kernels are timed
    callback = HybridRematTrainerCallback(**limit)
    model = make_model(layers, width)
    with callback:
        InOrder(model=model, args=args, train_dataset=texts(4 * steps), callbacks=[callback]).train()
    for plan in callback.plans:
        print(f"{plan.origin.inputs[0]}: a step takes {plan.predicted_peak:,} of {plan.memory_limit:,} bytes")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
