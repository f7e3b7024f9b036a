"""Hugging Face's Trainer, unmodified, with the callback that plans and watches."""

from __future__ import annotations

import copy
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import hybridremat
from hybridremat.runtime.planned_call import PlannedCall
from hybridremat.sequence.offload.link import Link
from support.loop_cases import (
    BAD,
    HOW,
    MEASURED,
    MEASURED_OVERHEAD,
    OVERHEAD,
    PREDICTED,
    Rows,
    Wandb,
    Writer,
    agree,
    assert_uploaded_once,
    fail_in_backward,
    profiler_runs,
)
from support.planned_steps import planned_forwards

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STEPS = {"max_steps": 4, "per_device_train_batch_size": 2}


def language_model():
    """A small GPT-2 with dropout; without caches, as a planned step runs it."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.config.use_cache = False
    model.loss_type = "ForCausalLM"
    return model


def text_rows(count=12):
    tokens = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(3))
    return Rows(input_ids=tokens, labels=tokens)


def make_trainer(model, folder, *callbacks, rows=None, kind=transformers.Trainer, **arguments):
    settings = {
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **settings | STEPS | arguments)
    rows = rows or text_rows()
    trainer = kind(
        model=model, args=args, train_dataset=rows, eval_dataset=rows, callbacks=[*callbacks] or None
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def planned(limit="90%", **how):
    return hybridremat.HybridRematTrainerCallback(memory_limit=limit, **HOW, **how)


def entries(trainer, key):
    return [entry for entry in trainer.state.log_history if key in entry]


def assert_plain(model):
    assert model._compiled_call_impl is None and "_compiled_call_impl" not in vars(model)


@pytest.mark.slow
def test_values_move_in_a_training_loop(tmp_path, monkeypatch):
    """Batches of eight, for which some have to, and of four; as fast a link as there could be."""
    monkeypatch.setattr("hybridremat.planning.moving.NOMINAL", Link(1e15, 1e15, latency=0))
    plain, model = language_model(), language_model()
    first = make_trainer(plain, tmp_path / "plain", per_device_train_batch_size=8)
    first.train()
    callback = planned("75%", offload=f"file:{tmp_path}", measure_every=1)
    second = make_trainer(model, tmp_path / "moved", callback, per_device_train_batch_size=8)
    second.train()
    assert len(callback.plans) == 2 and max(plan.host_bytes for plan in callback.plans) > 0
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), model.parameters(), strict=True))
    assert [e["loss"] for e in entries(first, "loss")] == [e["loss"] for e in entries(second, "loss")]
    assert entries(second, MEASURED) and all(map(agree, entries(second, MEASURED)))


class Seen(transformers.TrainerCallback):
    """Stands before the callback, as the integrations of ``report_to`` do."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


@pytest.mark.everyday
def test_training_is_equal_and_measured(tmp_path):
    """Accumulation, clipping, evaluation between steps, a smaller last batch, two epochs, checkpoints."""
    many = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    plain, model, seen = language_model(), language_model(), Seen()
    first = make_trainer(plain, tmp_path / "plain", rows=text_rows(7), **many)
    first.train()
    second = make_trainer(
        model, tmp_path / "planned", seen, planned(measure_every=1), rows=text_rows(7), **many
    )
    with planned_forwards() as ran, warnings.catch_warnings():
        warnings.simplefilter("error", hybridremat.PredictionWarning)
        second.train()
    assert len(ran) == 8  # four micro-batches in each epoch
    assert_plain(model)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    for key in ("loss", "grad_norm", "eval_loss"):
        values = [entry[key] for entry in entries(first, key)]
        assert values and values == [entry[key] for entry in entries(second, key)], key
    measured = entries(second, MEASURED)
    assert len(measured) == 4 and all(map(agree, measured)), measured
    assert {PREDICTED, OVERHEAD} <= entries(second, "loss")[0].keys()
    reported = [logs for logs in seen.logs if MEASURED in logs]
    assert [logs[MEASURED] for logs in reported] == [entry[MEASURED] for entry in measured]
    files = [tmp_path / run / "checkpoint-3" / "model.safetensors" for run in ("plain", "planned")]
    kept, made = map(load_file, files)
    assert kept.keys() == made.keys() and all(torch.equal(kept[name], made[name]) for name in kept)


