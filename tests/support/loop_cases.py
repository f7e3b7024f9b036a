"""What the tests of the callbacks for training loops share: rows, settings, and a failing backward."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

HOW = {"cost_model": "flops", "workers": 1, "progress": False}
PREDICTED, MEASURED = "hybridremat/predicted_peak_bytes", "hybridremat/measured_peak_bytes"
OVERHEAD, MEASURED_OVERHEAD = "hybridremat/predicted_overhead", "hybridremat/measured_overhead"

BAD = [
    ({"memory_limit": "lots"}, "memory_limit"),
    ({"memory_limit": 0.5}, "memory_limit"),
    ({"max_overhead": -1}, "max_overhead"),
    ({"memory_limit": "50%", "reserve": "x"}, "reserve"),
    ({"memory_limit": "50%", "cost_model": "guess"}, "guess"),
    ({"memory_limit": "50%", "measure_every": 0}, "measure_every=0"),
    ({"memory_limit": "50%", "plain_steps": -1}, "plain_steps=-1"),
    ({"memory_limit": "50%", "tune_steps": 3}, "tune_steps=3"),
    ({"memory_limit": "50%", "tolerance": float("nan")}, "tolerance=nan"),
    ({"memory_limit": "50%", "tolerance": True}, "tolerance=True"),
    ({"memory_limit": "50%", "module": 3}, "module=3"),
    ({"memory_limit": "50%", "across_ranks": True}, "'across_ranks'"),
]
"""Options of a callback, and what the error about them says."""


class Rows(Dataset):
    """The rows of some tensors, by name."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("the backward fails")


def fail_in_backward(loss):
    return _FailsBackward.apply(loss)


def profiler_runs():
    """Whether a measurement, or anything else, has left the profiler on."""
    return torch.autograd._profiler_enabled()


def agree(figures, tolerance=0.03):
    """Whether an entry of a log has a measured peak within the tolerance of the predicted one."""
    return abs(figures[MEASURED] / figures[PREDICTED] - 1) <= tolerance


class Writer:
    """Stands in for TensorBoard's ``SummaryWriter``: records what it is given."""

    def __init__(self):
        self.images, self.texts, self.scalars = [], [], []

    def add_image(self, tag, image, step, dataformats):
        self.images.append((tag, image.shape, step, dataformats))

    def add_text(self, tag, text, step=None):
        self.texts.append((tag, text))

    def add_scalar(self, *scalar):
        self.scalars.append(scalar)

    def flush(self):
        pass

    def close(self):
        pass


class Wandb:
    """Stands in for the module ``wandb`` and its run."""

    def __init__(self):
        self.run, self.logged = self, []

    def log(self, entry, step=None):
        self.logged.append(entry)

    @staticmethod
    def Html(text):  # noqa: N802 (its own name)
        return ("html", text)

    @staticmethod
    def Image(path):  # noqa: N802
        return ("image", path)


def assert_uploaded_once(writer, wandb, report):
    """The picture and the report have reached both, once, and are those of the file."""
    (image,) = [each for each in writer.images if each[0] == "hybridremat/frontier"]
    assert image[1][2] == 3 and image[3] == "HWC"
    (text,) = [text for tag, text in writer.texts if tag == "hybridremat/report"]
    assert text.startswith("peak ")
    (entry,) = [entry for entry in wandb.logged if "hybridremat/report" in entry]
    assert entry["hybridremat/report"] == ("html", report.read_text())
    assert entry["hybridremat/frontier"] == ("image", str(report.with_name("frontier.png")))
