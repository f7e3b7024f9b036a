"""Will it fit several devices over which FSDP2 shards it: one rank's share, beside what a device has.

Nothing is sharded and no process group is needed: the model is planned by units for each number of ranks, as
:func:`hybridremat.wrap_each` does with ``fsdp=``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from hybridremat.analysis.batch_steps import BatchPath, BatchStep
from hybridremat.analysis.device_memory import Room
from hybridremat.analysis.fit_devices import Devices, with_known_link
from hybridremat.analysis.fit_planned import planned
from hybridremat.analysis.fit_result import Fit
from hybridremat.analysis.fit_sharded_data import OnDevices, ShardedFitData
from hybridremat.analysis.fit_sharded_text import sharded_text
from hybridremat.analysis.fit_traffic import sent_by_fsdp
from hybridremat.analysis.needs import TrainingNeeds, training_needs
from hybridremat.analysis.repeated_layers import repeated_layers
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.analysis.sharded_needs import sharded_needs
from hybridremat.planning.breaks.frontier import PathFrontier
from hybridremat.planning.settings import Settings
from hybridremat.plans.fsdp import Fsdp

RoomFor = Callable[[int], Room]
"""What a device has, where so many bytes are resident."""


@dataclass(frozen=True, kw_only=True)
class ShardedFit(ShardedFitData, Fit):
    """What training takes on one of several devices: the first, which has most. A :class:`hybridremat.Fit`.

    Attributes
    ----------
    gpus, shard
        As they were given.
    link
        Bytes in a second that a device sends to the next one; None if it is not known.
    units
        Names of the modules that are units, as patterns; of ``"tp"`` none.
    step_time
        Nanoseconds of the kernels of a plain step on one device, as far as they are captured, by the cost
        model.
    table
        The same for fewer devices: 1, 2, 4, … and ``gpus``, each an ``OnDevices``.
    """

    def __str__(self) -> str:
        return sharded_text(self)


def fit_sharded(
    made: SampleStep, devices: Devices, asked: Settings, *, optimizer: str, room: RoomFor, show: bool
) -> ShardedFit:
    """Whether one of the devices is enough for its share.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.fit`.
    """
    units = asked.units or repeated_layers(made.model)
    fsdp = asked.sharding or Fsdp(devices.gpus)
    asked = replace(asked, units=units, fsdp=fsdp).validated(need_limit=False)
    step = BatchStep.captured(made, asked, show=show)
    assert isinstance(step, BatchPath), "units are graphs of their own"

    devices = with_known_link(devices, asked)
    whole = None if fsdp.param_dtype is None else replace(fsdp, ranks=1)  # else FSDP2 has no part in it
    ways = {gpus: replace(fsdp, ranks=gpus) if gpus > 1 else whole for gpus in devices.tried}
    every = {
        gpus: _on(made, devices, step.path.over(way), replace(asked, fsdp=way), optimizer, room)
        for gpus, way in ways.items()
    }
    sent = {gpus: sent_by_fsdp(step.path.over(ways[gpus]).survey, gpus) for gpus in every}
    table = tuple(row(found, gpus, sent[gpus], devices) for gpus, found in every.items())
    return replace(every[devices.gpus], table=table)


def _on(
    made: SampleStep, devices: Devices, path: PathFrontier, asked: Settings, optimizer: str, room: RoomFor
) -> ShardedFit:
    """The figures of one number of devices, without the table."""
    sharding, fsdp = path.survey.sharding, asked.sharding
    if sharding is None or fsdp is None:
        needs = training_needs(made, optimizer, asked.spec)
    else:
        needs = sharded_needs(made, optimizer, sharding, fsdp.ranks, asked.spec)
    found = without_plan(needs, room, path.plain_needs, path.plain_time, devices, asked)
    return planned(found, path, asked, path.survey.context.origin)


def without_plan(
    needs: TrainingNeeds, room: RoomFor, plain: int, time: int, devices: Devices, asked: Settings
) -> ShardedFit:
    """What the plain step of a rank takes, in bytes and nanoseconds, beside what the rank keeps."""
    return ShardedFit(
        **asdict(needs),
        **asdict(room(needs.resident)),
        plain_step=plain,
        least_step=plain,
        reserve=asked.reserve_bytes(),
        gpus=devices.gpus,
        shard=devices.shard,
        link=devices.link,
        units=asked.units,
        step_time=time,
        table=(),
    )


def row(found: ShardedFit, gpus: int, sent: int, devices: Devices) -> OnDevices:
    """The line of some devices, each of which sends so many bytes in a step."""
    return OnDevices(
        gpus=gpus,
        resident=found.resident,
        plain_step=found.plain_step,
        least_step=found.least_step,
        room=found.room,
        fits=found.fits,
        overhead=None if found.plan is None else found.plan.overhead,
        sent=sent,
        sending_time=devices.time(sent),
    )
