"""What training takes on one rank beside its step, where parameters are sharded or split by tensors."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hybridremat.analysis.needs import TrainingNeeds
from hybridremat.analysis.resident import resident_bytes, rounding
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.compiler.capture import model_device
from hybridremat.compiler.model_checks import require_trainable
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.planning.breaks.sharding import Sharding
from hybridremat.planning.breaks.shards import part_of
from hybridremat.runtime.optimizer_memory import optimizer_memory


def sharded_needs(
    made: SampleStep, optimizer: str, sharding: Sharding, ranks: int, spec: DeviceSpec | None
) -> TrainingNeeds:
    """What the first of some ranks keeps, which has most; buffers are whole, and the batch is its own.

    Raises
    ------
    OptionsError
        If ``optimizer`` is none, or its step cannot be tried.
    """
    needs = _needs(made, optimizer, ranks, spec)
    return replace(needs, gradients=sum(each.kept for each in (*sharding.units.values(), sharding.rest)))


def local_needs(made: SampleStep, optimizer: str, spec: DeviceSpec | None) -> TrainingNeeds:
    """What this rank keeps of a model that is split by tensors, or is whole.

    Raises
    ------
    OptionsError
        If ``optimizer`` is none, or its step cannot be tried.
    """
    return _needs(made, optimizer, 1, spec)


def _needs(made: SampleStep, optimizer: str, ranks: int, spec: DeviceSpec | None) -> TrainingNeeds:
    require_trainable(made.model)
    rounded, every = rounding(made.model, spec), list(made.model.parameters())
    device = model_device(made.model) if spec is None else "cuda"
    parts = [part_of(each, ranks) for each in every]
    trained = [nn.Parameter(each) for each in parts if each.requires_grad]
    found = optimizer_memory(optimizer, trained, device=device, rounded=rounded)
    whole = resident_bytes(every, rounded)
    return TrainingNeeds(
        optimizer=optimizer,
        parameters=sum(rounded(each.nbytes) for each in parts),
        buffers=resident_bytes([*every, *made.model.buffers()], rounded) - whole,
        optimizer_state=found.state,
        batch=resident_bytes((list(made.args), dict(made.kwargs)), rounded),
        gradients=sum(rounded(each.nbytes) for each in trained),
        optimizer_step=found.step,
    )
