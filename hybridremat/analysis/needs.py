"""What training takes on a device beside the step, and the formula that adds it all up."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.analysis.resident import resident_bytes, rounding
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.compiler.capture import model_device
from hybridremat.compiler.model_checks import require_trainable
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.runtime.optimizer_memory import optimizer_memory
from hybridremat.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class TrainingNeeds:
    """The fields of :class:`hybridremat.Fit` that do not depend on a plan, in bytes."""

    optimizer: str
    parameters: int
    buffers: int
    optimizer_state: int
    batch: int
    gradients: int
    optimizer_step: int
    early_gradients: bool = False

    @property
    def resident(self) -> int:
        """Bytes that stay from step to step."""
        return self.parameters + self.buffers + self.optimizer_state + self.batch

    def above(self, step: int) -> int:
        """The most bytes above what is resident, in a step of so many or in the optimizer's after it."""
        if self.early_gradients:  # the optimizer steps inside the backward
            return step + self.optimizer_step
        return max(step, self.gradients + self.optimizer_step)

    def formula(self, step: int, *, margin: int = 0, memory: int | None = None) -> str:
        """The sum, written out, for a step of so many bytes, on a device of ``memory`` bytes if given."""
        above = self.above(step)
        terms = {
            "parameters": self.parameters,
            "buffers": self.buffers,
            f"state of {self.optimizer}": self.optimizer_state,
            "batch": self.batch,
        }
        text = [f"{name} {format_bytes(size)}" for name, size in terms.items() if size]
        text.append(f"step {format_bytes(step)} ({self._inside()})")
        if above > step:
            text.append(f"the optimizer's own step {format_bytes(above - step)}")
        if margin:
            text.append(f"margin {format_bytes(margin)}")
        of = "" if memory is None else f" of {format_bytes(memory)}"
        return f"{' + '.join(text)} = {format_bytes(self.resident + above + margin)}{of}"

    def _inside(self) -> str:
        how = "leave in its backward" if self.early_gradients else "in it"
        return f"gradients {format_bytes(self.gradients)} {how}"


def training_needs(
    made: SampleStep, optimizer: str, spec: DeviceSpec | None = None, *, early_gradients: bool = False
) -> TrainingNeeds:
    """What training a model takes beside its step, here or on the device of ``spec``.

    Raises
    ------
    OptionsError
        If ``optimizer`` is none, or its step cannot be tried.
    ModelError
        If nothing has a gradient.
    """
    require_trainable(made.model, (made.args, made.kwargs))
    model, rounded = made.model, rounding(made.model, spec)
    device = model_device(model) if spec is None else "cuda"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = optimizer_memory(optimizer, trained, device=device, rounded=rounded, alone=early_gradients)
    parameters = resident_bytes(list(model.parameters()), rounded)
    return TrainingNeeds(
        optimizer=optimizer,
        parameters=parameters,
        buffers=resident_bytes([*model.parameters(), *model.buffers()], rounded) - parameters,
        optimizer_state=found.state,
        batch=resident_bytes((list(made.args), dict(made.kwargs)), rounded),
        gradients=sum(rounded(p.numel() * p.element_size()) for p in trained),
        optimizer_step=found.step,
        early_gradients=early_gradients,
    )
