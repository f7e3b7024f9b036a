"""Will it fit several devices as a pipeline: :func:`hybridremat.pipeline_plan` with a stage on each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch import nn

from hybridremat.analysis.device_memory import Room
from hybridremat.analysis.fit_data import Fits
from hybridremat.analysis.fit_devices import Devices, with_known_link
from hybridremat.analysis.needs import TrainingNeeds, training_needs
from hybridremat.analysis.pipelines.plan import PipelinePlan
from hybridremat.analysis.pipelines.planning import pipeline_plan
from hybridremat.analysis.repeated_layers import containers_of_layers
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.errors import InfeasibleLimitError, LimitError
from hybridremat.planning.settings import PipelineSettings, Settings
from hybridremat.units import format_bytes

COUNT = 8
"""Bytes of a parameter's count of steps, which is no slot of its size."""


@dataclass(frozen=True, kw_only=True)
class PipelineFit:
    """Whether training fits the devices of a pipeline.

    Attributes
    ----------
    optimizer, gpus, microbatches, link
        As they were given, or by default.
    slots
        Tensors that the optimizer keeps for each trained parameter, of its size; rounded up.
    device, memory, margin
        A device, the bytes that it has for this, and those of them that are kept free.
    plan
        The pipeline; None if none fits.
    reason
        Why none fits: the stage that misses the least; empty if one does.
    """

    optimizer: str
    slots: int
    gpus: int
    microbatches: int
    link: float | None
    device: str
    memory: int
    margin: int
    plan: PipelinePlan | None = field(default=None, repr=False)
    reason: str = ""

    @property
    def fits(self) -> Fits:
        """Whether it fits, and whether stages recompute then."""
        if self.plan is None:
            return "no"
        return "planned" if any(stage.extra_time for stage in self.plan.stages) else "plain"

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types; of the plan, its stages, its time and its bubble."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "plan"}
        plan = self.plan
        stages = [] if plan is None else [_stage(each) for each in map(asdict, plan.stages)]
        return {
            **plain,
            "fits": self.fits,
            "stages": stages,
            "step_time": None if plan is None else plan.step_time,
            "bubble": None if plan is None else plan.bubble,
        }

    def __str__(self) -> str:
        room = f"{format_bytes(max(0, self.memory - self.margin))} of each {self.device}"
        lines = [
            f"a pipeline of {self.gpus} stages, {self.microbatches} microbatches; {self.optimizer} keeps "
            f"{self.slots} tensors for each parameter; the batch is one microbatch"
        ]
        if self.plan is None:
            return "\n".join([*lines, f"it does not fit {room}: {self.reason}"])
        how = "with recomputation" if self.fits == "planned" else "without recomputation"
        sent = "sending takes no time" if self.link is None else f"sending at {self.link / 1e9:g} GB/s"
        return "\n".join([*lines, f"it fits {how}, in {room}; {sent}", str(self.plan)])


def _stage(stage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stage.items() if name != "inputs"}


def fit_pipeline(
    made: SampleStep, devices: Devices, asked: Settings, *, optimizer: str, room: Room, show: bool
) -> PipelineFit:
    """Whether each device holds its stage.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.pipeline_plan`, but for a stage that does not fit.
    """
    settings = _stage_settings(asked)
    asked = asked.validated(need_limit=False)
    devices = with_known_link(devices, asked)
    needs = training_needs(made, optimizer, asked.spec)
    if room.memory <= room.margin:
        raise LimitError(f"memory={room.memory} with a margin of {room.margin} leaves nothing for training")
    found = PipelineFit(
        optimizer=optimizer,
        slots=_slots(made, needs),
        gpus=devices.gpus,
        microbatches=devices.microbatches,
        link=devices.link,
        **asdict(room),
    )
    try:
        plan = pipeline_plan(
            made.model,
            made.args,
            made.kwargs,
            stages=devices.gpus,
            microbatches=devices.microbatches,
            device_memory=room.memory - room.margin,
            optimizer_slots=found.slots,
            link=devices.link,
            layers=_container(made.model, asked),
            progress=show,
            **settings,
        )
    except InfeasibleLimitError as error:
        return replace(found, reason=str(error))
    return replace(found, plan=plan)


def _stage_settings(asked: Settings) -> dict[str, Any]:
    """The settings of stages; others that are given cannot be kept."""
    keys = PipelineSettings.__optional_keys__
    given = {each.name: getattr(asked, each.name) for each in fields(asked)}
    given["reserve"] = asked.reserve_bytes()
    changed = {each.name for each in fields(asked) if given[each.name] != each.default}
    if unknown := sorted(changed - keys - {"units"}):
        raise LimitError(f'{", ".join(unknown)} and shard="pp" cannot be combined: leave it out')
    return {name: given[name] for name in keys & changed}


def _slots(made: SampleStep, needs: TrainingNeeds) -> int:
    """Tensors of each trained parameter's size that the state comes to, rounded up."""
    trained = [each for each in made.model.parameters() if each.requires_grad]
    size = sum(each.numel() * each.element_size() for each in trained)
    return -(-max(0, needs.optimizer_state - COUNT * len(trained)) // max(1, size))


def _container(model: nn.Module, asked: Settings) -> str | None:
    """The container that ``units="layers.*"`` names, or that of layers that are alike; None: the longest."""
    if not asked.units:
        found = [each for each in containers_of_layers(model) if each]
        return found[0] if len(found) == 1 else None
    name, _, last = f".{asked.units[0]}".rpartition(".")
    if len(asked.units) > 1 or last != "*":
        raise LimitError(
            f'units={asked.units!r} and shard="pp": a pipeline is cut between the children of one container, '
            'units="layers.*" for one'
        )
    return name.removeprefix(".")
