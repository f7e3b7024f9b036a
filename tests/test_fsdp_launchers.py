"""hybridremat under FSDP2 in the launchers that people use: their scripts, bit for bit, under the limit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.launcher_cases import EXAMPLES
from support.processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
SCRIPTS = sorted(EXAMPLES.glob("*_fsdp2.py"))


def trained(name, folder, size=2):
    """What each rank found, with what all launchers have in common checked."""
    ranks = run_ranks(f"support.launcher_cases:{name}", folder, size=size, timeout=280)
    for made in ranks:
        assert made["equal"]
        assert made["same names"]
        assert len(made["peaks"]) >= 2
        # gloo's threads let go of buffers some time after a collective has returned, on a busy machine late
        assert min(made["peaks"]) <= made["limit"] + made["buffer"]
        assert min(made["peaks"]) > made["predicted"] / 2  # a step was measured, and not something else
    return ranks


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_plain_loop_with_distributed_checkpoints(size, tmp_path):
    """Saved, loaded and set between steps, sharded and whole; an evaluation; the same step twice."""
    trained("plain", tmp_path, size)


@pytest.mark.slow
def test_accelerate(tmp_path):
    assert {each["type"] for each in trained("with_accelerate", tmp_path)} == {"FSDPModule"}


@pytest.mark.slow
def test_accelerate_with_mixed_precision(tmp_path):
    trained("with_bfloat16", tmp_path)


@pytest.mark.slow
def test_accelerate_that_loads_by_way_of_meta(tmp_path):
    trained("loaded_efficiently", tmp_path)


@pytest.mark.slow
def test_trainer(tmp_path):
    for made in trained("with_trainer", tmp_path):
        assert "sharded by FSDP already" in made["refused"]


@pytest.mark.slow
def test_lightning(tmp_path):
    trained("with_lightning", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_start_with_torchrun(script, tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    ran = subprocess.run(
        [torchrun, "--nproc-per-node", "2", script],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    takes, limit = re.search(r"a step takes ([\d,]+) of ([\d,]+) bytes", ran.stdout).groups()
    assert int(takes.replace(",", "")) <= int(limit.replace(",", ""))
    assert len(re.search(r"losses (.*)", ran.stdout).group(1).split()) == 3


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_short(script):
    assert len(script.read_text().splitlines()) < 75
