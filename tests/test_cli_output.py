"""Standard outputs that take nothing: a full disk, one that is closed, a reader who has gone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridremat.cli import main as cli
from support.command_line import QUICK

FULL = Path("/dev/full")
PLAN = ["plan", "mymodels.py:make", "--limit", "99%", "--json", *QUICK]
COMMANDS = [["cache"], ["cache", "--json"], pytest.param([*PLAN, "-q"], marks=pytest.mark.slow)]


def ran(words, **how):
    command = [sys.executable, "-m", "hybridremat", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **how)


@pytest.mark.skipif(not FULL.is_char_device(), reason="no device here that is always full")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.usefixtures("models")
def test_a_full_disk_is_told_in_one_line(words):
    with FULL.open("w") as out:
        done = ran(words, stdout=out)
    assert done.returncode == 2
    assert done.stderr == "hybridremat: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.usefixtures("models")
def test_a_closed_output_is_no_error(words):
    line = " ".join([f"'{sys.executable}' -m hybridremat", *(f"'{word}'" for word in words), ">&-"])
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_command_is_told_as_json_too(capsys):
    assert cli.main(["--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["error"] == "UsageError"
    assert err.endswith(f"hybridremat: {told['message']}\n")
