"""The command line, called as a function; and once each as a process where only a process can tell."""

import json
import os
import signal
import subprocess
import sys

import pytest

import hybridremat
from hybridremat import cli
from hybridremat.errors import TargetError
from hybridremat.plan_file import read_plan
from hybridremat.targets import load_target

QUICK = ["--cost-model", "flops", "--workers", "1"]
MODELS = """
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return functional.cross_entropy(x, labels)


def make():
    return Net(), {"x": torch.randn(64, 16), "labels": torch.zeros(64, dtype=torch.long)}


def make_with_args():
    return Net(), (torch.randn(64, 16),), {"labels": torch.zeros(64, dtype=torch.long)}


def frozen():
    model, batch = make()
    return model.requires_grad_(False), batch


def wrong():
    return Net()


def broken():
    raise RuntimeError("mine")
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A file with functions that make models, in the current folder."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "mymodels.py"
    sys.modules.pop("mymodels", None)


def failed(capsys, *arguments) -> str:
    """The one line that a command which cannot do its work leaves."""
    assert cli.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hybridremat: ")
    assert err.count("\n") == 1
    return err


def test_plan_prints_writes_and_is_read_again(models, capsys):
    assert cli.main(["plan", f"{models}:make", "--limit", "97%", "-o", "plan.json", *QUICK]) == 0
    printed = capsys.readouterr().out
    plan = read_plan("plan.json")
    assert f"{plan.predicted_peak} bytes" in printed
    assert plan.predicted_peak <= plan.memory_limit < plan.plain_peak
    assert cli.main(["inspect", "plan.json"]) == 0
    assert capsys.readouterr().out == f"{plan}\n"
    assert cli.main(["inspect", "plan.json", "--block", "0"]) == 0
    assert "addmm" in capsys.readouterr().out
    assert "there is no block 99" in failed(capsys, "inspect", "plan.json", "--block", "99")


def test_pins_are_a_policy(models, capsys):
    pins = ["--pin", "layers.[01]=must_save", "--pin", "*:gelu=must_recompute"]
    assert cli.main(["plan", f"{models}:make", "--limit", "99%", "--json", *pins, *QUICK]) == 0
    kept, remade = json.loads(capsys.readouterr().out)["pins"]
    assert (kept["pattern"], kept["action"], kept["values"]) == ("layers.[01]", "must_save", 2)
    assert (remade["pattern"], remade["action"], remade["values"]) == ("*:gelu", "must_recompute", 4)
    assert cli.main(["inspect", f"{models}:make", "--limit", "99%", *pins, *QUICK]) == 0
    assert "*:gelu must_recompute (4 values" in capsys.readouterr().out


def test_json_is_the_whole_plan(models, capsys):
    assert cli.main(["plan", "mymodels:make_with_args", "--max-overhead", "0.5", "--json", *QUICK]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["memory_limit"] is None
    assert data["overhead"] <= 0.5
    assert len(data["schedule"]["steps"]) >= 10


def test_inspect_plans_a_model_by_itself(models, capsys):
    assert cli.main(["inspect", f"{models}:make", "--limit", "1000000", *QUICK]) == 0
    assert "recomputed values" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "gpt3", "--limit", "50%"], "'gpt3' is no built-in model (gpt2, "),
        (["plan", "mymodels.py:nothing", "--limit", "50%"], "mymodels.py has no function 'nothing'"),
        (["plan", "other.py:make", "--limit", "50%"], "there is no file other.py"),
        (["plan", "no_such_module_here:make", "--limit", "50%"], "there is no module 'no_such_module_here'"),
        (["plan", "mymodels.py:wrong", "--limit", "50%"], "it returned Net"),
        (["plan", "mymodels.py:frozen", "--limit", "50%"], "no trainable parameters"),
        (["plan", "mymodels.py:make"], "--limit 6GiB"),
        (["plan", "mymodels.py:make", "--limit", "0.5"], 'did you mean "50%"?'),
        (["plan", "mymodels.py:make", "--limit", "10", *QUICK], "the least feasible limit"),
        (["plan", "mymodels.py:make", "--max-overhead", "much"], "max_overhead='much' cannot be read"),
        (["plan", "mymodels.py:make", "--limit", "50%", "--cost-model", "guess"], "guess"),
        (["plan", "mymodels.py:make", "--limit", "50%", "--pin", "layers"], "'' is no pattern"),
        (["plan", "mymodels.py:make", "--limit", "50%", "--pin", "layers=keep"], "'keep' is neither"),
        (["plan", "mymodels.py:make", "--limit", "50%", "--pin", "lawyers=must_save", *QUICK], "'layers'"),
        (
            ["plan", "mymodels.py:make", "--limit", "50%", "--pin=*=must_save", "--pin=*=must_recompute"],
            "'*' is pinned twice",
        ),
        (["inspect", "missing.json"], "missing.json"),
        (["inspect", "mymodels.py"], "mymodels.py is no plan"),
        (["demo", "--models", "gpt2,gpt9"], "no demo model gpt9; there are gpt2, resnet50, llama"),
        (["demo", "--steps", "0"], "--steps"),
    ],
)
def test_errors_are_one_line_and_status_two(models, capsys, arguments, message):
    assert message in failed(capsys, *arguments)


def test_verbose_shows_the_traceback(models, capsys):
    assert cli.main(["-v", "plan", "mymodels.py:wrong", "--limit", "50%"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_errors_of_the_users_own_code_keep_their_traceback(models):
    with pytest.raises(RuntimeError, match="mine"):
        cli.main(["plan", "mymodels.py:broken", "--limit", "50%"])


def test_a_module_that_lacks_something_is_not_called_missing(models, tmp_path):
    (tmp_path / "needy.py").write_text("import no_such_module_here\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        load_target("needy:make")
    with pytest.raises(TargetError, match="no module 'needy2'"):
        load_target("needy2:make")


def test_interrupted(models, capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert cli.main(["plan", "mymodels.py:make", "--limit", "50%"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_process_that_is_interrupted_leaves_no_traceback(models, tmp_path):
    code = "import time\n\ndef make():\n    print('made', flush=True)\n    time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(code)
    command = [sys.executable, "-m", "hybridremat.cli", "plan", "slow.py:make", "--limit", "50%"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "made\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_help_loads_nothing_heavy():
    code = "import sys; from hybridremat import cli; sys.argv = ['hybridremat', '--help']\n"
    code += "try: cli.main()\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'ortools', 'rich', 'numpy', 'networkx'} & set(sys.modules)"
    before = os.times().children_user
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
    assert os.times().children_user - before < 1.0


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"hybridremat {hybridremat.__version__}\n"


def test_no_command_is_misuse(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2
    assert "command" in capsys.readouterr().err
