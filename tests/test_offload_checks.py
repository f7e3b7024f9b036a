"""Moves in emitted graphs: what the checker lets pass, damage that it finds, the order of copies on a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from hybridremat.compiler.check import check
from hybridremat.compiler.offload import calls, pinned_store, stores
from hybridremat.compiler.offload.targets import Target
from hybridremat.errors import PlanError
from hybridremat.graph.joint import Move, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.offload.moved import unmoved
from hybridremat.sequence.offload.placement import place
from support.moves import emitted_with_moves
from support.training import small, traced


def moved(name, share=0.8):
    """A step, its graphs with moves, and its schedule."""
    model, batch = small(name)
    step = traced(model, **batch)
    bare = plain_schedule(step.graph)
    peak = step_memory(step.graph, bare).peak
    moves = place(unmoved(Judge(step.graph), bare), int(share * peak))
    assert moves
    schedule = replace(bare, moves=moves)
    return step, emitted_with_moves(step, schedule), schedule


@pytest.mark.parametrize("name", ["mlp", "convnet", "transformer", "running"])
def test_what_is_written_is_what_was_counted(name):
    step, graphs, schedule = moved(name)
    found, counted = check(step, *graphs), step_memory(step.graph, schedule)
    between = counted.saved + counted.released
    host = Judge(step.graph).host_bytes(schedule)
    assert (found.peak, found.saved, found.host) == (counted.peak, between, host)


class Dropping(nn.Module):
    """Dropout of a view of what a kernel makes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = functional.gelu(functional.dropout(layer(x), 0.5, self.training))
        return x.square().sum()


def made_again(graph):
    """Schedules in which an op of the forward runs once more, right before what reads it in the backward."""
    plain = plain_schedule(graph)
    backward = plain.steps[plain.num_forward :]
    for op in plain.steps[: plain.num_forward]:
        made = {*graph.ops[op].writes}
        first = next((n for n, each in enumerate(backward) if made & {*graph.ops[each].reads}), None)
        if first is not None:
            yield replace(plain, steps=(*plain.steps[: plain.num_forward + first], op, *backward[first:]))


def test_what_is_fetched_late_is_read_by_ops_that_run_again():
    """By random ones, too, whose views are made ahead of the op that replays them."""
    step = traced(Dropping(), x=torch.randn(3, 5, 8))
    judge, moved = Judge(step.graph), 0
    for bare in made_again(step.graph):
        moves = tuple(
            Move(each.value, each.birth, bare.num_forward, each.first, each.first)
            for each in unmoved(judge, bare).waiting
            if each.first >= bare.num_forward > each.last
        )
        schedule = replace(bare, moves=moves)
        found = check(step, *emitted_with_moves(step, schedule))
        assert found.peak == step_memory(step.graph, schedule).peak
        moved += len(moves)
    assert moved


def nodes(module, target):
    return [node for node in module.graph.nodes if node.target is target]


def swap_what_is_fetched(forward, backward):
    one, other = nodes(backward, calls.fetch)[:2]
    one.args, other.args = other.args, one.args


def leave_a_value(forward, _):
    forward.graph.erase_node(nodes(forward, calls.freed)[-1])


def free_twice(forward, _):
    freed = nodes(forward, calls.freed)[-1]
    with forward.graph.inserting_after(freed):
        forward.graph.call_function(calls.freed, freed.args)


def send_twice(forward, _):
    sent = nodes(forward, calls.send)[0]
    with forward.graph.inserting_after(sent):
        forward.graph.call_function(calls.send, sent.args)


def free_before_the_last_reader(forward, _):
    """Right behind the copy's start, where the next op still reads it."""
    for freed in nodes(forward, calls.freed):
        sent = freed.args[0]
        readers = [user for user in sent.args[2].users if user.target not in (calls.send, calls.freed)]
        if readers and len(freed.args) == 3 and freed.args[2] is sent.args[2]:
            sent.append(freed)
            order = {node: place for place, node in enumerate(forward.graph.nodes)}
            if any(order[reader] > order[freed] for reader in readers):
                return
    raise AssertionError("no value is read after it was made")


def make_another_tensor(_, backward):
    ready = nodes(backward, calls.ready)[0]
    ready.args = (ready.args[0], 99)


def fetch_what_never_left(_, backward):
    fetched = nodes(backward, calls.fetch)[0]
    fetched.args = (fetched.args[0], 99)


DAMAGE = {
    swap_what_is_fetched: "not computed as in the joint graph|overwrites|peak",
    leave_a_value: "what has not left",
    free_twice: "or twice",
    send_twice: "a place that is taken",
    free_before_the_last_reader: "has left for host memory",
    make_another_tensor: "what has not left",
    fetch_what_never_left: "what has not left",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda each: each.__name__)
def test_damage_is_refused(damage):
    step, graphs, _ = moved("transformer", 0.7)
    damage(*graphs)
    with pytest.raises(PlanError, match=DAMAGE[damage]):
        check(step, *graphs)


