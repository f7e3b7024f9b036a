"""Several processes, beyond what test_ranks.py shows: options of DistributedDataParallel, circles, FSDP."""

import pytest
from torch import nn

import hybridremat
from support.processes import run_ranks

pytestmark = pytest.mark.compat

GROUP = "Several processes"
EQUAL = "bit-equal to DistributedDataParallel alone"


def assert_held(made):
    assert made["different"] == []
    over = [step for step, peak in enumerate(made["peaks"]) if peak > made["limit"] + 512]
    assert over in ([], [1])  # DDP rebuilds its buckets once, before its second step
    assert max(made["peaks"]) <= made["limit"] + made["buckets"] + 512


def remark(made):
    *steps, most = sorted(made["peaks"])
    rebuilt = most > made["limit"] + 512
    text = f"measured {steps[0]} to {steps[-1] if rebuilt else most} bytes, limit {made['limit']}"
    return text + f"; {most} in the step in which DDP builds its buckets anew" * rebuilt


def test_options_of_ddp(tmp_path, line):
    ranks = run_ranks("support.compat.ddp_cases:options", tmp_path)
    for name, made in ranks[0].items():
        for rank in ranks:
            assert_held(rank[name])
        line(GROUP, f"DistributedDataParallel: {name}", EQUAL, remark=remark(made))


def test_graph_breaks(tmp_path, line):
    ranks = run_ranks("support.compat.ddp_cases:breaks", tmp_path)
    for rank in ranks:
        assert_held(rank)
        assert rank["parts"] == 2
    assert ranks[0]["fingerprint"] == ranks[1]["fingerprint"]
    line(GROUP, 'DistributedDataParallel and graph_breaks="plan"', EQUAL, remark=remark(ranks[0]))


def test_a_transformer_with_measured_times(tmp_path, line):
    first, second = run_ranks("support.compat.ddp_cases:transformer", tmp_path)
    assert_held(first)
    assert_held(second)
    assert (first["steps"], first["overhead"]) == (second["steps"], second["overhead"])
    line(
        GROUP,
        "a Transformer with dropout, kernels timed on one rank",
        f"{EQUAL}; one plan",
        remark=remark(first),
    )


def test_ranks_with_equal_inputs_share_a_plan(tmp_path, line):
    first, other, third = run_ranks("support.compat.ddp_cases:circles", tmp_path, size=3, port=True)
    assert first["fingerprint"] == third["fingerprint"] != other["fingerprint"]
    assert first["steps"] == third["steps"]
    assert first["solved"] > 0 == third["solved"]
    assert any("every rank has to wrap" in text for text in first["heard"])
    assert any("3 ranks run 2 different plans" in text for text in first["heard"])
    line(GROUP, "three ranks, one with another batch", "two plans, each made once; a warning names it")


def test_sharded_models(tmp_path, line):
    for rank in run_ranks("support.compat.ddp_cases:sharded", tmp_path):
        assert rank["FSDP inside"][0] == rank["fully_shard inside"][0] == "ModelError"
        assert rank["fully_shard around"][0] == "ModelError"
        assert rank["SyncBatchNorm"][0] == "InputError"
        assert rank["FSDP around equal"]
    line(GROUP, "wrap of an FSDP or fully_shard module", "ModelError")
    remark = "it is planned with fsdp= of wrap_each"
    line(GROUP, "fully_shard of a wrapped module", "ModelError at the first step", remark=remark)
    line(
        GROUP,
        "FullyShardedDataParallel around a wrapped model",
        "bit-equal to FullyShardedDataParallel alone",
        remark="parameters that it gathers are not in the limit",
    )
    line(GROUP, "SyncBatchNorm", "InputError", remark="on CPU; PyTorch has it for accelerators alone")


def test_data_parallel_goes_around(line):
    with pytest.raises(hybridremat.ModelError, match=r"DataParallel\(hybridremat.wrap"):
        hybridremat.wrap(nn.DataParallel(nn.Linear(2, 2)), memory_limit="90%")
    line(GROUP, "wrap of a DistributedDataParallel or DataParallel module", "ModelError; wrap what is inside")
