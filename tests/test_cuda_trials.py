"""What trials of kernels do on CUDA, with stand-ins for a device."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hybridremat
from hybridremat.compiler import library_workspaces
from hybridremat.errors import ModelError
from hybridremat.graph.costs import cuda_recorder, kernel_store, made_inputs
from hybridremat.graph.costs.allocations import peaks_of
from hybridremat.graph.costs.index_ranges import index_ranges
from hybridremat.graph.costs.kernels import distinct_kernels
from hybridremat.graph.costs.made_inputs import prepared
from hybridremat.graph.costs.real_results import described, kernels_in_order
from hybridremat.graph.rewrites.loss_fusion import LOSS_BACKWARD
from hybridremat.graph.rewrites.trial import random_inputs, random_like
from hybridremat.graph.tracing.signature import fake_value
from hybridremat.planning import pipeline, sized_capture
from support.cuda_stand_in import Allocator
from support.op_classes import LOSSES, OTHERS, Bags, Net
from support.training import small, traced
from support.wrapping import HOW, assert_untouched, state_of

ATEN = torch.ops.aten
LEFT_OUT = {"segment means"}  # its lengths have to add up: the ops before it make them


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("group", ["losses", "others", "bags"])
def test_spread_indices_are_in_range_for_every_kernel(group):
    """On CUDA one out of range would end the process's work there; on CPU it is an error of the kernel."""
    nets = {"losses": LOSSES, "others": OTHERS, "bags": {}}[group]
    x = torch.randn(16, 16)
    steps = [traced(Net(use), x) for name, use in nets.items() if name not in LEFT_OUT]
    if group == "bags":
        pairs = (nn.Embedding, {}), (nn.EmbeddingBag, {"mode": "max"}), (nn.EmbeddingBag, {"padding_idx": 0})
        steps = [
            traced(Bags(kind, 1, sparse=False, **how), torch.randint(0, 100, (16, 8)[: 1 + bool(how)]))
            for kind, how in pairs
        ]
    spread = 0
    for step in steps:
        for node in distinct_kernels(step).node_of.values():
            call = prepared(node, spread=True)
            call()
            whole = [t for t in call.args if isinstance(t, torch.Tensor) and t.dtype == torch.int64]
            spread += bool(index_ranges(node)) and any(len(t.unique()) > 1 for t in whole)
    assert spread > 1


def test_random_numbers_for_trials_are_in_range_and_of_every_type():
    graph = fx.Graph()
    given = [torch.randn(()), torch.randn(6, 1), torch.zeros(6).long(), None, 1, -100, torch.ones(())]
    nodes = [graph.placeholder(f"x{i}") if isinstance(x, torch.Tensor) else x for i, x in enumerate(given)]
    for node, value in zip(nodes, given, strict=True):
        if isinstance(node, fx.Node):
            node.meta["val"] = value
    for target in (LOSS_BACKWARD, ATEN.nll_loss_backward.default):
        made = random_inputs(graph.call_function(target, tuple(nodes)))
        assert made[nodes[2]].eq(0).all(), "one class has one index"
    one = graph.placeholder("one")
    one.meta["val"] = torch.zeros(6, 1, 1, 1).long()
    pooled = one, one, *[[1, 1]] * 4, False, one
    pooling = graph.call_function(ATEN.max_pool2d_with_indices_backward.default, pooled)
    assert random_inputs(pooling)[one].eq(0).all(), "maps of one element have one place"
    eighths = random_like(torch.zeros(64).to(torch.float8_e4m3fn), 0)
    assert eighths.dtype == torch.float8_e4m3fn and len(eighths.float().unique()) > 8


def on_cuda():
    """A call of efficient attention's backward, traced on CUDA."""
    schema = ATEN._scaled_dot_product_efficient_attention_backward.default._schema
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = {}
    for entry in schema.arguments[:9]:
        shape, dtype = ((), torch.int64) if "philox" in entry.name else ((1, 2, 8, 4), torch.float32)
        nodes[entry.name] = graph.placeholder(entry.name)
        with mode:
            nodes[entry.name].meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
    target = ATEN._scaled_dot_product_efficient_attention_backward.default
    return graph.call_function(target, (*nodes.values(), 0.1, [True] * 4)), nodes


def test_seeds_that_a_kernel_reads_on_the_host_are_made_there(monkeypatch):
    """Efficient attention's forward leaves them on the CPU; a device's address would be a crash."""
    monkeypatch.setattr(made_inputs, "real_like", lambda value: value)
    node, nodes = on_cuda()
    call = prepared(node)
    devices = {name: each.device.type for name, each in zip(nodes, call.args, strict=False)}
    hosts = {name for name, device in devices.items() if device == "cpu"}
    assert hosts == {"philox_seed", "philox_offset"}