class Late:
    """A store whose copies are made when they are waited for."""

    def __init__(self, tensor):
        self.tensor, self.size = tensor, tensor.nbytes

    def back(self, tensor, offset, after):
        return lambda: tensor.copy_(self.tensor.view(torch.uint8))

    def wait(self, copy):
        copy()


def test_a_value_is_back_when_it_is_read():
    tensor = torch.randn(8)
    use = calls.Use(Late(tensor), offsets={0: 0}, out={0: None}, sizes={0: (tensor.nbytes, tensor.device)})
    use.views[0] = [calls._laid_out(tensor)]
    assert torch.equal(calls.ready(calls.Fetched(use, 0), 0), tensor)


def test_tensors_come_back_as_they_were_laid_out(tmp_path):
    every = stores.Stores(Target(str(tmp_path)), "cpu", 4096)
    calls._STORES[every.number] = every
    whole = torch.randn(6, 8, dtype=torch.complex64)
    laid_out = [whole, whole.conj(), whole[1:, ::2].t(), whole.conj().imag, whole.real]
    assert laid_out[3].is_neg() and laid_out[1].is_conj()
    ticket = calls.begin(every.number)
    use = calls.send(ticket, 0, whole)
    calls.freed(use, 0, *laid_out)
    fetched = calls.fetch(ticket, 0)
    for number, tensor in enumerate(laid_out):
        back = calls.ready(fetched, number)
        assert torch.equal(back, tensor) and back.stride() == tensor.stride()
        assert (back.is_conj(), back.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert back.untyped_storage().data_ptr() == fetched.tensor.data_ptr()


# --- streams


class Stream:
    """What one stream knows to have ended: for each stream, how many of its operations."""

    def __init__(self, device):
        self.device, self.known, self.done = device, {}, 0

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        for stream, count in event.items():
            self.known[stream] = max(count, self.known.get(stream, 0))

    def record_event(self):
        return {**self.known, self: self.done}


class Device:
    """In place of ``torch.cuda``: fails on what is touched before what came last is known to be over."""

    def __init__(self):
        self.compute = self.now = Stream(self)
        self.last = {}  # by place: the last operation on it

    def Stream(self):  # noqa: N802 - as torch.cuda calls it
        return Stream(self)

    def current_stream(self):
        return self.now

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def touch(self, place):
        stream, count = self.last.get(place, (self.now, 0))
        assert stream is self.now or self.now.known.get(stream, 0) >= count, f"{place} is not waited for"
        self.now.done += 1
        self.last[place] = (self.now, self.now.done)


class Bytes:
    def __init__(self, device, place):
        self.device, self.place = device, place

    def copy_(self, source, *, non_blocking):
        assert non_blocking
        self.device.touch(source.place)
        self.device.touch(self.place)


class Runtime:
    """In place of ``torch.cuda.cudart()``: what is pinned."""

    def __init__(self):
        self.calls = []

    def cudaHostRegister(self, address, size, _):  # noqa: N802 - as CUDA calls it
        self.calls.append(("pin", address, size))
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append(("unpin", address))


def test_pages_are_unpinned_once_no_copy_runs(monkeypatch):
    device, runtime = Device(), Runtime()
    device.cudart, device.current_device = lambda: runtime, lambda: 0
    device.synchronize = lambda: runtime.calls.append("synchronize")
    monkeypatch.setattr(pinned_store, "cuda", device)
    monkeypatch.setattr(pinned_store, "_STREAMS", {})
    every = stores.Stores(Target(), "cuda", 4096)
    every.give_back(every.take(), [])
    ((_, address, size),) = runtime.calls
    assert size == 4096
    every.require(8192)
    grown = every.take()
    assert runtime.calls[1:3] == ["synchronize", ("unpin", address)]
    assert grown.size == 8192 and runtime.calls[3][2] == 8192


@pytest.fixture
def gpu(monkeypatch):
    device = Device()
    monkeypatch.setattr(pinned_store, "cuda", device)
    monkeypatch.setattr(pinned_store, "_whole", lambda name: Bytes(device, name))
    monkeypatch.setattr(pinned_store.PinnedStore, "_place", lambda _, offset, __: Bytes(device, offset))
    store = object.__new__(pinned_store.PinnedStore)
    store._out, store._back = device.Stream(), device.Stream()
    return device, store


def test_no_kernel_and_no_copy_runs_before_what_it_waits_for(gpu):
    device, store = gpu
    for _ in range(3):  # the places are used again in each step
        device.touch("a")  # made
        out = store.out("a", 0)
        device.touch("b")  # meanwhile
        store.wait(out)
        device.touch("a")  # another's from now on
        back = store.back("c", 0, out)
        device.touch("b")
        store.wait(back)
        device.touch("c")


@pytest.mark.parametrize("forgotten", ["out", "back"])
def test_the_stand_in_notices_what_is_not_waited_for(gpu, forgotten):
    device, store = gpu
    device.touch("a")
    out = store.out("a", 0)
    if forgotten == "back":
        store.wait(out)
    with pytest.raises(AssertionError, match="not waited for"):
        device.touch("a")
        store.back("c", 0, out)
        device.touch("c")
