"""Over how many devices training is to be spread, and how: what :func:`hybridremat.fit` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeGuard

from hybridremat.errors import LimitError
from hybridremat.graph.costs.device_specs import LINKS
from hybridremat.planning.settings import Settings
from hybridremat.plans.fsdp import Fsdp
from hybridremat.units import require_count

Sharding = Literal["fsdp2", "tp", "pp"]
_WAYS: Final = {"fsdp2": "fully_shard", "tp": "tensor parallel", "pp": "a pipeline"}


@dataclass(frozen=True)
class Devices:
    """Devices for one training step.

    Attributes
    ----------
    gpus
        How many.
    shard
        How the step is spread over them.
    link
        Bytes in a second that a device sends to the next one; None if it is not known.
    microbatches
        Of a pipeline.
    """

    gpus: int
    shard: Sharding
    link: float | None = None
    microbatches: int = 0

    @property
    def tried(self) -> tuple[int, ...]:
        """Numbers of devices that are looked at: powers of two, and all."""
        powers = [1 << power for power in range(self.gpus.bit_length()) if 1 << power < self.gpus]
        return (*powers, self.gpus)

    def time(self, size: int) -> int | None:
        """Nanoseconds in which so many bytes are sent; None if the link is not known."""
        return None if self.link is None else round(size / self.link * 1e9)


def devices_asked(
    gpus: int | None, shard: str | None, link: float | None, microbatches: int | None, fsdp: int | Fsdp | None
) -> Devices | None:
    """The devices that a call names; None for the one that it runs on.

    Raises
    ------
    LimitError
        For numbers and names that make no sense, or not together.
    """
    if fsdp is not None and gpus is None and shard is None:
        gpus, shard = Fsdp.of(fsdp).ranks, "fsdp2"  # type: ignore[union-attr]
    ways = ", ".join(f'"{name}" ({what})' for name, what in _WAYS.items())
    if gpus is not None:
        require_count("gpus", gpus, "of devices that training is spread over")
    if gpus is None and shard is None:
        for name, given in (("link", link), ("microbatches", microbatches)):
            if given is not None:
                raise LimitError(f"{name}={given!r} is for several devices: give gpus=8, for one, and shard=")
        return None
    if gpus is None:
        raise LimitError(f"shard={shard!r} over how many devices? Give gpus=8, for one")
    if shard is None:
        raise LimitError(f"gpus={gpus!r}, and how is training spread over them? Give shard=: {ways}")
    if not _is_known(shard):
        raise LimitError(f"shard={shard!r} is not known; use {ways}")
    _require_together(gpus, shard, fsdp, microbatches)
    if link is not None and not (isinstance(link, int | float) and link > 0):
        raise LimitError(f"link={link!r} is no rate: give bytes in a second, 450e9 for one")
    if microbatches is not None:
        require_count("microbatches", microbatches, "of microbatches in a step")
    return Devices(gpus, shard, link, microbatches or 2 * gpus)


def _is_known(shard: str) -> TypeGuard[Sharding]:
    return shard in _WAYS


def _require_together(gpus: int, shard: str, fsdp: Any, microbatches: int | None) -> None:
    if fsdp is not None and shard != "fsdp2":
        raise LimitError(f'fsdp={fsdp!r} and shard={shard!r}: fsdp= goes with shard="fsdp2" alone')
    if fsdp is not None and Fsdp.of(fsdp).ranks != gpus:  # type: ignore[union-attr]
        raise LimitError(f"fsdp={fsdp} and gpus={gpus} name two numbers of ranks: give one of them")
    if microbatches is not None and shard != "pp":
        raise LimitError(f'microbatches={microbatches!r} and shard={shard!r}: they are for shard="pp" alone')


def with_known_link(devices: Devices, settings: Settings) -> Devices:
    """The devices with the link of the device spec, if none is given and that is known by name."""
    if devices.link is not None or settings.spec is None:
        return devices
    return replace(devices, link=LINKS.get(settings.spec.name))
