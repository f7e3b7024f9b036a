"""Blocks of a plain step show the peaks that they have there, as blocks do that something was decided for."""

import pytest

from hybridremat.blocks.types import BlockBinding, BlockProblem, ForwardOp
from hybridremat.graph.joint import Schedule
from hybridremat.plans.block_summary import option_of_schedule
from support.html_pages import planned


@pytest.fixture(scope="module")
def plain():
    plan = planned(4, 1.0)
    assert all(block.option is None for block in plan.blocks)
    return plan


def alive_in_forward(plan, index):
    """Bytes of a block's own values at each of its forward ops, and what the kernel takes beside them."""
    graph, chain = plan.details.graph, plan.details.chain
    steps = plan.schedule.steps
    stays = chain.boundary[index + 1] | graph.released_outputs
    own = {v for op in chain.blocks[index].forward for v in graph.ops[op].writes} - chain.always
    end = steps.index(chain.blocks[index].forward[-1])
    for op in chain.blocks[index].forward:
        now, size = steps.index(op), graph.ops[op].temp
        for value in own:
            born = steps.index(graph.values[value].producer)
            read = [at for at, step in enumerate(steps) if value in graph.ops[step].reads]
            last = max([born, *read, end] if value in stays else [born, *read])
            size += graph.values[value].bytes if born <= now <= last else 0
        yield size


def test_forward_peaks_are_those_of_the_schedule(plain):
    for block in plain.blocks:
        assert block.forward_peak == max(alive_in_forward(plain, block.index)) > 0


def test_backward_peaks_are_those_of_the_option_that_does_the_same(plain):
    details = plain.details
    compared = 0
    for block in plain.blocks:
        options = details.option_sets[details.option_set_of[block.index]].options
        for option in options:
            if option.time == 0 and option.saved_bytes == max(each.saved_bytes for each in options):
                assert block.backward_peak == option.backward_peak > 0
                compared += 1
    assert compared


def test_a_block_that_lives_on_what_another_made_has_no_figures_of_its_own():
    problem = BlockProblem((8, 8), (ForwardOp((1,), (0,), 1, 0),), (), frozenset({0}), 0)
    assert option_of_schedule(BlockBinding(problem, (5,), (2, 3), ()), Schedule((5,), 1), ()) is None
