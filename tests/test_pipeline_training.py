"""Two processes train as a pipeline of planned stages: the same bits, in the memory that a device has."""

from __future__ import annotations

import pytest

from support.processes import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["one_by_one", "gpipe", "interleaved"])
def test_two_processes_train_as_plain_in_their_memory(schedule, tmp_path):
    first, second = run_ranks(f"support.pipeline_cases:{schedule}", tmp_path, timeout=500)
    assert first["text"] == second["text"]  # one plan for both
    for made in (first, second):
        assert made["compared"] > 100
        assert made["different"] == []  # losses, gradients and parameters of three steps
        assert 0.8 * made["predicted"] <= made["peak"] <= made["predicted"] <= made["limit"]
        assert all(needed <= limit for needed, limit in zip(made["needed"], made["limits"], strict=True))
        assert made["extra"] > 0
        assert made["plain peak"] > made["limit"]


@pytest.mark.slow
def test_an_error_on_the_first_rank_is_raised_on_all(tmp_path):
    first, second = run_ranks("support.pipeline_cases:refused", tmp_path)
    assert first["least"] == second["least"] > first["limit"] == 100 * 1024
    assert second["text"].startswith(first["text"])
