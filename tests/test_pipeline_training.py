"""Two processes train as a pipeline of planned stages: the same bits, in the memory that a device has."""

from __future__ import annotations

import pytest

from support.processes import run_ranks

pytestmark = pytest.mark.slow
SCHEDULES = ["1f1b", "gpipe", "interleaved1f1b"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("support.pipeline_cases:whole", tmp_path_factory.mktemp("pipeline"), timeout=500)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_gradients_and_parameters_are_those_of_the_plain_pipeline(ranks, schedule):
    for rank in ranks:
        assert rank[schedule]["compared"] > 100
        assert rank[schedule]["different"] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_device_keeps_its_memory(ranks, schedule):
    for rank in ranks:
        made = rank[schedule]
        assert made["peak"] <= made["predicted"] <= made["limit"]
        assert made["peak"] >= 0.8 * made["predicted"]
        assert all(needed <= limit for needed, limit in zip(made["needed"], made["limits"], strict=True))


def test_limits_bind(ranks):
    for rank in ranks:
        assert all(rank[schedule]["plain peak"] > rank[schedule]["limit"] for schedule in ("1f1b", "gpipe"))
        assert all(rank[schedule]["extra"] > 0 for schedule in ("1f1b", "gpipe"))


def test_all_ranks_have_one_plan(ranks):
    first, second = ranks
    assert all(first[schedule]["text"] == second[schedule]["text"] for schedule in SCHEDULES)
    assert all(first[schedule]["cuts"] == second[schedule]["cuts"] for schedule in SCHEDULES)
