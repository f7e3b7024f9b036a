"""What a stage keeps on its device beside its step: state, inputs, PyTorch's buffers of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.sequence.outside_memory import PhasePeaks
from hybridremat.sequence.pipeline.orders import PipelineShape


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage, of tensors for one microbatch where they are for one.

    Attributes
    ----------
    parameters
        Of all parameters and buffers.
    trained
        Of the parameters that are trained: also those of their gradients, and of each slot of the optimizer.
    received
        Of what the stage before sends: x.
    sent
        Of what goes to the stage behind: y; 0 for the last.
    given
        Of inputs of the model, and of the target of the loss.
    returned
        Of the model's outputs, of the last stage.
    loss_held
        Of what a loss outside the model holds for its backward.
    """

    parameters: int
    trained: int
    received: int = 0
    sent: int = 0
    given: int = 0
    returned: int = 0
    loss_held: int = 0

    def resident(self, shape: PipelineShape, forwards: int, slots: int) -> int:
        """Bytes that are there during the whole step, gradients apart.

        PyTorch allocates one buffer for each microbatch, of what is received (n·x) and of gradients that come
        back (n·y), and keeps the outputs of the last stage. Gradients that go to the stage before stay until
        they are sent: one set with 1F1B; all, and outputs as well, with interleaved 1F1B, which waits at
        its end for what it sent. With GPipe, which does so too, they come as what forwards hold goes
        (:meth:`peak`).
        """
        count = shape.microbatches
        unsent = {"1f1b": 1, "gpipe": 0, "interleaved1f1b": count}[shape.schedule]
        outputs = count - forwards if shape.schedule == "interleaved1f1b" else 0
        kept = (
            self.received * (count + unsent)
            + self.sent * (count + outputs)
            + self.given * count
            + self.returned * (count - forwards)
            + self.loss_held * (forwards - 1)
        )
        return self.parameters + slots * self.trained + kept

    def accumulated(self, shape: PipelineShape) -> int:
        """Bytes of gradients of earlier microbatches."""
        return self.trained if shape.microbatches > 1 else 0

    def beside_step(self, shape: PipelineShape, forwards: int) -> int:
        """Of these, what a plan for so many ``forwards`` does not count itself: it does for two and more."""
        return self.accumulated(shape) if forwards == 1 else 0

    def peak(self, step: PhasePeaks, held: int, shape: PipelineShape, forwards: int) -> int:
        """Most bytes above what is resident, for the phases of a step with other forwards in flight.

        ``held``: what each forward holds for its backward.
        """
        added = self.accumulated(shape)
        backward = step.backward + self.beside_step(shape, forwards)
        if shape.schedule == "gpipe":  # the last backward: nothing of the others is held but what they sent
            backward += (forwards - 1) * max(0, self.received + self.sent - held)
        return max(step.forward + added, step.between + added, backward)
