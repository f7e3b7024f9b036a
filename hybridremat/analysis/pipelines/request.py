"""What a pipeline is asked for, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from hybridremat.errors import LimitError
from hybridremat.planning.settings import Settings
from hybridremat.sequence.pipeline.orders import PipelineShape, ScheduleName
from hybridremat.units import is_share, parse_bytes, require_count

SPLIT_BACKWARD: Final = ("interleavedzerobubble", "zbvzerobubble", "dualpipev", "zerobubble", "zbv")
LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class PipelineRequest:
    """A pipeline to be planned.

    Attributes
    ----------
    shape
        Devices, stages, microbatches and their order.
    memory
        Bytes of each device.
    slots
        Tensors of the optimizer for each trained parameter, of its size.
    link
        Bytes in a second between two devices, each way; None: what is sent takes no time.
    settings
        How stages are planned.
    loss, target
        The loss outside of the model, and what it takes beside the output; None without.
    """

    shape: PipelineShape
    memory: tuple[int, ...]
    slots: int
    link: float | None
    settings: Settings
    loss: LossFunction | None = None
    target: Any = None

    def memory_of(self, stage: int) -> int:
        """Bytes that a stage may take: several on one device have equal shares of it."""
        return self.memory[stage % self.shape.devices] // self.shape.per_device

    def send_time(self, size: int) -> int:
        """Nanoseconds until so many bytes are on the next device."""
        return 0 if self.link is None else round(size / self.link * 1e9)


def pipeline_shape(schedule: str, devices: int, microbatches: int, per_device: int | None) -> PipelineShape:
    """The order of a pipeline.

    Raises
    ------
    LimitError
        If there is no such schedule, or PyTorch does not run it with so many stages and microbatches.
    """
    require_count("stages", devices, "of devices, each with a stage")
    require_count("microbatches", microbatches, "of microbatches in a step")
    name: Any = schedule.lower().removeprefix("schedule") if isinstance(schedule, str) else ""
    if name in SPLIT_BACKWARD:
        raise LimitError(
            f"schedule={schedule!r} runs the backward of a stage in two parts, for inputs and for weights, "
            'and a planned backward is one: use "1f1b", "gpipe" or "interleaved1f1b"'
        )
    known = get_args(ScheduleName)
    if name not in known:
        raise LimitError(f"schedule={schedule!r} is not known; use {' or '.join(map(repr, known))}")
    several = 2 if per_device is None and name == "interleaved1f1b" else per_device or 1
    require_count("stages_per_device", several, "of stages on each device")
    if (several > 1) != (name == "interleaved1f1b"):
        raise LimitError(
            f"schedule={schedule!r} and stages_per_device={several}: several stages on each device are what "
            '"interleaved1f1b" is for, and it alone; its default is 2'
        )
    if devices < 2:
        raise LimitError("stages=1 is no pipeline: use hybridremat.wrap(model, …, memory_limit=…)")
    shape = PipelineShape(name, devices, microbatches, several)
    if name == "1f1b" and microbatches < devices:
        raise LimitError(
            f"microbatches={microbatches} for {devices} stages: PyTorch's Schedule1F1B takes at least one "
            f'for each stage. Use {devices} or more, or schedule="gpipe"'
        )
    if several > 1 and microbatches % shape.rounds:
        raise LimitError(
            f"microbatches={microbatches} cannot be divided into {shape.rounds} rounds, as PyTorch's "
            f"ScheduleInterleaved1F1B does on {devices} devices: use a multiple of {devices}"
        )
    return shape


def device_bytes(memory: int | str | Sequence[int | str], devices: int) -> tuple[int, ...]:
    """Bytes of each device.

    Raises
    ------
    LimitError
        If one cannot be read, is a share, or there are more or fewer than devices.
    """
    one = isinstance(memory, int | str)
    given = [memory] * devices if isinstance(memory, int | str) else [*memory]
    if len(given) != devices:
        raise LimitError(f"device_memory has {len(given)} entries for {devices} devices: give one for each")
    for each in given:
        if is_share(each):
            raise LimitError(
                f"device_memory={memory if one else each!r} is a share, and there is no step that it could "
                'be of: it is what a device has for all of training. Give bytes, or a size: "40GiB"'
            )
    return tuple(parse_bytes(each, name="device_memory") for each in given)
