"""Plans for a device that is not here: rates by hand, sizes by the allocator, files that describe one."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybridremat
from hybridremat import DeviceSpec, DeviceSpecError, LimitError
from hybridremat.graph.costs.device_specs import DEVICE_SPECS, device_spec
from support.training import small
from support.wrapping import HOW, assert_untouched, state_of

# One teraflop and one gigabyte in a second at most; 0.7 and 0.8 of that are reckoned with.
TOY = DeviceSpec("toy", fp32=1e9, tf32=2e9, bf16=4e9, fp16=8e9, bandwidth=1e9, memory=1 << 20, call_ns=100)
FIELDS = {"name": "mine", "fp32": 1e12, "tf32": 2e12, "bf16": 4e12, "fp16": 4e12, "bandwidth": 1e11}
HERE = {"workers": 1, "progress": False}


class Product(nn.Module):
    """Two ops forward: a product, and a sum of all that it makes."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 16, dtype=dtype))

    def forward(self, x):
        return (x @ self.weight).sum()


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, 3, 3))

    def forward(self, x):
        return functional.conv2d(x, self.weight).sum()


def ops_of(model, x, **how):
    plan = hybridremat.plan(model, (x,), memory_limit="100%", device_spec=TOY, **{**HERE, **how})
    return {op.target.split(".")[1]: op for op in plan.details.graph.ops if op.phase == "forward"}, plan


RATES = [("float32", 1e9, 4), ("bfloat16", 4e9, 2), ("float16", 8e9, 2)]


@pytest.mark.parametrize(("dtype", "rate", "size"), RATES)
def test_times_are_the_roofline_by_hand(dtype, rate, size):
    kind = getattr(torch, dtype)
    ops, plan = ops_of(Product(kind), torch.randn(64, 32, dtype=kind))
    flops, moved = 2 * 64 * 32 * 16, size * (64 * 32 + 32 * 16 + 64 * 16)
    assert ops["mm"].time == round(1e9 * max(flops / (0.7 * rate), moved / 0.8e9) + 100)
    assert ops["sum"].time == round(1e9 * size * (64 * 16 + 1) / 0.8e9 + 100)  # no product: bytes decide
    assert plan.cost_model == "roofline"
    assert {op.temp for op in plan.details.graph.ops} == {0}


def test_convolutions_of_float32_run_in_tf32():
    ops, _ = ops_of(Filter(), torch.randn(2, 4, 10, 10))
    flops = 2 * (2 * 8 * 8 * 8) * (4 * 3 * 3)
    assert ops["convolution"].time == round(1e9 * flops / (0.7 * 2e9) + 100)


def test_sizes_are_what_the_allocator_takes():
    model, batch = small("transformer")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="70%", device_spec="h200", **HERE)
    graph = plan.details.graph
    for value in graph.values:
        if value.producer is not None and value.dtype:
            exact = math.prod(value.shape) * getattr(torch, value.dtype).itemsize
            assert value.bytes == math.ceil(exact / 512) * 512
    assert graph.rng_state_bytes == 16
    assert plan.predicted_peak <= plan.memory_limit < plan.plain_peak
    assert (plan.origin.device, plan.origin.device_name) == ("cuda", "h200 (spec)")
    assert "h200 (spec): what kernels allocate as they run is not counted" in str(plan)


def test_a_model_without_memory_can_be_planned():
    model = Product().to("meta")
    _, plan = ops_of(model, torch.randn(64, 32, device="meta"))
    assert plan.plain_peak == ops_of(Product(), torch.randn(64, 32))[1].plain_peak
    assert next(model.parameters()).is_meta