def test_what_a_kernel_leaves_elsewhere_than_traced_goes_on_from_there():
    """A seed that comes on the CPU is given to later kernels there, whatever they are called."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    seed = graph.call_function(ATEN.neg.default, (x,))
    reader = graph.call_function(ATEN.sin.default, (seed,))
    graph.output(reader)
    with mode:
        for node in (x, seed, reader):
            node.meta["val"] = torch.empty(3, device="cuda")
    ops = [SimpleNamespace(mutates=False)] * 2
    step = SimpleNamespace(
        module=SimpleNamespace(graph=graph),
        op_nodes=(seed, reader),
        fused_ops=(),
        graph=SimpleNamespace(ops=ops),
    )
    store = kernel_store.KernelStore()
    for node, key in kernels_in_order(step, store):
        if node is seed:
            store.results[key] = described(torch.empty(3))
        else:
            assert fake_value(seed).device.type == "cpu"


@pytest.mark.parametrize("spare", [0, 900_000])
def test_workspaces_do_not_depend_on_what_the_allocator_holds(spare, monkeypatch):
    """A block with bytes to spare is counted by what was asked for, rounded up."""
    allocator = Allocator(spare)
    monkeypatch.setattr(cuda_recorder, "torch", SimpleNamespace(cuda=allocator))

    def kernel():
        allocator.allocate(5 * 512)
        allocator.allocate(-5 * 512)

    ((peak, left),) = peaks_of([lambda: kernel], "cuda")
    assert 5 * 512 <= peak < 6 * 512 and left == 0
    assert spare or peak == 5 * 512


def test_figures_are_kept_by_the_allocators_settings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a device")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    found = {kernel_store.device_description("cuda")}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for value in ("expandable_segments:True", "max_split_size_mb:64"):
            monkeypatch.setenv(name, value)
            found.add(kernel_store.device_description("cuda"))
    assert len(found) == 5


def elsewhere(monkeypatch):
    """From here on the graphs of models are said to be on the second device, the first one is current."""
    with FakeTensorMode():
        there = torch.empty(3, device="cuda:1")
    backend = hybridremat.compiler.backend
    check = backend.require_current_device
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def patched(module, given):
        return check(module, [*given, there])

    monkeypatch.setattr(backend, "require_current_device", patched)


@pytest.mark.parametrize("route", ["wrap", "plan", "frontier", "graph breaks", "torch.compile"])
def test_a_model_that_is_not_on_the_current_device_is_refused_everywhere(route, monkeypatch):
    model, batch = small("mlp")
    before, given = state_of(model), copy.deepcopy(batch)
    elsewhere(monkeypatch)
    how = {"kwargs": batch, **HOW}
    told = r"on cuda:1, and the current device is cuda:0.*set_device\(1\)"
    with pytest.raises(Exception, match=told) as caught:
        if route == "torch.compile":
            options = {"memory_limit": "100%", "cost_model": "flops"}
            torch.compile(model, backend="hybridremat", options=options)(**batch)
        elif route == "frontier":
            hybridremat.frontier(model, **how)
        elif route == "plan":
            hybridremat.plan(model, memory_limit="100%", **how)
        else:
            breaks = "error" if route == "wrap" else "plan"
            hybridremat.wrap(model, memory_limit="100%", graph_breaks=breaks, **how)
    if route != "torch.compile":  # which marks the module itself
        assert isinstance(caught.value, ModelError)
        assert_untouched(before, model)
    assert all(torch.equal(batch[name], given[name]) for name in batch)


def test_a_model_on_the_current_device_is_not(monkeypatch):
    from hybridremat.compiler.model_checks import require_current_device

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    module = fx.GraphModule(nn.Module(), fx.Graph())
    with FakeTensorMode():
        require_current_device(module, [torch.empty(3, device="cuda:1"), torch.empty(3), 7])


def test_libraries_keep_their_workspaces_before_a_step_runs(monkeypatch):
    """Where every kernel is known nothing has multiplied yet: the first step would pass its limit."""
    devices, products = [], []
    monkeypatch.setattr(library_workspaces, "multiply", devices.append)
    for module in (pipeline, sized_capture):
        monkeypatch.setattr(module, "model_device", lambda _: "cuda")
    for dynamic in (None, False):
        model, batch = small("mlp")
        devices.clear()
        hybridremat.wrap(model, kwargs=batch, memory_limit="90%", dynamic=dynamic, **HOW)
        assert devices == ["cuda"]
        hybridremat.prepare(model, kwargs={"x": batch["x"][:40]})
        assert devices == ["cuda"] * 2
    monkeypatch.undo()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is ATEN.mm.default:
                products.append(torch._C._current_graph_task_id() >= 0)  # whether in a backward
            return func(*args, **(kwargs or {}))

    generator = torch.get_rng_state()
    with Products(), torch.no_grad():
        library_workspaces.multiply("cpu")
    assert products[0] is False and products[-1] is True
    assert torch.equal(generator, torch.get_rng_state())
