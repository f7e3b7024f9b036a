"""Will it fit several devices that tensor parallel spreads it over: the traced step of one rank.

The model is parallelized on a process group whose collectives do nothing, and its step captured with the
local shapes of the first rank; nothing is taken from formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hybridremat.analysis.batch_steps import BatchStep
from hybridremat.analysis.fit_devices import Devices, with_known_link
from hybridremat.analysis.fit_planned import planned
from hybridremat.analysis.fit_sharded import RoomFor, ShardedFit, row, without_plan
from hybridremat.analysis.fit_traffic import sent_in_graphs
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.analysis.sharded_needs import local_needs
from hybridremat.compiler.tensor_parallel import parallelized, tensor_plan, why_not_split
from hybridremat.errors import ModelError
from hybridremat.planning.settings import Settings


def fit_tensors(
    made: SampleStep, devices: Devices, asked: Settings, *, optimizer: str, room: RoomFor, show: bool
) -> ShardedFit:
    """Whether one of the devices is enough for its share.

    Raises
    ------
    ModelError
        If the model brings no tensor parallel plan, or cannot be split so, or a process group is up.
    HybridRematError
        As :func:`hybridremat.fit`.
    """
    asked = asked.validated(need_limit=False)
    devices, plan = with_known_link(devices, asked), tensor_plan(made.model)
    if why := why_not_split(made.model, plan, devices.gpus):
        raise ModelError(f"gpus={devices.gpus}: {why}. Give another number of devices")
    found, table = None, []
    for gpus in (each for each in devices.tried if not why_not_split(made.model, plan, each)):
        with _one_rank(made, plan, gpus, on_paper=asked.spec is not None) as local:
            needs = local_needs(local, optimizer, asked.spec)
            step = BatchStep.captured(local, asked, show=show)
            frontier = step.frontier(reuse=False, show=show)
            found = without_plan(needs, room, step.plain_need(), step.plain_time, devices, asked)
            found = planned(found, frontier, asked, step.context.origin)
            table.append(row(found, gpus, sent_in_graphs(step.traced, gpus), devices))
    assert found is not None, "all of them are tried last"
    return replace(found, table=tuple(table))


@contextmanager
def _one_rank(
    made: SampleStep, plan: dict[str, str], gpus: int, *, on_paper: bool
) -> Iterator[SampleStep]:
    """The model as one rank has it; on one device it is whole."""
    if gpus == 1:
        yield made
        return
    with parallelized(made.model, plan, gpus, on_paper=on_paper) as model:
        yield replace(made, model=model)
