"""Gathers in the graph, left to the plan: bytes on the fake backend, bits on gloo, one plan on all ranks."""

import pytest

from support.gathered_cases import CASES
from support.processes import run_ranks, run_ranks_once

NAMES = [f"{name}, {limit}" for name, case in CASES.items() for limit in case.limits]


def require_exact(made):
    assert set(made["peaks"]) == {made["predicted"]}
    assert made["predicted"] <= made["limit"]
    assert made["equal"] and made["same plan"]


def test_gathers_run_again_and_only_these(tmp_path):
    made = run_ranks("support.gathered_cases:quick", tmp_path, fake=2)[0]
    require_exact(made)
    assert made["again"] > 0
    assert made["may run again"] == ["_c10d_functional.all_gather_into_tensor.default"]
    require_exact(made["checkpointed"])  # by the model, collectives and all: PyTorch would run them again
    assert "DTensor" in made["early gradients"]
    assert made["checked"]["gather left to the plan"] == ""
    assert "collectives do not run once each" in made["checked"]["gather"]
    assert "collectives do not run once each" in made["checked"]["reduction"]
    assert "runs before a collective is waited for" in made["checked"]["late wait"]


@pytest.mark.slow
def test_predicted_peaks_are_measured_ones(tmp_path):
    made = run_ranks("support.gathered_cases:every", tmp_path, fake=2, timeout=580)[0]
    for name in NAMES:
        require_exact(made[name])


def test_gathered_values_are_moved_once_they_are_there(tmp_path):
    (made,) = run_ranks("support.gathered_cases:moved", tmp_path, fake=2)
    require_exact(made)
    assert made["moves"] > 0


@pytest.mark.slow
def test_two_processes_move_gathered_values(tmp_path):
    for made in run_ranks("support.gathered_cases:moved", tmp_path):
        assert made["equal"] and made["same plan"]


@pytest.mark.slow
def test_models_whose_gathers_may_run_again_need_less(tmp_path):
    least = run_ranks("support.gathered_cases:least", tmp_path, fake=2, timeout=580)[0]
    assert least["plan"] < 0.7 * least["keep"]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return run_ranks_once("support.gathered_cases:every", tmp_path_factory, timeout=580)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_bit_for_bit(name, together):
    assert all(rank[name]["equal"] and rank[name]["same plan"] for rank in together)
    assert together[0][name]["predicted"] == together[1][name]["predicted"]


@pytest.mark.slow
def test_ranks_that_would_run_different_plans_are_told(tmp_path):
    for said in run_ranks("support.gathered_cases:told", tmp_path):
        assert said["other shapes"].startswith("RankError: gathers=\"plan\" needs one plan")
        assert "unequal parts of a parameter" in said["unequal parts"]
        assert said["alone"].startswith("ModelError") and "on one rank alone" in said["alone"]
        assert said["new shape"].startswith("ModelError") and "hybridremat.prepare" in said["new shape"]
        assert said["several shapes"] == "it ran"
        assert said["shapes apart"].startswith("ModelError: ranks were given inputs of different shapes")


@pytest.mark.slow
def test_a_gather_costs_what_it_took_in_its_group(tmp_path):
    first, second = run_ranks("support.gathered_cases:timed", tmp_path)
    assert first["times"] == second["times"]  # those of the first rank
    assert all(call + byte > 0 for call, byte in first["rates"])
    assert min(first["times"]) > 1_000  # nanoseconds: gloo takes more for any call
