"""What a plan says of itself, held against figures that are worked out here in another, slower way."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import hybridremat
from hybridremat import InputError, Plan
from hybridremat.graph.joint import Phase, Schedule
from hybridremat.graph.memory import schedule_time
from hybridremat.reports.what_if import WhatIf
from support.naive_memory import naive_profile
from support.training import small
from support.wrapping import HOW, least_limit


def planned(name: str, **how) -> Plan:
    model, batch = small(name)
    limit = least_limit(model, batch, **how)
    plain = hybridremat.plan(model, kwargs=batch, memory_limit="200%", **HOW, **how).plain_peak
    between = max(limit, (2 * limit + plain) // 3)
    return hybridremat.plan(model, kwargs=batch, memory_limit=between, **HOW, **how)


@pytest.fixture(scope="module", params=[pytest.param("transformer", marks=pytest.mark.slow), "convnet"])
def plan(request) -> Plan:
    return planned(request.param)


def without(graph, schedule: Schedule, op: int) -> Schedule:
    """The schedule with ``op`` run in the forward alone, and then, one by one, without what nobody reads."""
    split = schedule.num_forward
    steps = [(s, place < split) for place, s in enumerate(schedule.steps) if place < split or s != op]
    changed = True
    while changed:
        changed = False
        for place in reversed(range(len(steps))):
            step, forward = steps[place]
            item = graph.ops[step]
            if forward or item.phase is Phase.BACKWARD or not item.recomputable:
                continue
            later = [s for s, _ in steps[place + 1 :]]
            last = later.index(step) if step in later else len(later)  # until it is made anew
            read = {v for s in later[:last] for v in graph.ops[s].reads}
            if last < len(later):
                read |= set(graph.ops[step].reads) & set(item.writes)
            if read.isdisjoint(item.writes) and graph.gradients.isdisjoint(item.writes):
                del steps[place]
                changed = True
    return Schedule(tuple(s for s, _ in steps), sum(forward for _, forward in steps))


def test_what_saving_one_more_value_costs(plan):
    graph, what_if = plan.details.graph, WhatIf(plan, plan.details)
    fates = [fate for block in plan.blocks for fate in plan.inspect(block.index).values]
    again = [fate for fate in fates if fate.policy == "RECOMPUTE"]
    assert again
    for fate in again:
        other = without(graph, plan.schedule, graph.values[fate.value.id].producer)
        peak = max(naive_profile(graph, other))
        change = what_if.saving(fate.value.id)
        assert fate.if_saved == change
        assert change.needed == peak and change.more_bytes == peak - plan.predicted_peak
        assert change.more_time == schedule_time(graph, other) - schedule_time(graph, plan.schedule) < 0
        assert change.over == max(0, peak - plan.memory_limit) and change.fits == (peak <= plan.memory_limit)


def test_every_value_of_a_block_has_one_fate(plan):
    graph, schedule = plan.details.graph, plan.schedule
    for block, ours in zip(plan.blocks, plan.details.chain.blocks, strict=True):
        fates = {fate.value.id: fate for fate in plan.inspect(block.index).values}
        made = {v for op in (*ours.forward, *ours.optional) for v in graph.ops[op].writes}
        run = {v for v in made if graph.values[v].producer in schedule.steps}
        assert set(fates) <= run
        first = {v for op in ours.forward for v in graph.ops[op].writes[:1]}
        assert first & run <= set(fates)
        for value, fate in fates.items():
            times = schedule.steps.count(graph.values[value].producer) - 1
            backward = schedule.steps[schedule.num_forward :]
            read = any(value in graph.ops[op].reads for op in backward)
            kept = not times and read and graph.values[value].producer not in backward
            producer = graph.ops[graph.values[value].producer]
            matters = value == producer.writes[0] or any(value in op.reads for op in graph.ops)
            again = times if matters else 0
            assert fate.policy == ("RECOMPUTE" if again else "SAVE" if kept else "FREE")
            assert fate.times == again and fate.value.bytes == graph.values[value].bytes


def test_what_is_free_and_what_binds(plan):
    graph, schedule = plan.details.graph, plan.schedule
    profile = naive_profile(graph, schedule)
    for index, ours in enumerate(plan.details.chain.blocks):
        own = {*ours.forward, *ours.optional, *ours.backward}
        places = [place for place, op in enumerate(schedule.steps) if op in own]
        forward = [place for place in places if place < schedule.num_forward]
        backward = [place for place in places if place >= schedule.num_forward]
        between = range(forward[-1] + 1, backward[0])
        headroom = plan.inspect(index).headroom

        def free(among):
            return plan.memory_limit - max((profile[place] for place in among), default=0)

        found = (headroom.forward, headroom.between, headroom.backward)
        assert found == (free(forward), free(between), free(backward))
        assert dict(zip(("forward peak", "saved", "backward peak"), found, strict=True))[
            headroom.binds
        ] == min(found)


def test_other_options_are_told_with_what_they_would_do(plan):
    for block in plan.blocks:
        explained = plan.inspect(block.index)
        if block.option is None:
            continue
        assert len(explained.options) == block.option_count
        taken = [option for option in explained.options if option.change is None]
        assert [option.number for option in taken] == [block.option]
        assert (taken[0].forward_peak, taken[0].backward_peak) == (block.forward_peak, block.backward_peak)
        for option in explained.options:
            if option.change is None:
                continue
            assert option.change.fits == (option.change.needed <= plan.memory_limit)
            # to take an option that saves no less and takes no less time can never pay
            if option.saved_bytes >= taken[0].saved_bytes and option.time > taken[0].time:
                assert option.change.more_time >= 0
        assert f"of its {block.option_count - 1} other options" in explained.reason or (
            block.option_count == 1
        )


@pytest.mark.slow
def test_what_the_caller_does_leaves_less_free():
    """Two forwards, and a reserve: what lies beside a phase is worked out here from lifetimes."""
    plan = planned("transformer", reserve=4096, forwards=2)
    graph, schedule = plan.details.graph, plan.schedule
    profile, split = naive_profile(graph, schedule), schedule.num_forward
    tangents = sum(value.bytes for value in graph.values if value.tangent)
    gradients = [graph.values[value].bytes for value in graph.gradients]
    waiting = plan.saved_bytes + sum(graph.values[value].bytes for value in graph.released_outputs)
    beside = waiting + max(0, 4096 - tangents) + sum(gradients) + max(gradients)
    for index, ours in enumerate(plan.details.chain.blocks):
        own = {*ours.forward, *ours.optional, *ours.backward}
        places = [place for place, op in enumerate(schedule.steps) if op in own]
        headroom = plan.inspect(index).headroom
        forward = max(profile[place] for place in places if place < split)
        backward = max(profile[place] for place in places if place >= split)
        assert headroom.forward == plan.memory_limit - forward - waiting
        assert headroom.backward == plan.memory_limit - backward - beside


def test_modules(plan):
    modules = {r.module for block in plan.blocks for r in (*block.saved, *block.freed)}
    module = max(modules, key=lambda path: path.count("."))
    explained = plan.explain(module)
    assert {fate.value.module for fate in explained.values} == {module}
    top = plan.explain(module.split(".")[0])
    assert set(explained.values) <= set(top.values)
    assert module.split(".")[0] in str(top) and "RECOMPUTE" in str(top) + str(plan.inspect(0))
    with pytest.raises(InputError, match=f"made in '{module}x'; there are, for example, .*{module}"):
        plan.explain(f"{module}x")
    with pytest.raises(InputError, match="there is no block 99; this plan has blocks 0 to"):
        plan.inspect(99)


def test_explanations_are_plain_data_and_survive_the_file(plan, tmp_path):
    plan.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    for index in range(len(plan.blocks)):
        explained = plan.inspect(index)
        assert again.inspect(index) == explained
        assert json.loads(json.dumps(explained.to_dict()))["block"]["index"] == index


def test_a_plain_step_and_a_plan_without_details_are_explained_too():
    model, batch = small("transformer")
    plain = hybridremat.plan(model, kwargs=batch, memory_limit="200%", **HOW)
    explained = plain.inspect(0)
    assert explained.options == () and "runs plain" in explained.reason
    assert all(fate.policy != "RECOMPUTE" for fate in explained.values)
    bare = replace(plain, details=None)
    assert bare.inspect(0).headroom is None and "SAVE" in str(bare.inspect(0))
    shown = str(plain.blocks[0])
    assert "SAVE" in shown and "free there" not in shown