def cut_to_odd_lengths(rows):
    """A collator whose batches have lengths of 5 to 16, by what is in them."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    length = 5 + int(batch["input_ids"].sum()) % 12
    return {name: column[:, :length].contiguous() for name, column in batch.items()}


def test_batches_of_many_lengths_are_captured_twice(tmp_path):
    plain, model, calls = language_model(), language_model(), []
    rows, watch = text_rows(24), planned("110%", dynamic=None, measure_every=1)
    first = make_trainer(plain, tmp_path / "plain", rows=rows, max_steps=8)
    first.data_collator = cut_to_odd_lengths
    first.train()
    second = make_trainer(model, tmp_path / "planned", watch, rows=rows, max_steps=8)
    second.data_collator = cut_to_odd_lengths
    with planned_forwards() as ran, warnings.catch_warnings():
        warnings.simplefilter("error", hybridremat.PredictionWarning)
        with pytest.MonkeyPatch.context() as patch:
            removed = PlannedCall.remove
            patch.setattr(PlannedCall, "remove", lambda call: (calls.append(call), removed(call))[1])
            second.train()
    assert len(ran) == 8
    (call,) = calls
    assert call.sizes.counts()[0] == 1 and call.captures > 4
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert all(map(agree, entries(second, MEASURED)))


@pytest.mark.slow
def test_by_default_the_second_planned_step_is_measured_alone(tmp_path):
    trainer = make_trainer(language_model(), tmp_path, planned())
    trainer.train()
    assert [entry["step"] for entry in entries(trainer, MEASURED)] == [2]
    assert [entry["step"] for entry in entries(trainer, PREDICTED)] == [1, 2, 3, 4, 4]


class Board(transformers.TrainerCallback):
    """Has a writer until the end, as transformers' callback for TensorBoard does."""

    def __init__(self, writer):
        self.tb_writer = writer

    def on_train_end(self, args, state, control, **_):
        self.tb_writer = None


class Weights(transformers.TrainerCallback):
    """Has the module, as transformers' callback for Weights & Biases does."""

    def __init__(self, wandb):
        self._wandb = wandb


def test_the_report_reaches_each_logger_once(tmp_path, monkeypatch):
    writer, wandb, callback = Writer(), Wandb(), planned()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trainer = make_trainer(language_model(), tmp_path, Board(writer), Weights(wandb), callback)
    trainer.train()
    assert_uploaded_once(writer, wandb, tmp_path / "hybridremat-report" / "plan.html")
    (plan,) = callback.plans
    entry = entries(trainer, PREDICTED)[0]
    assert (entry["hybridremat/plain_peak_bytes"], entry["hybridremat/plans"]) == (plan.plain_peak, 1)
    assert entry["hybridremat/limit_bytes"] == plan.memory_limit
    assert entry["hybridremat/planning_seconds"] == plan.planning_seconds


def test_without_a_report_nothing_is_written_or_sent(tmp_path):
    writer = Writer()
    make_trainer(language_model(), tmp_path, Board(writer), planned(report=False)).train()
    assert not writer.images and not (tmp_path / "hybridremat-report").exists()


@pytest.mark.slow
def test_plain_steps_give_a_measured_overhead(tmp_path):
    trainer = make_trainer(language_model(), tmp_path, planned(plain_steps=1, measure_every=100))
    with planned_forwards() as ran:
        trainer.train()
    assert len(ran) == 3
    assert [entry["step"] for entry in entries(trainer, PREDICTED)] == [2, 3, 4, 4]
    # The first planned step plans, the second one is measured: only the third one's time counts.
    assert [entry["step"] for entry in entries(trainer, MEASURED_OVERHEAD)] == [4, 4]
    assert not entries(make_trainer(language_model(), tmp_path, planned()), MEASURED_OVERHEAD)


