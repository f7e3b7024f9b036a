"""The public :class:`Fit`."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.analysis.fit_data import FitData
from hybridremat.analysis.fit_text import fit_text


@dataclass(frozen=True, kw_only=True)
class Fit(FitData):
    """What training takes on a device, and the limit to set; all but names in bytes.

    Attributes
    ----------
    optimizer
        As it was given.
    parameters, buffers, optimizer_state, batch
        What stays from step to step; tensors that share memory count once. ``resident`` is their sum.
    gradients
        Of all parameters that are trained: part of the step.
    optimizer_step
        The most that a step of the optimizer holds beside gradients and state.
    early_gradients
        Whether gradients leave in the backward (``gradients="in_backward"``).
    device, memory
        The device, and what it has for this process.
    margin
        Kept free for what the allocator and CUDA's libraries lose; 0 on CPU.
    plain_step, least_step
        Step memory without a plan and with the one of least memory; ``reserve`` and ``forwards`` included.
    reserve
        Of the step memory, what was asked to be kept for the caller's own code.
    memory_limit
        To be set: all that is left for the step. None if nothing fits.
    plan
        Of that limit. None if nothing fits, and where the plain step does.
    largest
        The largest batch, if a function that makes batches was given and batch 1 fits. Its limits and
        peaks include the bytes of the batch itself.
    """

    def __str__(self) -> str:
        return fit_text(self)
