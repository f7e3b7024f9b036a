"""What each rank does in tests of launchers with units that FSDP2 shards; see processes.py.

Each trains twice with what a script of ``examples/`` has, without a plan and with one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh

import hybridremat
from hybridremat.compiler.units import find_units
from hybridremat.graph.costs.allocations import record
from hybridremat.graph.garbage import without_collection
from support.sharded_cases import HOW, local

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, rank: int) -> ModuleType:
    """A script, in a process as ``torchrun`` starts it."""
    sys.path.insert(0, str(EXAMPLES))
    ranks = distributed.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in told.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}
    return import_module(name)


@contextmanager
def planned_quickly() -> Iterator[None]:
    """Plans of scripts as tests make them."""
    whole = hybridremat.wrap_each

    def wrap_each(*args: Any, **kwargs: Any) -> nn.Module:
        return whole(*args, **{**kwargs, **HOW})

    with patch.object(hybridremat, "wrap_each", wrap_each):
        yield


@contextmanager
def measured(
    owner: object, name: str, before: Callable[..., object] = lambda *_: None
) -> Iterator[list[int]]:
    """Most bytes above the beginning of each call of a function that runs a step."""
    run, peaks = getattr(owner, name), list[int]()

    def step(*args: Any, **kwargs: Any) -> Any:
        made = list[Any]()
        before(*args)
        with without_collection():
            peaks.append(record("cpu", lambda _: made.append(run(*args, **kwargs))).peak)
        return made[0]

    with patch.object(owner, name, step):
        yield peaks


def found(
    plain: tuple[nn.Module, list[Any]], planned: tuple[nn.Module, list[Any]], peaks: list[int]
) -> dict[str, Any]:
    """What a test compares: trained modules and what they made."""
    models, made = zip(plain, planned, strict=True)
    values = [[local(each.detach()) for each in (*m.parameters(), *m.buffers())] for m in models]
    plan = hybridremat.get_plan(models[1])
    model = models[1]
    units = find_units(model, plan.request.units).values()
    return {
        "losses": [float(each) for each in made[1]],
        "equal": made[0] == made[1] and all(map(torch.equal, *values)),
        "same names": list(models[0].state_dict()) == list(models[1].state_dict()),
        "peaks": peaks,
        "limit": plan.memory_limit,
        "predicted": plan.predicted_peak,
        "buffer": max(sum(each.numel() * 4 for each in unit.parameters()) for unit in units) * 11 // 10,
    }


def plain(rank: int) -> dict[str, Any]:
    """The loop in plain PyTorch, with checkpoints and an evaluation after its steps."""
    script = example("plain_fsdp2", rank)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    with planned_quickly(), measured(script, "step") as peaks:
        runs = [_resumed(*script.train(mesh, planned=planned), script, rank) for planned in (False, True)]
    return found(*runs, peaks[len(peaks) // 2 :])


def _resumed(
    model: nn.Module, losses: list[float], script: ModuleType, rank: int
) -> tuple[nn.Module, list[Any]]:
    """A trained model that is saved, trained further, loaded and trained again; with all losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = [*losses]

    def another(number: int) -> None:
        torch.manual_seed(rank + 10)
        made.append(script.step(model, script.batch(number, rank)))
        optimizer.step()
        optimizer.zero_grad()

    another(3)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folder)
    weights, steps = state_dict.get_state_dict(model, optimizer)
    checkpoint.save({"weights": weights, "steps": steps}, checkpoint_id=folder[0])
    another(4)
    with torch.no_grad():
        made.append(model.eval()(script.batch(5, rank)))
    model.train()
    weights, steps = state_dict.get_state_dict(model, optimizer)
    state = {"weights": weights, "steps": steps}
    checkpoint.load(state, checkpoint_id=folder[0])
    state_dict.set_state_dict(
        model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["steps"]
    )
    another(4)
    assert made[-1] == made[-3]  # the same step again
    full = state_dict.get_model_state_dict(model, options=state_dict.StateDictOptions(full_state_dict=True))
    state_dict.set_model_state_dict(
        model, full, options=state_dict.StateDictOptions(full_state_dict=True)
    )
    another(6)
    return model, [float(each) for each in made]