class Tied(nn.Module):
    """A language model whose head is its embedding, with attention, a buffer and a loss inside."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(32))

    def forward(self, tokens):
        x = (self.embedding(tokens) * self.scale).unflatten(2, (2, 16)).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_a_model_without_memory_is_planned_as_the_one_that_has_some():
    tokens = torch.randint(0, 64, (2, 24))
    how = {"memory_limit": "100%", "device_spec": "h100-80g", **HERE}
    there = hybridremat.plan(Tied(), (tokens,), **how)
    model = Tied().to("meta")
    model.head.weight = model.embedding.weight
    plan = hybridremat.plan(model, (tokens.to("meta"),), **how)
    assert len(plan.schedule.steps) > 12 and plan.fingerprint == there.fingerprint
    assert plan == replace(there, origin=plan.origin)
    assert model.head.weight is model.embedding.weight and model.scale.is_meta
    assert hybridremat.frontier(model, (tokens.to("meta"),), device_spec="h100", **HERE).plain_peak > 0


def test_what_has_no_memory_runs_nowhere():
    model, batch = Product().to("meta"), (torch.randn(64, 32, device="meta"),)
    for ask in (hybridremat.wrap, hybridremat.plan):
        with pytest.raises(hybridremat.ModelError, match=r"meta device.*to_empty.*device_spec"):
            ask(model, batch, memory_limit="90%", **HERE)
    with pytest.raises(hybridremat.ModelError, match="meta device"):
        hybridremat.frontier(model, batch, **HERE)


@pytest.mark.slow
def test_other_cost_models_keep_their_times_and_the_sizes_of_the_device():
    model, batch = small("transformer")
    there = hybridremat.plan(model, kwargs=batch, memory_limit="70%", device_spec="t4", **HOW)
    here = hybridremat.plan(model, kwargs=batch, memory_limit="70%", **HOW)
    pairs = zip(there.details.graph.ops, here.details.graph.ops, strict=True)
    assert all(a.time == b.time for a, b in pairs)
    assert there.cost_model == "flops"
    assert all(value.bytes % 512 == 0 for value in there.details.graph.values)


def test_a_limit_beyond_the_device_warns():
    more = r"limit of 2\.00 MiB is more than toy has, 1\.00 MiB"
    with pytest.warns(hybridremat.DeviceMemoryWarning, match=more):
        hybridremat.plan(Product(), (torch.randn(64, 32),), memory_limit="2MiB", device_spec=TOY, **HERE)


@pytest.mark.slow
def test_the_frontier_of_another_device():
    model, batch = small("transformer")
    curve = hybridremat.frontier(model, kwargs=batch, device_spec="a100-80g", **HERE)
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="70%", device_spec="a100-80g", **HERE)
    assert curve.plain_peak == plan.plain_peak
    assert curve.at(memory_limit="70%").peak == plan.predicted_peak


def test_known_devices_are_plausible():
    assert {"h200", "h100", "a100-80g", "a100-40g", "rtx4090", "rtx3090", "l4", "t4"} <= set(DEVICE_SPECS)
    for name, spec in DEVICE_SPECS.items():
        assert spec.name == name and spec.allocation == 512
        assert 5e12 < spec.fp32 <= spec.tf32 <= spec.bf16 <= spec.fp16 < 1e15
        assert 2e11 < spec.bandwidth < 1e13
        assert 16 << 30 <= spec.memory <= 140 << 30


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_file_describes_a_device(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in FIELDS.items())
    as_json = json.dumps({**FIELDS, "memory": 1000})
    path.write_text(as_json if suffix == "json" else f"{lines}\nmemory = 1000\n")
    assert device_spec(path) == device_spec(str(path)) == DeviceSpec(**FIELDS, memory=1000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(FIELDS), r"lacks memory: flops and bytes"),
        (json.dumps({**FIELDS, "memory": 1, "cores": 3}), r"cores: no field of a device; there are name"),
        (json.dumps({**FIELDS, "memory": "80GB"}), r"memory='80GB'; give bytes, as in"),
        (json.dumps({**FIELDS, "memory": 1, "bandwidth": -1.0}), r"bandwidth=-1\.0; give bytes in a second"),
        (json.dumps({**FIELDS, "memory": 1, "bandwidth": 2039}), r"bandwidth=2039; give bytes in a second"),
        (json.dumps({**FIELDS, "memory": 1, "bf16": 312}), r"bf16=312; give flops in a second, as in"),
        (json.dumps({**FIELDS, "memory": 1, "allocation": 1.5}), r"allocation=1\.5; give a whole number"),
        (json.dumps({**FIELDS, "memory": 1, "call_ns": 1e300}), r"call_ns=1e\+300; give nanoseconds"),
        (json.dumps({**FIELDS, "memory": 1, "fp32": True}), r"fp32=True; give flops"),
        (json.dumps({**FIELDS, "memory": 1, "fp32": math.inf}), r"fp32=inf; give flops"),
        (json.dumps({**FIELDS, "memory": 1, "name": " "}), r"name=' ' is no name"),
        ("[1]", r"holds no table of fields"),
        ("{", r"spec\.json is not JSON"),
        ("[" * 200_000, r"spec\.json is not JSON"),
    ],
)
def test_files_that_describe_none_are_refused(tmp_path, content, message):
    path = tmp_path / "spec.json"
    path.write_text(content)
    model, x = Product(), torch.randn(64, 32)
    before = state_of(model)
    with pytest.raises(DeviceSpecError, match=message):
        hybridremat.plan(model, (x,), memory_limit="100%", device_spec=path, **HERE)
    assert_untouched(before, model)


def test_names_that_are_not_known_are_refused(tmp_path):
    with pytest.raises(DeviceSpecError, match=r"'h20' is not known; did you mean h200\? There are h200"):
        device_spec("h20")
    with pytest.raises(DeviceSpecError, match=r"absent\.toml cannot be read: No such file"):
        device_spec(tmp_path / "absent.toml")
    with pytest.raises(DeviceSpecError, match="give a name, a file or a DeviceSpec"):
        device_spec(200)
    with pytest.raises(LimitError, match='graph_breaks="plan" cannot be combined'):
        ops_of(Product(), torch.ones(2, 32), graph_breaks="plan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fp32": 0}, "fp32=0"),
        ({"allocation": 0}, "allocation=0"),
        ({"bandwidth": math.nan}, "bandwidth=nan"),
        ({"name": 5}, "name=5 is no name"),
        ({"call_ns": -1}, "call_ns=-1"),
    ],
)
def test_a_spec_made_by_hand_is_held_to_the_same(change, message):
    with pytest.raises(DeviceSpecError, match=message):
        device_spec(replace(TOY, **change))
