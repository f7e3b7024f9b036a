"""The command line in tests: a user's file of models, and commands in this process or one of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from hybridremat.cli import main as cli

QUICK = ["--cost-model", "flops", "--workers", "1"]
MODELS = """
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return functional.cross_entropy(x, labels)


def make(layers=4, rows=64):
    return Net(layers), {"x": torch.randn(rows, 16), "labels": torch.zeros(rows, dtype=torch.long)}


def make_with_args():
    return Net(), (torch.randn(64, 16),), {"labels": torch.zeros(64, dtype=torch.long)}


def frozen():
    model, batch = make()
    return model.requires_grad_(False), batch


def needy(rows, layers=4):
    return make(layers, rows)


def chatty():
    import os

    print("from Python")
    os.write(1, b"from below")
    os.system("echo from a child")
    return make()


def wrong():
    return Net()


def broken():
    raise RuntimeError("mine")


def ended():
    raise SystemExit(3)
"""


def failed(capsys, *arguments: str) -> str:
    """The one line that a command which cannot do its work leaves."""
    assert cli.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hybridremat: ")
    assert err.count("\n") == 1
    return err


def started(*arguments: str, **how) -> subprocess.Popen[str]:
    """A command in a process of its own, which sees Ctrl-C even if this one is told to ignore it."""
    return subprocess.Popen(
        [sys.executable, "-m", "hybridremat", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **how,
    )


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            status = (folder / "stat").read_text() if folder.name.isdigit() else ""
        except OSError:
            continue
        if status and int(status.rpartition(")")[2].split()[1]) == pid:
            found.append(int(folder.name))
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
