"""Supervised fine-tuning with TRL under a memory limit: a Llama with LoRA, and the Trainer's callback.

Needs packages that hybridremat does not install: pip install trl peft

python examples/trl_sft.py [STEPS [LAYERS [WIDTH]]]
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hybridremat import HybridRematTrainerCallback

WORDS = ("<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61)))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word; yours would be AutoTokenizer.from_pretrained(…)."""
    words = models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def make_model(layers: int, width: int) -> LlamaForCausalLM:
    """Yours would be LlamaForCausalLM.from_pretrained(…)."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes, **tokens))


def main(steps: int = 6, layers: int = 8, width: int = 256) -> None:
    rows = Dataset.from_list([{"input_ids": [3 + (row * 7 + n) % 60 for n in range(96)]} for row in range(8)])
    how = {"report_to": [], "use_cpu": not torch.cuda.is_available(), "bf16": False, "save_strategy": "no"}
    # hybridremat chooses what is computed again: TRL's own checkpoints are off
    how |= {"gradient_checkpointing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    args = SFTConfig("output", per_device_train_batch_size=2, max_steps=steps, logging_steps=1, **how)
    # without cost_model, kernels are timed; TRL's fused head takes 128 KiB a token, of a model as small as
    # this nearly all that there is: if 80 % is too little, the plan of least memory runs
    limit = {"memory_limit": "80%", "cost_model": "flops", "on_infeasible": "least"}
    callback = HybridRematTrainerCallback(**limit)
    given = {"train_dataset": rows, "processing_class": make_tokenizer(), "callbacks": [callback]}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with callback:
        SFTTrainer(model=make_model(layers, width), args=args, peft_config=lora, **given).train()
    for plan in callback.plans:
        print(f"a step takes {plan.needed:,} of {plan.memory_limit:,} bytes, with the loss outside the model")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
