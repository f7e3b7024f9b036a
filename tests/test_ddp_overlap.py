"""Gradients of a planned step reach DistributedDataParallel's buckets while its backward still runs.

The processes run support/overlap_cases.py once; each test looks at one thing that came of it.
"""

import pytest

from support.overlap_cases import CASES
from support.processes import run_ranks_once

pytestmark = pytest.mark.slow
OWN = 512  # bytes of small tensors that DistributedDataParallel makes in a step, in threads of its own


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks_once("support.overlap_cases:whole", tmp_path_factory, timeout=240)


@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_ddp(ranks, case):
    for rank in ranks:
        made = rank[case]
        assert made["different"] == []
        assert max(made["sections"]) >= 1  # gradients left before the end
        assert sum(peak > made["limit"] + OWN for peak in made["peaks"]) <= 1  # DDP rebuilds its buckets once
        assert max(made["peaks"]) <= made["limit"] + made["buckets"] + OWN


def test_buckets_leave_among_the_products_of_the_backward(ranks):
    """As in the plain step, in each of which there is a product after every bucket but the last ones."""
    for rank in ranks:
        for seen in rank["order"].values():
            products = len(seen) - seen.count("bucket")
            assert seen.count("bucket") == 6
            assert seen[: seen.index("bucket")].count("aten.mm.default") <= products // 2


def test_a_hook_that_fails_raises_as_in_plain_ddp(ranks):
    for rank in ranks:
        assert rank["errors"]["planned"] == rank["errors"]["plain"]
