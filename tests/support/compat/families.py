"""One model of each family of transformers, made small by the names of its configuration's fields.

Nothing here is written for one family: what these rules do not build is left out by name, with a reason, in
tests/compat/families.json.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import hybridremat
from support.compat.harness import HOW, Expected, train_joint
from support.training import loss_in, train

TRANSFORMERS: Final = find_spec("transformers")  # importing it takes seconds
FOLDER: Final = Path(TRANSFORMERS.origin if TRANSFORMERS and TRANSFORMERS.origin else "").parent / "models"
WORDS, LENGTH, PICTURE, SOUND = 64, 16, 64, 3200
MOST_PARAMETERS, MOST_SECONDS, MOST_HEADS = 4_000_000, 3, 6
LEFT_OUT: Final = "left out"
NOT_CAPTURED: Final = 'refused, as by `torch.compile(backend="aot_eager")`'
SMALL: Final = (
    (r"(image|input|img|pretrain\w*|sample|crop)_size$|image_(height|width)", PICTURE),
    (r"vocab", WORDS),
    (r"rope_head_dim|rotary_dim|nope_head_dim|head_(dim|size)|d_head|d_kv|dim_head|pre_attn_scalar", 16),
    (r"(key_value|kv)_heads|n_head_kv|shared_experts|first_k_dense|n_group|topk_group|expand$", 1),
    (r"experts$|num_routed|num_frames", 4),
    (r"heads?$|layers?$|depths?$|num_blocks|per_tok|top_?k$|moe_k$|mask_(time|feature)_length", 2),
    (r"rank$|queries$|query_tokens|latents|num_denoising|num_points|num_conv_pos_embeddings$", 8),
    (r"intermediate|ffn|mlp_dim|d_ff|n_inner|feedforward|positions?(_embeddings)?$|n_ctx", 64),
    (r"block_size|chunk|window", 64),
    (r"hidden|d_model|n_embd|dims?$|width|channels|embedding_size|state_size|sizes?$|filters|features", 32),
)
"""The most that a number may be, by the name of its field; the first that matches."""
KEPT: Final = (
    r"patch(?!_embed)|kernel|stride|merge|tubelet|group_size|pool|type_vocab|scale|rate$|ratio"
    r"|num_channels|in_chan|levels"
)
IDS: Final = {"pad": 0, "bos": 1, "decoder_start": 1, "eos": 2, "image": 3, "video": 4, "audio": 5}
HEADS: Final = (
    *("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForImageClassification"),
    *("ForObjectDetection", "ForCTC", "ForSequenceClassification", "ForPreTraining", "For", "Model", ""),
)
"""Words in the names of models, the first is tried first."""
Batch = dict[str, Any]


class NotSmallError(Exception):
    """It is too large, or too slow, or does not learn."""


class Learner(nn.Module):
    """Makes a loss of all that a model without one returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        """The sum of the mean squares of all numbers with a gradient."""
        learning = filter(_learns, tree_leaves(dict(self.model(**batch))))
        return sum((each.float().square().mean() for each in learning), torch.zeros(()))


