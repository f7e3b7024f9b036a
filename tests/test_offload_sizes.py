"""Moves at many sizes from one capture: the numbers of plain training, in the memory that was promised."""

from __future__ import annotations

import copy

import pytest
import torch

import hybridremat
from hybridremat.compiler.offload.stores import Room, Stores
from hybridremat.compiler.offload.targets import Target
from hybridremat.planning import planner
from hybridremat.sequence.offload.link import Link
from support.setting_pairs import Net
from support.sized_steps import HOW, Embedded, captured, portfolio, require_exact, tokens
from support.training import Transformer, loss_in


@pytest.fixture(autouse=True)
def link(monkeypatch):
    """So fast that whatever may move does, rather than to be computed again."""
    monkeypatch.setattr("hybridremat.planning.moving.NOMINAL", Link(1e15, 1e15, latency=0))


def wrapped(tmp_path, make=Embedded, batch=None, **how):
    """A plain model, and a wrapped one whose values wait in a file, at a share of each largest size."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    how = {"memory_limit": "75%", "offload": f"file:{tmp_path}", **HOW, **how}
    return plain, hybridremat.wrap(model, kwargs=batch or tokens(4, 30), **how)


def scored(rows):
    """A batch of the net whose loss can run by rows."""
    drawn = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, 16, generator=drawn),
        "labels": torch.randint(0, 96, (rows,), generator=drawn),
    }


def stores(model):
    (found,) = model._compiled_call_impl.context.store._stores.values()
    return found


@pytest.mark.parametrize("make", [Embedded, pytest.param(lambda: Transformer(1, 16), marks=pytest.mark.slow)])
def test_values_move_at_every_size_of_one_capture(tmp_path, make):
    plain, model = wrapped(tmp_path, make)
    plans = []
    for sizes in ((4, 30), (3, 40), (4, 50), (2, 64), (8, 57), (5, 31)):
        plan = require_exact(model, plain, tokens(*sizes), steps=2)
        plans.append(plan)
        if make is Embedded:  # all of whose memory may move
            assert (plan.overhead, bool(plan.schedule.moves)) == (0.0, plan.plain_peak > plan.memory_limit)
    assert sum(bool(plan.schedule.moves) for plan in plans) >= 3
    assert captured(model)[0] == 1
    assert all(each.lifted.fixed == () for each in portfolio(model).emitted.values())
    assert stores(model).size == max(plan.host_bytes for plan in plans) > plans[0].host_bytes


def test_a_known_schedule_gets_moves_for_other_sizes_without_a_search(tmp_path, monkeypatch):
    plain, model = wrapped(tmp_path)
    require_exact(model, plain, tokens(3, 40))
    monkeypatch.setattr(planner, "plan_graph", None)
    for sizes in ((4, 64), (8, 60)):
        plan = require_exact(model, plain, tokens(*sizes))
        assert plan.schedule.moves and plan.overhead == 0.0


def test_a_loss_by_rows_stays_so_where_moves_are_placed_anew(tmp_path):
    how = {"batch": scored(200), "memory_limit": 334_888, "dynamic": True}
    plain, model = wrapped(tmp_path, lambda: Net(breaks=False, loss_alone=False), **how)
    plan = require_exact(model, plain, scored(333))
    assert plan.schedule.moves and plan.overhead == 0.0


def test_host_memory_is_bounded_at_every_size(tmp_path):
    most = 200_000
    plain, model = wrapped(tmp_path, host_memory_limit=most)
    plans = [require_exact(model, plain, tokens(*sizes)) for sizes in ((3, 40), (4, 50), (8, 60), (8, 57))]
    assert all(plan.host_bytes <= most for plan in plans)
    free = hybridremat.plan(Embedded(), kwargs=tokens(8, 60), memory_limit="75%", offload="file:/tmp", **HOW)
    assert any(plan.host_bytes for plan in plans) and free.host_bytes > most


@pytest.mark.filterwarnings("ignore::hybridremat.errors.OutstandingForwardWarning")
def test_forwards_of_several_sizes_have_room_each(tmp_path):
    plain, model = wrapped(tmp_path, forwards=3)
    sizes = ((4, 30), (4, 50), (8, 60))
    for each in sizes:
        require_exact(model, plain, tokens(*each))
    assert hybridremat.get_plan(model).schedule.moves

    def gradients(of):
        of.zero_grad(set_to_none=True)
        made = [loss_in(of(**tokens(*each))) for each in sizes]
        for loss in (made[1], made[2], made[0]):
            loss.backward()
        return [each.grad for each in of.parameters()]

    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_schedules_that_were_let_go_move_their_values_again(tmp_path):
    limit = hybridremat.plan(Embedded(), kwargs=tokens(8, 60), memory_limit="75%", **HOW).memory_limit
    plain, model = wrapped(tmp_path, memory_limit=limit, max_plans=1)
    for sizes in ((3, 50), (8, 60), (3, 50), (8, 60)):
        require_exact(model, plain, tokens(*sizes))
    assert [bool(member.schedule.moves) for member in portfolio(model).members] == [False, True]


def test_a_file_of_many_sizes_has_their_moves(tmp_path, monkeypatch):
    plain, model = wrapped(tmp_path)
    for sizes in ((4, 50), (8, 60)):
        require_exact(model, plain, tokens(*sizes))
    hybridremat.get_plan(model).save(tmp_path / "plan.json")
    read = hybridremat.Plan.load(tmp_path / "plan.json")
    assert any(each.schedule.moves for each in read.coverage.schedules)
    monkeypatch.setattr(planner, "plan_graph", None)
    again = hybridremat.wrap(
        copy.deepcopy(plain),
        kwargs=tokens(4, 50),
        plan=read,
        offload=f"file:{tmp_path}",
        progress=False,
    )
    plans = [require_exact(again, plain, tokens(*sizes)) for sizes in ((4, 50), (8, 59))]
    assert [bool(plan.schedule.moves) for plan in plans] == [False, True]


def test_a_store_grows_to_what_the_largest_step_needs(tmp_path):
    every = Stores(Target(str(tmp_path)), "cpu", 4096)
    first = every.take()
    every.give_back(first, [])
    every.require(8192)
    every.require(4096)
    grown = every.take()
    assert (first.size, grown.size) == (4096, 8192)
    every.give_back(grown, [])
    assert every.take() is grown


def test_what_nobody_uses_makes_room_for_others(tmp_path):
    room = Room(10_000)
    one, other = (Stores(Target(str(tmp_path)), "cpu", size, room) for size in (8192, 4096))
    one.give_back(one.take(), [])
    held = other.take()
    with pytest.raises(hybridremat.OffloadError, match=r"hold 4\.00 KiB of it, and this one takes 8\.00 KiB"):
        one.take()
    other.give_back(held, [])
    del held
    assert one.take().size == 8192
