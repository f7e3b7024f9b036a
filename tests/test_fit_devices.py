"""Will it fit several devices: held to planned units, sharded and split models, and planned pipelines."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import hybridremat
from hybridremat import Fsdp, LimitError, ModelError
from hybridremat.analysis.repeated_layers import repeated_layers
from hybridremat.cli import main as cli
from hybridremat.graph.costs.device_specs import DEVICE_SPECS, LINKS
from hybridremat.units import format_bytes
from support.fit_cases import HOW, Stack, llama, stack
from support.processes import run_ranks

TOY = replace(DEVICE_SPECS["h100"], name="toy", allocation=1)
RANKS = 3


def fsdp(memory="300KiB", gpus=RANKS, **how):
    model, batch = stack()
    return hybridremat.fit(model, kwargs=batch, gpus=gpus, shard="fsdp2", memory=memory, **{**HOW, **how})


@pytest.mark.parametrize("spec", [None, "h100"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_steps_are_those_of_planned_units(spec, dtype):
    how = {"device_spec": spec, "margin": 0}
    given = Fsdp(RANKS, param_dtype=dtype)
    found = fsdp("870KiB", fsdp=given, **how)
    assert "planned" in {row.fits for row in found.table}
    for row in found.table:
        way = replace(given, ranks=row.gpus) if row.gpus > 1 or dtype else None
        asked = {"memory_limit": row.room, "units": "layers.*", "fsdp": way, "device_spec": spec, **HOW}
        model, batch = stack()
        if row.fits == "no":
            with pytest.raises(hybridremat.InfeasibleLimitError) as raised:
                hybridremat.plan(model, kwargs=batch, **asked)
            assert raised.value.least == row.least_step
            continue
        plan = hybridremat.plan(model, kwargs=batch, **asked)
        assert row.plain_step == plan.plain_peak
        assert row.overhead == (plan.overhead if row.fits == "planned" else None)
        assert row.least_step == min(plan.least_peak, row.plain_step)
    assert found.memory_limit == plan.memory_limit


def test_a_wrapped_model_has_the_plan_that_fit_speaks_of():
    found = fsdp("900KiB")
    model, batch = stack()
    how = {"memory_limit": found.memory_limit, "fsdp": RANKS, "kwargs": batch, **HOW}
    plan = hybridremat.get_plan(hybridremat.wrap_each(model, found.units, **how))
    assert (plan.predicted_peak, plan.overhead) == (found.plan.predicted_peak, found.plan.overhead)


@pytest.mark.everyday
def test_what_stays_and_what_is_sent_is_what_fsdp_leaves_and_moves(tmp_path):
    (real,) = run_ranks("support.fit_cases:sharded", tmp_path, fake=RANKS)
    found = fsdp("1GiB")
    assert {name: getattr(found, name) for name in ("parameters", "gradients", "optimizer_state")} == {
        name: real[name] for name in ("parameters", "gradients", "optimizer_state")
    }
    assert found.table[-1].sent == real["moved"] * (RANKS - 1) // RANKS
    assert found.buffers == 4 * 35 and found.batch == 8 * 8 * 32


def test_tensor_parallel_is_that_of_a_model_that_is_parallelized(tmp_path):
    (real,) = run_ranks("support.fit_cases:split", tmp_path, fake=2)
    model, batch = llama()
    found = hybridremat.fit(model, kwargs=batch, gpus=2, shard="tp", memory="1GiB", **HOW)
    assert {name: getattr(found, name) for name in ("parameters", "optimizer_state", "plain_step")} == {
        name: real[name] for name in ("parameters", "optimizer_state", "plain_step")
    }
    assert found.least_step == real["least_step"]
    assert not torch.distributed.is_initialized()
    assert type(model.lm_head.weight) is nn.Parameter
    assert found.table[1].sent > 0 == found.table[0].sent


def test_tensor_parallel_on_paper_with_and_without_weights():
    how = {"gpus": 2, "shard": "tp", "device_spec": "h100", **HOW}
    model, batch = llama()
    found = hybridremat.fit(model, kwargs=batch, **how)
    there = {name: each.to("meta") for name, each in batch.items()}
    assert hybridremat.fit(model.to("meta"), kwargs=there, **how).to_dict() == found.to_dict()


def tower():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))


@pytest.mark.parametrize("units", [{}, {"units": "*"}])
def test_a_pipeline_is_that_of_pipeline_plan(units):
    inputs = (torch.zeros(8, 16),)
    how = {"gpus": 2, "shard": "pp", "memory": "20KiB", "microbatches": 6, "link": 1e9, **HOW}
    found = hybridremat.fit(tower(), inputs, **how, **units)
    same = {"stages": 2, "microbatches": 6, "device_memory": 20 << 10, "optimizer_slots": 2, "link": 1e9}
    how = {name: value for name, value in HOW.items() if name != "progress"}
    plan = hybridremat.pipeline_plan(tower(), inputs, **same, **how)
    assert (found.plan.stages, found.plan.step_time) == (plan.stages, plan.step_time)
    assert str(plan) in str(found) and found.fits in ("plain", "planned")
    told = found.to_dict()
    assert json.loads(json.dumps(told))["stages"][0]["predicted_peak"] == plan.stages[0].predicted_peak


def test_a_pipeline_that_does_not_fit_says_which_stage():
    found = hybridremat.fit(tower(), (torch.zeros(8, 16),), gpus=2, shard="pp", memory="4KiB", **HOW)
    assert found.fits == "no" and found.plan is None
    assert "stage 0" in found.reason and found.reason in str(found)


SLOTS = [("sgd", 0), ("sgd,momentum=0.9", 1), ("adamw,amsgrad=True", 3)]


@pytest.mark.parametrize(("optimizer", "slots"), SLOTS)
def test_slots_of_the_optimizer(optimizer, slots):
    how = {"gpus": 2, "shard": "pp", "memory": "1MiB", "optimizer": optimizer, **HOW}
    assert hybridremat.fit(tower(), (torch.zeros(8, 16),), **how).slots == slots


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"gpus": 8}, LimitError, "how is training spread.*fsdp2.*tp.*pp"),
        ({"shard": "fsdp2"}, LimitError, "how many devices.*gpus=8"),
        ({"gpus": 0, "shard": "fsdp2"}, LimitError, "gpus=0"),
        ({"gpus": 0}, LimitError, "gpus=0 is out of range"),
        ({"gpus": 2.5, "shard": "tp"}, LimitError, r"gpus=2\.5"),
        ({"gpus": 2, "shard": "ddp"}, LimitError, "'ddp' is not known"),
        ({"gpus": 2, "shard": "fsdp2", "fsdp": 4}, LimitError, "two numbers of ranks"),
        ({"gpus": 2, "shard": "tp", "fsdp": 2}, LimitError, 'goes with shard="fsdp2"'),
        ({"gpus": 2, "shard": "fsdp2", "microbatches": 2}, LimitError, 'for shard="pp"'),
        ({"gpus": 2, "shard": "fsdp2", "link": 0}, LimitError, "link=0"),
        ({"link": 1e9}, LimitError, "for several devices"),
        ({"gpus": 2, "shard": "pp", "microbatches": 0}, LimitError, "microbatches=0"),
        ({"gpus": 4, "shard": "pp"}, ModelError, "4 stages.*3 children"),
        ({"gpus": 1, "shard": "pp"}, LimitError, "no pipeline"),
        ({"gpus": 2, "shard": "pp", "reserve": 5}, LimitError, "reserve.*cannot be combined"),
        ({"gpus": 2, "shard": "pp", "units": ["layers.0"]}, LimitError, "children of one container"),
        ({"gpus": 2, "shard": "fsdp2", "units": "blocks.*"}, ModelError, "matches no module.*layers"),
        ({"gpus": 2, "shard": "fsdp2", "gradients": "in_backward"}, LimitError, "cannot be combined"),
        ({"gpus": 2, "shard": "tp"}, ModelError, "no tensor parallel plan.*parallelize_module"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given, error, says):
    model, batch = stack()
    with pytest.raises(error, match=says):
        hybridremat.fit(model, kwargs=batch, memory="1MiB", **HOW, **given)


def test_tensor_parallel_that_cannot_be_split():
    model, batch = llama()
    with pytest.raises(ModelError, match=r"4 num_attention_heads are not split evenly among 3"):
        hybridremat.fit(model, kwargs=batch, gpus=3, shard="tp", **HOW)
    model._tp_plan = {"model.layers.*.mlp": "moe_tp_experts"}
    with pytest.raises(ModelError, match="moe_tp_experts"):
        hybridremat.fit(model, kwargs=batch, gpus=2, shard="tp", **HOW)


def test_the_layers_that_are_alike():
    assert repeated_layers(Stack()) == ("layers.*",)
    assert repeated_layers(tower()) == ("0", "1", "2", "3")
    both = nn.ModuleDict({"encoder": tower(), "decoder": nn.ModuleList([tower(), tower()])})
    assert repeated_layers(both) == ("encoder.*", "decoder.*")
    with pytest.raises(ModelError, match="name its layers by units="):
        repeated_layers(nn.Sequential(nn.Linear(2, 2), nn.GELU()))


@pytest.mark.parametrize("width", [{"allocation": 1}, {"allocation": 512}])
def test_units_on_paper_are_those_that_are_measured(width):
    how = {"units": "layers.*", "memory_limit": "100%", "rewrites": "none", **HOW}
    model, batch = stack()
    here = hybridremat.plan(model, kwargs=batch, **how)
    spec = replace(TOY, **width)
    there = hybridremat.plan(model, kwargs=batch, device_spec=spec, **how)
    if spec.allocation == 1:
        assert there.plain_peak == here.plain_peak
        assert there.composition == here.composition
    assert here.plain_peak <= there.plain_peak <= here.plain_peak * 1.05
    meta = {name: each.to("meta") for name, each in batch.items()}
    again = hybridremat.plan(model.to("meta"), kwargs=meta, device_spec=spec, **how)
    assert again.composition == there.composition


def test_code_between_units_that_asks_for_a_value_has_none():
    model, batch = stack(asks=True)
    how = {"units": "layers.*", "memory_limit": "100%", **HOW}
    assert hybridremat.plan(model, kwargs=batch, **how).plain_peak > 0
    with pytest.raises(hybridremat.CaptureError, match=r"asks for a value.*plan on that device"):
        hybridremat.plan(model, kwargs=batch, device_spec="h100", **how)


def test_what_is_said_and_written_is_the_same(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text("from support.fit_cases import stack\n\ndef make(): return stack()\n")
    monkeypatch.chdir(tmp_path)
    words = ["fit", "own.py:make", "--gpus", "4", "--shard", "fsdp2", "--device-spec", "h100"]
    words += ["--memory", "900KiB", "--margin", "0", "--param-dtype", "bfloat16"]
    words += ["--cost-model", "flops", "--workers", "1", "--no-cache"]
    assert cli.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert [row["gpus"] for row in told["table"]] == [1, 2, 4]
    for row in told["table"]:
        line = next(each for each in text.splitlines() if re.match(rf" +{row['gpus']}  ", each))
        for name in ("resident", "plain_step", "least_step", "sent"):
            assert format_bytes(row[name]) in line
    assert told["link"] == LINKS["h100"] and "450 GB/s" in text
    rate = told["table"][-1]["sent"] / LINKS["h100"]
    assert told["table"][-1]["sending_time"] == round(rate * 1e9)
    assert f"memory_limit={told['memory_limit']}" in text
    assert cli.main(["fit", "own.py:make", "--param-dtype", "bfloat16"]) == 2
    assert "--gpus N --shard fsdp2" in capsys.readouterr().err


def test_the_fewest_devices_on_which_it_fits():
    found = fsdp("760KiB", gpus=4)
    assert [row.fits for row in found.table] == ["no", "no", "planned"] and found.least_gpus == 4
    assert fsdp("1GiB", gpus=4).least_gpus == 1
    none = fsdp("40KiB", gpus=4)
    assert none.least_gpus is None and "fits on none of these" in str(none) and "more devices" in str(none)
