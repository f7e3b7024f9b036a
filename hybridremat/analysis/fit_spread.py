"""Will it fit several devices, by how training is spread over them."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.analysis.device_memory import Room, device_memory, kept_free
from hybridremat.analysis.fit_devices import Devices
from hybridremat.analysis.fit_pipeline import PipelineFit, fit_pipeline
from hybridremat.analysis.fit_sharded import ShardedFit, fit_sharded
from hybridremat.analysis.fit_tensors import fit_tensors
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.graph.costs.device_specs import device_spec
from hybridremat.planning.settings import Settings


@dataclass(frozen=True)
class Given:
    """What a device is given, as the arguments of :func:`hybridremat.fit` say it."""

    optimizer: str
    memory: int | str | None
    margin: int | str | None


def fit_on_devices(
    made: SampleStep, devices: Devices, asked: Settings, given: Given, *, show: bool
) -> ShardedFit | PipelineFit:
    """Whether each device holds its share.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.fit`.
    """
    spec = None if asked.device_spec is None else device_spec(asked.device_spec)

    def room(resident: int) -> Room:
        name, available = device_memory(made.model, spec, given.memory, resident)
        return Room(name, available, kept_free(made.model, spec, given.margin, available - resident))

    if devices.shard == "pp":
        return fit_pipeline(made, devices, asked, optimizer=given.optimizer, room=room(0), show=show)
    fit_share = fit_sharded if devices.shard == "fsdp2" else fit_tensors
    return fit_share(made, devices, asked, optimizer=given.optimizer, room=room, show=show)
