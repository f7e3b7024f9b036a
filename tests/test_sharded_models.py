"""Units of models that people train, and of a net on each kind of device, under FSDP2."""

import pytest

from support.devices import CUDA
from support.processes import run_ranks

MODELS = ("gpt2", "llama", "resnet50")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_train_models_as_plain_fsdp(ranks, tmp_path):
    """Three steps with dropout and BatchNorm; gloo's threads let go of buffers late, but not in each step."""
    for made in run_ranks("support.sharded_models:models", tmp_path, size=ranks, timeout=580):
        for name in MODELS:
            found = made[f"{name}, 60%"]
            assert found["equal"] and found["same plan"]
            assert found["predicted"] <= found["limit"]
            assert min(found["peaks"]) <= found["limit"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_one_rank_keeps_its_limit(device, tmp_path):
    backend = "nccl" if device == "cuda" else "gloo"
    (made,) = run_ranks("support.sharded_models:on_device", tmp_path, size=1, backend=backend)
    for found in made.values():
        assert found["equal"]
        assert max(found["peaks"]) <= found["limit"]
