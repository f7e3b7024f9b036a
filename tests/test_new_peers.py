"""Newer ways in the benchmark of peers, and cases reported: reasons, PyTorch's programs, what is monotone."""

import sys
from pathlib import Path

import pytest

import hybridremat
from support.training import small, train, train_plain

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import peers
import peers_sac_ilp
import reported


def test_a_failure_is_told_by_the_last_error_that_is_named():
    text = "Traceback\n  File x\ntorch.SomeError: a | b\n\nSet THIS=1 for more\n"
    assert peers.reason(text) == "torch.SomeError: a / b"
    assert peers.reason("") == "no word"


def test_ops_are_told_by_name_and_number():
    assert peers_sac_ilp.numbered(["mm", "add", "mm"]) == [("mm", 0), ("add", 0), ("mm", 1)]


def test_peaks_that_rise_again_are_not_monotone():
    assert reported.is_monotone([3, 2, 2]) and not reported.is_monotone([3, 1, 2])


@pytest.mark.slow
def test_pytorchs_program_checkpoints_a_small_model_with_equal_bits():
    pytest.importorskip("pulp", reason="pip install pulp pwlf")
    pytest.importorskip("pwlf", reason="pip install pulp pwlf")
    model, batch = small("transformer")
    expected = train_plain(model, batch)
    plain = hybridremat.measure(model, kwargs=batch, repeats=1).peak
    peers_sac_ilp.prepare(model, batch, peers_sac_ilp.LEAST)
    assert hybridremat.measure(model, kwargs=batch, repeats=1).peak < plain
    assert expected.differences(train(model, batch)) == []
