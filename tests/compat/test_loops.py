"""Training loops of well-known libraries, unmodified, around a wrapped model."""

from __future__ import annotations

import copy
import gc
from itertools import accumulate

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hybridremat
from support.compat.pairs import (
    EQUAL,
    Run,
    assert_equal_runs,
    batches,
    hold,
    learn,
    net,
    run,
    wrap_least,
    wrap_share,
)
from support.planned_steps import planned_forwards
from support.training import recorded

GROUP = "Loops"
LOGGED = 64  # bytes: the loss that Lightning keeps for its log, and divides for accumulation


class Rows(Dataset):
    """A data set of the small net's or of a language model's rows."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


def net_rows(count=3):
    made = batches(count)
    return Rows({name: torch.cat([batch[name] for batch in made]) for name in made[0]})


def text_rows(count=12):
    drawn = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 64, (count, 16), generator=drawn)
    return Rows({"input_ids": tokens, "labels": tokens, "not_for_the_model": torch.zeros(count)})


def language_model():
    """A small GPT-2 with its default dropout, and a batch of its Trainer.

    Caches are off: a planned step runs without, and plain training with them differs in last bits.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).train()
    model.config.use_cache = False
    tokens = text_rows(2).columns["input_ids"]
    return model, {"input_ids": tokens, "labels": tokens}


def measured(call, run: Run):
    """The same call, with its allocations recorded if the run is measured."""

    def step(*args, **kwargs):
        results = []
        run.step(lambda: results.append(call(*args, **kwargs)))
        return results.pop()

    return step


# Hugging Face Trainer


def make_trainer(model, folder, rows, **arguments):
    from transformers import Trainer, TrainingArguments

    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    arguments = TrainingArguments(output_dir=str(folder), **settings | arguments)
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)


def keep_history(trainer, run):
    for entry in trainer.state.log_history:
        for name in ("loss", "grad_norm", "eval_loss", "train_loss"):
            if name in entry:
                run.keep(name, torch.tensor(entry[name], dtype=torch.float64))


TRAINERS = {
    "as it is": {},
    "gradient_accumulation_steps=2": {"gradient_accumulation_steps": 2},
    "label smoothing, evaluation between steps": {
        "label_smoothing_factor": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "bf16": {"bf16": True},
}
ITS_LOSS = 16 << 10  # bytes that the label smoother allocates, outside of the model
SMALL = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 2, "remove_unused_columns": False}


def train_with_trainer(folder, rows, **arguments):
    """The loop: training, and what the Trainer then saves."""

    def loop(model, run):
        trainer = make_trainer(model, folder, rows, **arguments)
        trainer.training_step = measured(trainer.training_step, run)
        trainer.train()
        keep_history(trainer, run)
        assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is model
        trainer.save_model(str(folder / "saved"))
        from safetensors.torch import load_file

        for key, tensor in load_file(folder / "saved" / "model.safetensors").items():
            run.keep(f"saved {key}", tensor)

    return loop


@pytest.mark.compat
@pytest.mark.parametrize("name", TRAINERS)
def test_trainer(name, line, tmp_path):
    model, batch = language_model()
    model.loss_type = "ForCausalLM"  # named, no log line breaks the graph of the reference
    reserve = ITS_LOSS if "label_smoothing_factor" in TRAINERS[name] else 64
    planned = wrap_share(copy.deepcopy(model), batch, "90%", reserve=reserve)
    outcome, forwards = EQUAL, None
    if name == "bf16":  # AOTAutograd changes the arithmetic of this model's backward in bfloat16
        model.compile(backend="aot_eager", dynamic=False)
        outcome, forwards = "bit-equal to the unplanned joint graph", 4
    loop = train_with_trainer(tmp_path, text_rows(), **TRAINERS[name])
    figures = hold(loop, model, planned, skip=1, forwards=forwards)
    remark = f"weights, losses, norms and saved keys; {figures}"
    line(GROUP, f"Hugging Face Trainer, GPT-2, {name}", outcome, remark=remark)


@pytest.mark.slow
def test_trainer_with_a_module_of_ones_own(line, tmp_path):
    pytest.importorskip("transformers")
    model, batch = net()
    planned = wrap_share(copy.deepcopy(model), batch, "90%", reserve=64)
    figures = hold(train_with_trainer(tmp_path, net_rows(8), **SMALL), model, planned)
    remark = f"accumulation; weights, losses, norms and saved keys; {figures}"
    line(GROUP, "Hugging Face Trainer, any module", EQUAL, remark=remark)


@pytest.mark.compat
def test_trainer_resumes_from_a_checkpoint(line, tmp_path):
    def loop(model, run):
        folder = tmp_path / ("planned" if run.measure else "plain")
        fresh, wrapped = copy.deepcopy(model), run.measure
        if wrapped:
            wrap_share(fresh, batch, "90%", reserve=64)
        make_trainer(model, folder, text_rows(), save_strategy="steps", save_steps=2).train()
        trainer = make_trainer(fresh, folder, text_rows())
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        keep_history(trainer, run)
        run.keep_model(fresh)

    model, batch = language_model()
    planned = copy.deepcopy(model)
    wrap_share(planned, batch, "90%", reserve=64)
    with planned_forwards() as ran:
        made = run(loop, planned, measure=True)
    assert run(loop, model).differences(made) == []
    assert [one is planned for one in ran] == [True] * 4 + [False] * 2
    line(GROUP, "Hugging Face Trainer, resumed from a checkpoint", EQUAL)


