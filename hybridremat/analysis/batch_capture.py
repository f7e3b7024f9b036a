"""One capture for the steps of all batches: the second batch is captured with symbols for what differs.

What a batch needs is then traced from that capture. Where a batch needs a graph of its own (one sample,
another model, more images than a capture with convolutions is right for) it is captured by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field

from hybridremat.analysis.sample_step import SampleStep
from hybridremat.compiler.backend import CaptureComplete
from hybridremat.compiler.dynamic_inputs import differing_dimensions, ties
from hybridremat.errors import HybridRematError
from hybridremat.graph.garbage import collected_seldom
from hybridremat.graph.private_joint import planning_state
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.input_keys import conditions, has_gaps, shapes_of
from hybridremat.planning.settings import Settings
from hybridremat.planning.sized_capture import SizedCapture, capture_sizes

logger = logging.getLogger(__name__)


@dataclass
class BatchCapture:
    """Traces steps of several batches from one capture.

    ``settings``: what is asked for, with ``dynamic``; ``failed``: why it cannot be done, if that is known.
    """

    settings: Settings
    failed: str = ""
    _first: SampleStep | None = None
    _capture: SizedCapture | None = None
    _model: Hashable = field(default=None)

    def traced(self, made: SampleStep) -> TracedStep | None:
        """The traced step of a batch; None if it is to be captured by itself."""
        if self.settings.dynamic is False or self.settings.one_capture_refused() or self.failed:
            return None
        if self._first is None:
            self._first, self._model = made, _described(made)
            return None
        if has_gaps(made.args, made.kwargs) or _described(made) != self._model:
            return None
        if self._capture is None:
            self._capture = self._captured(made)
        if self._capture is None or self._capture.partition.portfolio is None:
            return None
        sizes = self._capture.sizes_of(shapes_of(made.args, made.kwargs))
        if sizes is None:
            return None
        with planning_state(), collected_seldom():
            return self._capture.partition.portfolio.steps.at(sizes).traced

    def _captured(self, made: SampleStep) -> SizedCapture | None:
        """A capture with symbols for what differs from the first batch; ``failed`` says why there is none."""
        assert self._first is not None
        one, other = (self._first.args, self._first.kwargs), (made.args, made.kwargs)
        try:
            dimensions = differing_dimensions(one, other)
            if not dimensions or ties(other, one, dimensions):
                return None
            context = PlanContext.of(self.settings, build=False)
            found = capture_sizes(made.model, made.args, made.kwargs, dimensions, context, choose=_no_choice)
        except HybridRematError as error:
            self.failed = str(error)
            logger.info("each batch is captured by itself: %s", error)
            return None
        if found is None and all(min(shape or (2,), default=2) > 1 for shape in shapes_of(*other)):
            self.failed = "PyTorch makes numbers of its sizes"
        return found


def _no_choice(_: TracedStep) -> Chosen:
    """What is captured is not planned."""
    raise CaptureComplete


def _described(made: SampleStep) -> Hashable:
    """What of a model and its inputs has to be the same for one capture to be right for both."""
    shapes = shapes_of(made.args, made.kwargs)
    parameters = tuple(tuple(each.shape) for each in (*made.model.parameters(), *made.model.buffers()))
    ranks = tuple(shape if shape is None else len(shape) for shape in shapes)
    return conditions(made.model), parameters, ranks, type(made.model)
