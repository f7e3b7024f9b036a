"""Lightning's Trainer, unmodified, with the callback that plans and watches."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

import hybridremat
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
from support.training import Transformer

lightning = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Lit(lightning.LightningModule):
    """A net inside; ``whole``: the loss comes out of the module's own call."""

    def __init__(self, whole=False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.whole = Transformer(layers=1, width=16), whole

    def forward(self, tokens):
        return self.body(tokens)["loss"]

    def training_step(self, batch, index):
        loss = self(**batch) if self.whole else self.body(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.body(**batch)["loss"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Kept(lightning.loggers.CSVLogger):
    """Keeps what is logged."""

    def __init__(self, folder):
        super().__init__(folder)
        self.entries = []

    def log_metrics(self, metrics, step=None):
        self.entries.append({**metrics, "step": step})

    def with_key(self, key):
        return [entry for entry in self.entries if key in entry]


def loader(count=16, size=4):  # with 14 the last batch is smaller, which is another shape
    tokens = torch.randint(0, 50, (count, 12), generator=torch.Generator().manual_seed(3))
    return DataLoader(Rows(tokens=tokens), batch_size=size)


def fit(model, folder, *callbacks, resume=None, rows=16, **arguments):
    """Train, and return what was logged."""
    torch.manual_seed(1)
    logger = Kept(folder)
    settings = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": logger,
        "callbacks": [*callbacks],
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    trainer = lightning.Trainer(**settings | arguments)
    validation = loader(rows) if "val_check_interval" in arguments else None
    trainer.fit(model, loader(rows), validation, ckpt_path=resume, weights_only=False)
    logger.trainer = trainer
    return logger


def planned(limit="90%", module="body", **how):
    return hybridremat.HybridRematLightningCallback(memory_limit=limit, module=module, **HOW, **how)


def assert_plain(model):
    for module in model.modules():
        assert module._compiled_call_impl is None and "_compiled_call_impl" not in vars(module)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_is_equal_and_measured(whole, tmp_path):
    """Accumulation, clipping, validation between steps, a smaller last batch, two epochs, a checkpoint."""
    many = {
        "max_epochs": 2,
        "gradient_clip_val": 0.5,
        "accumulate_grad_batches": 2,
        "val_check_interval": 2,
        "rows": 14,
    }
    plain, model = Lit(whole), Lit(whole)
    before = fit(plain, tmp_path, **many)
    callback = planned(module=None if whole else "body", measure_every=1)
    with planned_forwards() as ran, warnings.catch_warnings():
        warnings.simplefilter("error", hybridremat.PredictionWarning)
        logged = fit(model, tmp_path, callback, **many)
    assert len(ran) == 8
    assert_plain(model)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    for name, value in before.trainer.callback_metrics.items():
        assert torch.equal(value, logged.trainer.callback_metrics[name]), name
    assert len(logged.with_key(MEASURED)) == 6  # not the first step of each shape, which is planned in it
    assert all(map(agree, logged.with_key(MEASURED)))
    assert {PREDICTED, OVERHEAD} <= logged.with_key(PREDICTED)[0].keys()
    logged.trainer.save_checkpoint(tmp_path / "state.ckpt")
    saved = torch.load(tmp_path / "state.ckpt", weights_only=False)
    assert list(saved["state_dict"]) == list(plain.state_dict())


def test_by_default_one_step_is_measured_and_logged_at_once(tmp_path):
    logged = fit(Lit(), tmp_path, planned(), rows=14)
    entries = logged.with_key(PREDICTED)
    assert [(entry["step"], MEASURED in entry) for entry in entries[:2]] == [(1, False), (2, True)]
    plans = [entry["hybridremat/plans"] for entry in entries]
    assert plans[0] == 1 and plans[-1] == 2  # the last batch is smaller
    metrics = logged.trainer.callback_metrics
    assert metrics[MEASURED] == logged.with_key(MEASURED)[0][MEASURED]


class TensorBoardLogger(Kept):
    """By its name and its writer what Lightning's logger is."""

    experiment = None

    def save(self):
        pass


class WandbLogger(Kept):
    """By its name and its run what Lightning's logger is."""

    experiment = None

    def save(self):
        pass


def test_the_report_reaches_each_logger_once(tmp_path, monkeypatch):
    board, weights, wandb = TensorBoardLogger(tmp_path), WandbLogger(tmp_path), Wandb()
    board.experiment, weights.experiment = Writer(), wandb
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    callback = planned()
    fit(Lit(), tmp_path, callback, logger=[board, weights], rows=14)
    assert_uploaded_once(board.experiment, wandb, Path(board.log_dir) / "hybridremat-report" / "plan.html")
    assert len(callback.plans) == 2  # the last batch is smaller


def test_plain_steps_give_a_measured_overhead(tmp_path):
    with planned_forwards() as ran:
        logged = fit(Lit(), tmp_path, planned(plain_steps=1, measure_every=100), max_epochs=2, rows=14)
    assert len(ran) == 7
    first = logged.with_key(MEASURED_OVERHEAD)[0]
    assert first["step"] == 5  # one plain, one planned, one measured, one of another shape
    assert not fit(Lit(), tmp_path, planned()).with_key(MEASURED_OVERHEAD)


def test_resuming_from_a_checkpoint(tmp_path):
    half = tmp_path / "half.ckpt"
    fit(Lit(), tmp_path, planned()).trainer.save_checkpoint(half)
    plain, resumed = Lit(), Lit()
    fit(plain, tmp_path, resume=half, max_epochs=2)
    with planned_forwards() as ran:
        logged = fit(resumed, tmp_path, planned(), resume=half, max_epochs=2)
    assert len(ran) == 4 and logged.with_key(PREDICTED)[0]["step"] == 5
    assert all(torch.equal(p, resumed.get_parameter(name)) for name, p in plain.named_parameters())
    assert_plain(resumed)


class Holding(Lit):
    """Allocates beside the net, as a loss outside of it does."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        held = torch.zeros(65536)
        return loss + (held * loss.detach()).sum() * 0


def test_a_peak_beyond_the_prediction_warns(tmp_path, caplog):
    with pytest.warns(hybridremat.PredictionWarning, match=r"% more than .* plan predicts") as caught:
        logged = fit(Holding(), tmp_path, planned(measure_every=1))
    ours = [one for one in caught if one.category is hybridremat.PredictionWarning]
    assert len(ours) == 1 and "reserve=" in str(ours[0].message)
    assert sum("more than" in record.message for record in caplog.records) == 1
    assert not any(agree(entry) for entry in logged.with_key(MEASURED))


def test_a_step_that_is_not_planned_warns(tmp_path):
    model = Lit()  # its training_step calls the net inside, not itself
    with pytest.warns(hybridremat.PredictionWarning, match="without a planned forward of Lit"):
        fit(model, tmp_path, planned(module=None))


def test_a_net_that_is_wrapped_already_is_only_watched(tmp_path):
    model = Lit()
    batch = next(iter(loader()))
    hybridremat.wrap(model.body, kwargs=batch, memory_limit="90%", **HOW)
    call = model.body._compiled_call_impl
    logged = fit(model, tmp_path, hybridremat.HybridRematLightningCallback())
    assert model.body._compiled_call_impl is call
    assert logged.with_key(MEASURED) and all(map(agree, logged.with_key(MEASURED)))


class Failing(Lit):
    """The backward of the second batch fails, which is the one that is measured."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return fail_in_backward(loss) if index == 1 else loss


def test_a_failing_step_leaves_nothing_behind(tmp_path):
    model = Failing()
    with pytest.raises(RuntimeError, match="the backward fails"):
        fit(model, tmp_path, planned())
    assert_plain(model)
    assert not profiler_runs()


def test_an_infeasible_limit_comes_out_of_the_first_step(tmp_path):
    model = Lit()
    with pytest.raises(hybridremat.InfeasibleLimitError):
        fit(model, tmp_path, planned(1))
    assert_plain(model)


@pytest.mark.parametrize(("options", "says"), BAD)
def test_bad_options_are_errors_at_once(options, says):
    with pytest.raises(hybridremat.HybridRematError, match=says):
        hybridremat.HybridRematLightningCallback(**options)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({}, hybridremat.LimitError, "neither memory_limit nor max_overhead"),
        ({"memory_limit": "50%", "module": "head"}, hybridremat.ModelError, "no submodule 'head'.*body"),
    ],
)
def test_what_cannot_be_wrapped_is_an_error_before_training(options, kind, says, tmp_path):
    model = Lit()
    before = model.body.head.weight.clone()
    with pytest.raises(kind, match=says):
        fit(model, tmp_path, hybridremat.HybridRematLightningCallback(**options))
    assert torch.equal(before, model.body.head.weight)
    assert_plain(model)


def callback_class(monkeypatch, **packages):
    """The class as it is made where these packages, and no other Lightning, are imported already."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), package)
    monkeypatch.delitem(sys.modules, "hybridremat.integrations.lightning", raising=False)
    monkeypatch.delitem(vars(hybridremat), "HybridRematLightningCallback", raising=False)
    return hybridremat.HybridRematLightningCallback


def test_the_class_fits_the_package_in_use(monkeypatch):
    other = ModuleType("lightning.pytorch")
    other.Callback = type("Callback", (), {})
    assert callback_class(monkeypatch, lightning__pytorch=other).__mro__[1] is other.Callback
    both = callback_class(monkeypatch, lightning__pytorch=other, pytorch_lightning=lightning)
    assert issubclass(both, other.Callback) and issubclass(both, lightning.Callback)


def test_without_lightning_the_error_says_what_to_install(monkeypatch):
    with pytest.raises(hybridremat.MissingPackageError, match="pip install lightning"):
        callback_class(monkeypatch, lightning__pytorch=None, pytorch_lightning=None)


class LitInBackward(Lit):
    """Its optimizer steps in the backward."""

    def configure_optimizers(self):
        return hybridremat.optimizer_in_backward(self, lambda p: torch.optim.AdamW(p, lr=1e-2))


def test_an_optimizer_in_the_backward_trains_as_an_ordinary_one(tmp_path):
    plain, early = Lit(), LitInBackward()
    fit(plain, tmp_path)
    how = {"gradients": "in_backward", "module": "body", "memory_limit": "70%"} | HOW
    callback = hybridremat.HybridRematLightningCallback(**how)
    with planned_forwards() as ran:
        fit(early, tmp_path, callback)
    assert len(ran) == len(loader())
    assert all(torch.equal(a, b) for a, b in zip(early.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"gradient_clip_val": 1.0}, "clips gradients"), ({"accumulate_grad_batches": 2}, "accumulates")],
)
def test_a_loop_that_needs_all_gradients_is_refused(tmp_path, arguments, text):
    callback = hybridremat.HybridRematLightningCallback(
        module="body", memory_limit="70%", gradients="in_backward", **HOW
    )
    model = LitInBackward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(hybridremat.EarlyGradientError, match=text):
        fit(model, tmp_path, callback, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
