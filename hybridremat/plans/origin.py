"""The record of what a plan is for (model, inputs, device), and how two records differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPEC_MARK = " (spec)"
"""Ends the device name of a plan that was made from a device spec."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor among the inputs of a step: its name in the call, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {'×'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


@dataclass(frozen=True)
class Origin:
    """What a plan is for.

    Attributes
    ----------
    model
        Name of the model's class.
    inputs
        The tensors that a step is called with.
    parameters, parameter_bytes
        How many numbers the model's parameters hold, and their bytes.
    device, device_name
        Kind of device, and what its figures depend on: name, instruction set, threads.
    hybridremat, torch
        Versions.
    """

    model: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    parameters: int = 0
    parameter_bytes: int = 0
    device: str = ""
    device_name: str = ""
    hybridremat: str = ""
    torch: str = ""

    @property
    def from_spec(self) -> bool:
        """Whether the figures were computed from a device spec."""
        return self.device_name.endswith(SPEC_MARK)


def origin_differences(planned: Origin, here: Origin) -> list[str]:
    """The differences of two records in words: model, inputs, parameters, device, versions."""
    found = []
    if planned.model != here.model:
        found.append(f"it is for {planned.model or 'another model'}, and this is {here.model}")
    if planned.inputs != here.inputs:
        found.append(f"it is for inputs {_listed(planned.inputs)}, and these are {_listed(here.inputs)}")
    if planned.parameters != here.parameters:
        found.append(f"it is for {planned.parameters:,} parameters, and this model has {here.parameters:,}")
    elif planned.parameter_bytes != here.parameter_bytes:
        found.append(
            f"its parameters take {planned.parameter_bytes:,} bytes, and these {here.parameter_bytes:,}"
        )
    for name in ("device", "torch", "hybridremat"):
        theirs, ours = getattr(planned, name), getattr(here, name)
        if theirs != ours:
            found.append(f"{name} was {theirs or 'unknown'}, and is {ours}")
    return found


def _listed(inputs: Sequence[TensorSpec]) -> str:
    return "(" + "; ".join(map(str, inputs)) + ")"