@pytest.mark.slow
def test_resuming_from_a_checkpoint(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    plain, resumed = language_model(), language_model()
    make_trainer(plain, tmp_path / "plain").train()
    make_trainer(language_model(), tmp_path / "planned", planned(), **saving).train()
    again = make_trainer(resumed, tmp_path / "planned", planned())
    with planned_forwards() as ran:
        again.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-2"))
    assert len(ran) == 2
    assert all(torch.equal(p, resumed.get_parameter(name)) for name, p in plain.named_parameters())


class Holding(transformers.Trainer):
    """Allocates beside the model, but not in the first step, where that would be measured and reserved."""

    def compute_loss(self, model, inputs, return_outputs=False, **named):
        loss = super().compute_loss(model, inputs, **named)
        held = torch.zeros(8192 if self.state.global_step else 1)
        return loss + (held * loss.detach()).sum() * 0


@pytest.mark.slow
def test_a_peak_beyond_the_prediction_warns(tmp_path, caplog):
    trainer = make_trainer(language_model(), tmp_path, planned(measure_every=1), kind=Holding)
    with pytest.warns(hybridremat.PredictionWarning, match=r"% more than .* plan predicts") as caught:
        trainer.train()
    ours = [one for one in caught if one.category is hybridremat.PredictionWarning]
    assert len(ours) == 1 and "reserve=" in str(ours[0].message)
    assert sum("more than" in record.message for record in caplog.records) == 1
    assert not any(agree(entry) for entry in entries(trainer, MEASURED))


@pytest.mark.slow
def test_what_is_reserved_does_not_warn(tmp_path):
    callback = planned("300%", reserve="80KiB", measure_every=1)
    trainer = make_trainer(language_model(), tmp_path, callback, kind=Holding)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hybridremat.PredictionWarning)
        trainer.train()
    assert entries(trainer, MEASURED)


@pytest.mark.slow
def test_a_model_that_is_wrapped_already_is_only_watched(tmp_path):
    model = language_model()
    batch = {key: rows[:2] for key, rows in text_rows().columns.items()}
    hybridremat.wrap(model, kwargs=batch, memory_limit="90%", **HOW)
    call = model._compiled_call_impl
    trainer = make_trainer(model, tmp_path, hybridremat.HybridRematTrainerCallback())
    trainer.train()
    assert model._compiled_call_impl is call
    with call.around_forward() as nothing:
        assert nothing is None
    assert all(map(agree, entries(trainer, MEASURED))) and entries(trainer, MEASURED)
    model._compiled_call_impl = None


@pytest.mark.slow
def test_a_submodule_is_wrapped_by_name(tmp_path):
    model = language_model()
    callback = planned("120%", module="transformer", grad_outputs="all", tolerance=10)
    with planned_forwards() as ran:
        make_trainer(model, tmp_path, callback).train()
    assert len(ran) == 4 and all(one is model.transformer for one in ran)
    assert_plain(model.transformer)


class Failing(transformers.Trainer):
    """The backward of the second step fails, which is the step that is measured."""

    def compute_loss(self, model, inputs, return_outputs=False, **named):
        loss = super().compute_loss(model, inputs, **named)
        return fail_in_backward(loss) if self.state.global_step == 1 else loss


def test_a_failing_step_leaves_nothing_behind(tmp_path):
    model, callback = language_model(), planned()
    trainer = make_trainer(model, tmp_path, callback, kind=Failing)
    with pytest.raises(RuntimeError, match="the backward fails"), callback:
        trainer.train()
    assert_plain(model)
    assert not profiler_runs()


@pytest.mark.slow
def test_training_starts_afresh_after_a_failure(tmp_path):
    model, callback = language_model(), planned()
    with pytest.raises(RuntimeError, match="the backward fails"):
        make_trainer(model, tmp_path, callback, kind=Failing).train()
    assert model._compiled_call_impl is not None and profiler_runs()  # nobody was told that training failed
    trainer = make_trainer(model, tmp_path, callback)
    trainer.train()
    assert entries(trainer, MEASURED)
    assert_plain(model)


