"""What a judge knows of moves: how fast the link is that values leave by, and how much room there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hybridremat.compiler.offload.rates import measured_rates
from hybridremat.compiler.offload.targets import Target
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.planning.settings import Settings
from hybridremat.sequence.offload.link import Link

NOMINAL: Final = Link(8e9, 8e9)
"""Of the nominal device of ``cost_model="flops"``: a twenty-fifth of the rate of its memory."""

PLANNED: Final = 0.85
"""The share of the link's rates that is planned with: a link that is slower than planned costs more than one
that is faster wins."""


@dataclass(frozen=True)
class Moving:
    """Where values wait, the link they leave by, and the bytes that they may take there."""

    target: Target
    link: Link
    host_limit: int


def moving_of(settings: Settings, device: str, store: KernelStore) -> Moving:
    """How values move where the settings let them (``offload=``).

    Raises
    ------
    OffloadError
        If values of this kind of device cannot wait there.
    """
    assert settings.offload is not None
    target = Target.of(settings.offload)
    if settings.spec is None and device != "meta":
        target.require_usable(device)
    return Moving(target, _link(settings, target, device, store), settings.host_bytes())


def _link(settings: Settings, target: Target, device: str, store: KernelStore) -> Link:
    if settings.cost_model == "flops" or (settings.spec is None and device == "meta"):
        return NOMINAL
    if settings.spec is not None:
        return _of_spec(settings.spec)
    rates = measured_rates(target, device, store)
    return Link(PLANNED * rates.out, PLANNED * rates.back, rates.latency, rates.duplex)


def _of_spec(spec: DeviceSpec) -> Link:
    return Link(PLANNED * spec.host_out, PLANNED * spec.host_in, duplex=spec.duplex)