def _learns(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad


def names() -> list[str]:
    """All families with models."""
    return sorted({file.parent.name for file in FOLDER.glob("*/modeling_*.py")})


def _small_number(name: str, value: int) -> int:
    if re.search(r"token(_id|_index)?s?$|_ids?$", name):
        known = (number for word, number in IDS.items() if word in name)
        return value if value < 0 else next(known, 6 + sum(map(ord, name)) % 24)
    if name == "patch_size":
        return value if PICTURE % value == 0 and value < PICTURE else 16
    most = next((most for pattern, most in SMALL if re.search(pattern, name)), value)
    return value if re.search(KEPT, name) else min(value, most)


def _small(name: str, value: Any, layers: Collection[int]) -> Any:
    """A field made small; ``layers``: lengths of lists that have an entry for each layer."""
    if isinstance(value, dict):
        small = {key: _small(str(key), each, layers) for key, each in value.items()}
        return small | {"mrope_section": [4, 2, 2]} if "rope_theta" in small else small
    if isinstance(value, (list, tuple)):
        kept = (value[0], value[-1]) if len(value) in layers else value
        return type(value)(_small(name, each, layers) for each in kept)
    if isinstance(value, float) and "layerdrop" in name:
        return 0.0  # a branch on a random number
    return _small_number(name, value) if type(value) is int else value


def small_config(kind: Any) -> Any:
    """A configuration with small numbers, as are those inside it."""
    usual, given = vars(kind()), {}
    counts = [n for name, n in usual.items() if re.search("num_hidden_layers|n_layer|num_layers", name)]
    layers = {n for n in counts if type(n) is int and n > 2}
    for name in (field.name for field in fields(kind)):
        value = usual.get(name)
        all_heads = [name.replace("num_key_value", word) for word in ("num_attention", "attention", "num")]
        if hasattr(value, "to_diff_dict"):
            given[name] = small_config(type(value)).to_dict()
        elif "key_value_heads" in name and value in map(usual.get, all_heads):
            given[name] = 2
        elif (small := _small(name, value, layers)) != value:
            given[name] = small
    return kind(**given)


def _words(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(WORDS // 2, WORDS, (2, length))


def _pictures(head: str, config: Any, taken: Collection[str]) -> torch.Tensor:
    """Pictures, or, where a grid is given for each, rows of patches."""
    sights = (getattr(config, "vision_config", None), config)
    sight = next((each for each in sights if hasattr(each, "patch_size")), None)
    channels = getattr(sight, "num_channels", getattr(sight, "in_channels", 3))
    if "image_grid_thw" in taken:
        return torch.randn(2 * 16, channels * getattr(sight, "temporal_patch_size", 1) * sight.patch_size**2)
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    return torch.randn(2, *frames, channels, PICTURE, PICTURE)


def _labels(head: str, config: Any, taken: Collection[str]) -> Any:
    """What a head of that name learns."""
    if "Semantic" in head:
        return torch.randint(0, 2, (2, PICTURE, PICTURE))
    if re.search("ObjectDetection|Segmentation", head):
        masks = torch.zeros(2, PICTURE, PICTURE)
        masks[:, 8:40, 8:40] = 1
        one = {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4) * 0.4 + 0.1, "masks": masks}
        return [one, one]
    classes = re.search("Classification|NextSentence", head) and "Token" not in head
    return torch.tensor([0, 1]) if classes else _words()


INPUTS: Final[dict[str, Callable[[str, Any, Collection[str]], Any]]] = {
    "input_ids": lambda *_: _words(),
    "bbox": lambda *_: torch.tensor([1, 2, 5, 7]).repeat(2, LENGTH, 1),
    "pixel_values": _pictures,
    "image_grid_thw": lambda *_: torch.tensor([[1, 4, 4], [1, 4, 4]]),
    "input_features": lambda head, config, _: torch.randn(2, getattr(config, "num_mel_bins", 80), 64),
    "input_values": lambda *_: torch.randn(2, SOUND),
    "past_values": lambda head, config, _: torch.randn(2, getattr(config, "context_length", 64) or 64, 1),
    "labels": _labels,
    "start_positions": lambda *_: torch.tensor([1, 2]),
    "end_positions": lambda *_: torch.tensor([3, 5]),
    "return_loss": lambda *_: True,
    "mm_token_type_ids": lambda *_: torch.zeros(2, LENGTH, dtype=torch.int64),
    "decoder_input_ids": lambda *_: _words(),
}
"""What is given to a forward, by the names of its arguments."""


def _heads(family: str) -> list[Any]:
    """The models of a family, those with losses of their own first, and shorter names."""
    from transformers import PreTrainedModel

    found: dict[str, Any] = {}
    for file in sorted((FOLDER / family).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{file.stem}")
        own = (kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__)
        models = (kind for kind in own if isinstance(kind, type) and issubclass(kind, PreTrainedModel))
        found |= {each.__name__: each for each in models if not each.__name__.endswith("PreTrainedModel")}

    def order(name: str) -> tuple[int, int]:
        return next(n for n, word in enumerate(HEADS) if word in name), len(name)

    return [found[name] for name in sorted(found, key=order)]


def _built(kind: Any) -> tuple[nn.Module, Batch]:
    """A small model, and what its forward takes."""
    config = small_config(kind.config_class)
    with torch.device("meta"):
        size = sum(each.numel() for each in kind(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotSmallError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = kind(config).train()
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
    taken = inspect.signature(model.forward).parameters
    return model, {name: make(kind.__name__, config, taken) for name, make in INPUTS.items() if name in taken}


def _forms(batch: Batch) -> Iterator[Batch]:
    """The batch; with pictures in lists; with sounds turned; with words alone, or without labels."""
    yield batch
    if "pixel_values" in batch:
        yield {**batch, "pixel_values": batch["pixel_values"].unsqueeze(1)}
    if "input_features" in batch:
        yield {**batch, "input_features": batch["input_features"].mT.contiguous()}
    left = "pixel|features|values|grid" if "input_ids" in batch else "labels"
    yield {name: each for name, each in batch.items() if not re.search(left, name)}


def _with_pictures(batch: Batch, features: int) -> Batch:
    """The batch with a token for each feature of its pictures."""
    ids = _words(LENGTH + features)
    ids[:, 1 : 1 + features] = IDS["image"]
    batch = {**batch, "input_ids": ids, "labels": ids.clamp(min=WORDS // 2)}
    return batch | {name: (ids == IDS["image"]).long() for name in batch if name == "mm_token_type_ids"}


def _trained(model: nn.Module, batch: Batch) -> nn.Module:
    """The model, or a learner around it if it has no loss, once a copy took two steps."""
    started, tried = time.process_time(), copy.deepcopy(model)
    if not _learns(getattr(tried(**batch), "loss", None)):
        model, tried = Learner(model), Learner(tried)
    for _ in range(2):
        loss = loss_in(tried(**batch))
        loss.backward()
        if not loss.isfinite():
            raise NotSmallError("a loss that is not finite")
    if time.process_time() - started > MOST_SECONDS:
        raise NotSmallError("slow steps")
    return model


def _fitting(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """The first form of the batch that a model learns from, with the tokens for pictures that it asks for."""
    first, forms = None, [*_forms(batch)]
    while forms:
        form = forms.pop(0)
        try:
            return _trained(model, form), form
        except Exception as error:  # noqa: BLE001 - whatever does not fit
            first = first or error
            wanted = re.search(r"tokens: 0, features:? (\d+)", str(error))
            if wanted and form["input_ids"].shape[1] == LENGTH:  # for both, and some models count numbers
                forms = [*(_with_pictures(form, int(wanted[1]) // share) for share in (2, 64)), *forms]
    raise first or NotSmallError()


def family(name: str) -> tuple[nn.Module, Batch]:
    """A model of a family that trains, with its batch; if there is none, the first error."""
    first = None
    for kind in _heads(name)[:MOST_HEADS]:
        try:
            return _fitting(*_built(kind))
        except Exception as error:  # noqa: BLE001 - whatever does not fit
            first = first or error
    raise first or NotSmallError("no model")


def hold_to_plain(name: str) -> str:
    """Hold two steps of a family's model at 80 % to plain training; what comes out."""
    try:
        model, batch = family(name)
    except Exception as error:  # noqa: BLE001 - whatever does not fit
        return f"{LEFT_OUT}: {type(error).__name__}: {' '.join(str(error).split())}"
    expected = Expected(model, batch, steps=2)
    how = {**HOW, "memory_limit": "80%", "on_infeasible": "least"}
    try:
        planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, **how)
        trained = train(planned, batch, steps=2)
    except Exception:
        try:
            train_joint(model, batch, steps=2)
        except Exception:  # noqa: BLE001 - whatever PyTorch's capture raises
            return NOT_CAPTURED
        raise
    limit, outcome = hybridremat.get_plan(planned).memory_limit, expected.equal_to(trained)
    assert max(trained.peaks) <= limit, f"{max(trained.peaks)} bytes pass {limit}"
    return outcome
