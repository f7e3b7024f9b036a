"""TRL's trainers with the callback alone: the same losses and weights as without it, within the limit."""

from __future__ import annotations

import pytest
import torch

from hybridremat import HybridRematTrainerCallback
from support.compat.pairs import EQUAL

GROUP = "Loops"
WORDS = 60
STEPS = 3
COMMON = {
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
KEY = "hybridremat/{}_peak_bytes"
REMARK = "LoRA, the callback alone, 80 % of plain; losses and weights; measured {} bytes, limit {}"


def tokenizer():
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def model():
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    tokens = {"vocab_size": WORDS + 3, "pad_token_id": 0, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=256))


def text(first, count):
    """Words of which the first depends on ``first``."""
    return " ".join(f"w{(first * 7 + word) % WORDS}" for word in range(count))


def sft(folder, common):
    """Supervised fine-tuning, the prompt masked."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = []
    for row in range(8):
        tokens = [3 + (row * 7 + place) % WORDS for place in range(96)]
        rows.append({"input_ids": tokens, "labels": [-100] * 16 + tokens[16:]})
    arguments = SFTConfig(folder, dataset_kwargs={"skip_prepare_dataset": True}, **COMMON)
    return SFTTrainer(args=arguments, train_dataset=Dataset.from_list(rows), **common)


def dpo(folder, common):
    """Preferences."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": text(row, 16), "chosen": text(row + 1, 64), "rejected": text(row + 2, 64)}
        for row in range(8)
    ]
    return DPOTrainer(args=DPOConfig(folder, **COMMON), train_dataset=Dataset.from_list(rows), **common)


def grpo(folder, common):
    """Rewards; what is generated, and so the batch, has another length in each step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **_):
        return [float(len(each) % 7) for each in completions]

    arguments = GRPOConfig(folder, num_generations=2, max_completion_length=32, **COMMON)
    rows = Dataset.from_list([{"prompt": text(row, 16)} for row in range(8)])
    return GRPOTrainer(reward_funcs=reward, args=arguments, train_dataset=rows, **common)


TRAINERS = {"SFTTrainer": sft, "DPOTrainer": dpo, "GRPOTrainer": grpo}


def trained(make, folder, callbacks):
    """Losses, weights and all log entries of a training with LoRA."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    common = {"model": model(), "processing_class": tokenizer(), "callbacks": callbacks, "peft_config": lora}
    trainer = make(str(folder), common)
    trainer.train()
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    logs = trainer.state.log_history
    return [entry["loss"] for entry in logs if "loss" in entry], weights, logs


WAYS = [
    *((name, {}) for name in TRAINERS),
    *((n, {"units": "*layers.*"}) for n in ("DPOTrainer", "GRPOTrainer")),
]


@pytest.mark.compat
@pytest.mark.parametrize(
    ("name", "how"), WAYS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_trl(name, how, tmp_path, line, monkeypatch):
    for package in ("trl", "datasets", "peft"):
        pytest.importorskip(package)
    # several tiles for the vocabulary, as for a real one: else one buffer is most of the step's memory
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 32)
    losses, weights, _ = trained(TRAINERS[name], tmp_path / "plain", [])
    callback = HybridRematTrainerCallback(memory_limit="80%", cost_model="flops", measure_every=1, **how)
    same, planned, logs = trained(TRAINERS[name], tmp_path / "planned", [callback])
    assert losses == same
    assert [each for each in weights if not torch.equal(weights[each], planned[each])] == []
    peaks = [(e.get(KEY.format("measured"), 0), e["hybridremat/limit_bytes"]) for e in logs if "loss" in e]
    assert all(measured <= limit for measured, limit in peaks), peaks
    assert max(peaks)[0] > 0
    units = f", units `{how['units']}`" if how else ""
    line(GROUP, f"TRL {name}, Llama{units}", EQUAL, remark=REMARK.format(*max(peaks)))