@pytest.mark.compat
def test_generation_after_wrapping(line):
    def loop(model, run):
        prompt, config = batch["input_ids"][:, :4], model.config
        for sample in (False, True):
            config.use_cache = model is planned  # a planned step switches it off itself
            model(**batch)["loss"].backward()
            assert config.use_cache is (model is planned)
            config.use_cache = True
            model.eval()
            with torch.no_grad():
                assert model(prompt).past_key_values is not None
            made = model.generate(prompt, max_new_tokens=6, do_sample=sample, pad_token_id=0)
            run.keep("generated", made)
            model.train()
            run.keep("generated in training mode", model.generate(prompt, max_new_tokens=3, pad_token_id=0))

    model, batch = language_model()
    model.config.use_cache = True
    planned = wrap_share(copy.deepcopy(model), batch)
    assert_equal_runs(loop, model, planned)
    line(GROUP, "generation with a wrapped Hugging Face model, between steps", EQUAL)


# accelerate


@pytest.fixture
def accelerator_state():
    """accelerate keeps one state for the process; each test starts without."""
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


def accelerated(precision):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def loop(model, run):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        keys = list(model.state_dict())
        prepared, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(net_rows(6), batch_size=64)
        )
        for batch in loader:
            with accelerator.accumulate(prepared):

                def step(batch=batch):
                    loss = prepared(**batch)["loss"]
                    accelerator.backward(loss)
                    run.keep("loss", loss)

                run.step(step)
                if accelerator.sync_gradients:
                    run.keep("norm", accelerator.clip_grad_norm_(prepared.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.unwrap_model(prepared) is model
        assert list(accelerator.get_state_dict(prepared)) == keys == list(model.state_dict())

    return loop


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.compat)])
def test_accelerate(precision, line, accelerator_state):
    model, batch = net()
    planned = wrap_share(copy.deepcopy(model), batch, "120%", reserve=64)
    figures = hold(accelerated(precision), model, planned, skip=1)
    remark = f"weights, losses, norms; unwrap_model gives the model itself; {figures}"
    line(GROUP, f"accelerate, mixed_precision={precision!r}, accumulation, clipping", EQUAL, remark=remark)


# Lightning


def lightning_module(lightning, body, *, whole):
    """A module with a net inside: the loss comes from its own forward if all of it is wrapped."""

    class Lit(lightning.LightningModule):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x, labels):
            return self.body(x, labels)["loss"]

        def training_step(self, batch, index):
            loss = self(**batch) if whole else self.body(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Lit(body)


def steps_kept(lightning, run):
    """A callback that keeps each loss, and measures from the start of a step to the end of its backward.

    As everywhere, not the first ``run.skip`` steps.
    """

    class Steps(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if run.measure and index >= run.skip:
                gc.collect()
                self.recording = recorded()
                self.sizes = self.recording.__enter__()

        def on_after_backward(self, *_):
            if hasattr(self, "recording"):
                self.recording.__exit__(None, None, None)
                run.made.peaks.append(max(accumulate(self.sizes)))
                del self.recording

        def on_train_batch_end(self, trainer, module, outputs, *_):
            run.keep("loss", trainer.callback_metrics["loss"])

    return Steps()


@pytest.mark.parametrize(
    ("precision", "whole"),
    [
        ("32-true", False),
        pytest.param("32-true", True, marks=pytest.mark.compat),
        pytest.param("bf16-mixed", False, marks=pytest.mark.compat),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_lightning(precision, whole, line, tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    def loop(model, run):
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            precision=precision,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            callbacks=[steps_kept(lightning, run)],
            default_root_dir=tmp_path,
        )
        trainer.fit(model, DataLoader(net_rows(4), batch_size=64))
        file = tmp_path / "state.ckpt"
        trainer.save_checkpoint(file)
        for key, tensor in torch.load(file, weights_only=False)["state_dict"].items():
            run.keep(f"saved {key}", tensor)

    body, batch = net()
    model = lightning_module(lightning, body, whole=whole)
    planned = copy.deepcopy(model)
    target = planned if whole else planned.body
    anew = int(precision == "bf16-mixed")  # the first step under autocast is planned anew
    if anew:
        wrap_share(target, batch, "95%", reserve=LOGGED)
    else:
        wrap_least(target, batch, reserve=LOGGED)
    made = assert_equal_runs(loop, model, planned, measure=True, skip=anew)
    limit = hybridremat.get_plan(target).memory_limit
    assert len(made.peaks) == 4 - anew and max(made.peaks) <= limit, (made.peaks, limit)
    what = "the LightningModule itself wrapped" if whole else "the net inside wrapped"
    line(
        GROUP,
        f"Lightning, precision={precision!r}, {what}",
        EQUAL,
        remark=f"accumulation, clipping, saved keys; measured {max(made.peaks)} bytes, limit {limit}",
    )


# PEFT


def with_lora(model, targets):
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["GPT-2", "any module"])
def test_lora(kind, line):
    """The adapters are there before the model is wrapped: they call ``forward`` of what they adapt."""
    from peft import get_peft_model_state_dict

    def loop(model, run):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            learn(model, run, batch)
            optimizer.step()
        for key, tensor in get_peft_model_state_dict(model).items():
            run.keep(f"saved {key}", tensor)
        with torch.no_grad(), model.disable_adapter():
            run.keep("without adapter", model(**batch)["loss"])
        model.merge_adapter()
        with torch.no_grad():
            run.keep("merged", model(**batch)["loss"])

    base, batch = language_model() if kind == "GPT-2" else net()
    model = with_lora(base, ["c_attn"] if kind == "GPT-2" else ["0", "1", "head"])
    planned = wrap_least(copy.deepcopy(model), batch)
    remark = f"wrapped after get_peft_model; saved keys too; {hold(loop, model, planned)}"
    line(GROUP, f"PEFT LoRA, {kind}", EQUAL, remark=remark)