def with_accelerate(rank: int, *, mixed_precision: str = "no", efficient: bool = False) -> dict[str, Any]:
    """accelerate's loop, with a state that is saved and loaded, and generation."""
    script = example("accelerate_fsdp2", rank)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    script.shard_on_cpu()
    how = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": efficient}
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **how),
    )
    assert accelerator.is_fsdp2
    fsdp: Any = hybridremat.Fsdp
    if mixed_precision == "bf16":
        half = torch.bfloat16
        fsdp = partial(fsdp, param_dtype=half, reduce_dtype=half, output_dtype=half)
    runs = []
    with planned_quickly(), measured(script, "step") as peaks, patch.object(hybridremat, "Fsdp", fsdp):
        for planned in (False, True):
            made = script.make_model()
            model, losses = script.train(script.plan(made, 2) if planned else made, accelerator)
            model.eval()
            with torch.no_grad():
                losses.append(model(**script.batch(3, rank)).loss)
            model.train()
            whole = accelerator.get_state_dict(model)
            assert set(whole if rank == 0 else ()) <= set(model.state_dict())
            runs.append((model, [float(each) for each in losses]))
            accelerator.free_memory()
    return {**found(*runs, peaks[len(peaks) // 2 :]), "type": str(type(model).__mro__[1].__name__)}


def with_bfloat16(rank: int) -> dict[str, Any]:
    """accelerate's mixed precision."""
    return with_accelerate(rank, mixed_precision="bf16")


def loaded_efficiently(rank: int) -> dict[str, Any]:
    """accelerate's loading by way of ``meta``."""
    return with_accelerate(rank, efficient=True)


def with_trainer(rank: int) -> dict[str, Any]:
    """Hugging Face's Trainer, with its callback, an evaluation and generation."""
    script = example("trainer_fsdp2", rank)
    runs = []
    callback = hybridremat.HybridRematTrainerCallback(report=False, measure_every=1)
    with planned_quickly():
        for planned in (False, True):
            arguments = script.make_arguments(tempfile.mkdtemp())
            script.shard_on_cpu()
            model = script.make_model()
            model = script.plan(model, arguments) if planned else model
            trainer = script.train(model, arguments, *([callback] if planned else []))
            made = [each["loss"] for each in trainer.state.log_history if "loss" in each]
            made.append(trainer.evaluate(script.ROWS[:8])["eval_loss"])
            written = trainer.model.generate(script.TOKENS[:2, :8], max_new_tokens=4, do_sample=False)
            runs.append((trainer.model, [*made, *written.flatten().tolist()]))
    name = "hybridremat/measured_peak_bytes"
    peaks = [each[name] for each in trainer.state.log_history if name in each]
    return {**found(*runs, peaks), "refused": _refused(script)}


def _refused(script: ModuleType) -> str:
    """What a callback says that is to wrap a model that the Trainer has sharded."""
    arguments = script.make_arguments(tempfile.mkdtemp())
    script.shard_on_cpu()
    callback = hybridremat.HybridRematTrainerCallback(memory_limit="90%")
    try:
        script.train(script.make_model(), arguments, callback)
    except hybridremat.ModelError as error:
        return str(error)
    return "it trained"


def with_lightning(rank: int) -> dict[str, Any]:
    """Lightning's strategy, with its callback."""
    script = example("lightning_fsdp2", rank)
    from pytorch_lightning.loops.optimization.automatic import Closure

    callback = hybridremat.HybridRematLightningCallback(module="net", report=False)
    with planned_quickly(), measured(Closure, "closure", before=_without_gradients) as peaks:
        runs = []
        for planned in (False, True):
            module = script.train(script.Lit(planned=planned), *([callback] if planned else []))
            runs.append((module.net, module.losses))
    return found(*runs, peaks[len(peaks) // 2 :])


def _without_gradients(closure: Any, *_: object) -> None:
    """Free gradients of the step before, as Lightning does in the midst of the next."""
    if closure._zero_grad_fn is not None:
        closure._zero_grad_fn()
