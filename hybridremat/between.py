"""Memory of the code that runs between the graphs of a step, op by op under plain autograd.

It is in no graph, so it is measured: the forward runs once more as a :class:`~hybridremat.survey.Survey` left
it, with what the graphs hand on kept alive, as in training. What happens between two graphs then shows in
the allocation records; a backward through just that code, with gradients of ones, shows the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridremat.graph.private_torch import tree_leaves
from hybridremat.graph.windows import Windows
from hybridremat.sequence.parts import Part, PartPoint


@dataclass
class Recorder:
    """Told when a graph of the step starts and ends, while the forward runs.

    ``results[k]`` are what the code before graph k handed to it under autograd; the last are the outputs.
    """

    windows: Windows
    results: list[list[torch.Tensor]] = field(default_factory=list)
    held: list[object] = field(default_factory=list)

    def begin(self) -> None:
        """The forward starts."""
        self.windows.open("forward 0")

    def enter(self, args: Sequence[object]) -> None:
        """A graph starts, or the model returns."""
        self.windows.close()
        self.results.append([a for a in args if isinstance(a, torch.Tensor) and a.grad_fn is not None])
        self.held.append(args)

    def leave(self, outputs: Sequence[object]) -> None:
        """A graph ends."""
        self.held.append(outputs)
        self.windows.open(f"forward {len(self.results)}")

    def backward(self) -> None:
        """Go backward through the code before each graph, the last first."""
        for index in reversed(range(len(self.results))):
            results = self.results[index]
            if results:
                ones = [torch.ones_like(result) for result in results]
                self.windows.open(f"backward {index}")
                torch.autograd.backward(results, ones, retain_graph=True)
                self.windows.close()


def measure_between(recorder: Recorder, forward: Callable[[], Any]) -> list[Part | None]:
    """The code before each graph and after the last one, as parts with one point; None where nothing is.

    Parameters
    ----------
    forward
        Runs the surveyed forward and returns the model's output.
    """

    def run() -> None:
        recorder.begin()
        recorder.enter(tree_leaves(forward()))
        recorder.backward()

    recorder.windows.record(run)
    figures = recorder.windows.figures
    parts: list[Part | None] = []
    for index in range(len(recorder.results)):
        forward_peak, saved = figures[f"forward {index}"]
        above, gradients = figures.get(f"backward {index}", (0, 0))
        saved = max(0, saved)
        point = PartPoint(forward_peak, saved + above, saved, time=0)
        nothing = not (forward_peak or saved or above)
        parts.append(None if nothing else Part((point,), max(0, gradients)))
    return parts