def test_an_infeasible_limit_comes_out_of_the_first_step(tmp_path):
    model, callback = language_model(), planned(1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hybridremat.InfeasibleLimitError), callback:
        make_trainer(model, tmp_path, callback).train()
    assert_plain(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("options", "says"), BAD)
def test_bad_options_are_errors_at_once(options, says):
    with pytest.raises(hybridremat.HybridRematError, match=says):
        hybridremat.HybridRematTrainerCallback(**options)


@pytest.mark.parametrize(
    ("options", "prepare", "kind", "says"),
    [
        ({}, None, hybridremat.LimitError, "neither memory_limit nor max_overhead"),
        ({"memory_limit": "50%", "module": "body"}, None, hybridremat.ModelError, "no submodule 'body'"),
        ({"memory_limit": "50%"}, "compiled", hybridremat.ModelError, "already compiled"),
        ({"memory_limit": "50%"}, "frozen", hybridremat.ModelError, "no trainable parameters"),
    ],
)
@pytest.mark.parametrize("plain_steps", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_what_cannot_be_wrapped_is_an_error_before_training(
    options, prepare, kind, says, plain_steps, tmp_path
):
    model = language_model()
    if prepare == "compiled":
        model.compile(backend="eager")
    if prepare == "frozen":
        model.requires_grad_(False)
    callback = hybridremat.HybridRematTrainerCallback(plain_steps=plain_steps, **options)
    trainer = make_trainer(model, tmp_path, callback)
    with pytest.raises(kind, match=says):
        trainer.train()
    assert trainer.state.global_step == 0
    if prepare != "compiled":
        assert_plain(model)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "hybridremat.integrations.transformers_trainer")
    monkeypatch.delitem(vars(hybridremat), "HybridRematTrainerCallback", raising=False)
    with pytest.raises(hybridremat.MissingPackageError, match=r"pip install 'transformers\[torch\]"):
        hybridremat.HybridRematTrainerCallback  # noqa: B018


def test_several_gpus_in_one_process_are_refused():
    several = SimpleNamespace(n_gpu=2)
    with pytest.raises(hybridremat.ModelError, match="2 GPUs of this process"):
        planned().on_train_begin(several, None, None, model=language_model())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained_with(optimizer_of, folder, *callbacks, **arguments):
    """A Trainer that is given its optimizer, and its model."""
    model = language_model()
    args = {"max_grad_norm": 0.0, "lr_scheduler_type": "linear"} | arguments
    trainer = make_trainer(model, folder, *callbacks, **args)
    trainer.optimizer = optimizer_of(model)
    return trainer, model


def test_an_optimizer_in_the_backward_trains_as_an_ordinary_one(tmp_path):
    expected, plain = trained_with(lambda model: adamw(model.parameters()), tmp_path / "plain")
    expected.train()

    def early(model):
        return hybridremat.optimizer_in_backward(model, adamw)

    trainer, model = trained_with(early, tmp_path / "early", planned("60%", gradients="in_backward"))
    with planned_forwards() as ran:
        trainer.train()
    assert len(ran) == STEPS["max_steps"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert [e["loss"] for e in entries(trainer, "loss")] == [e["loss"] for e in entries(expected, "loss")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"max_grad_norm": 1.0}, "clips gradients"), ({"gradient_accumulation_steps": 2}, "accumulates")],
)
def test_a_trainer_that_needs_all_gradients_is_refused(tmp_path, arguments, text):
    def early(model):
        return hybridremat.optimizer_in_backward(model, adamw)

    callback = planned("60%", gradients="in_backward")
    trainer, model = trained_with(early, tmp_path, callback, **arguments)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hybridremat.EarlyGradientError, match=f"{text}.*No step has run"):
        trainer.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert_plain(model)
