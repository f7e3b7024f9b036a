"""Devices that a plan can be made for without having one: rates and memory, from their data sheets.

Peak rates are those of dense products, without sparsity. Kernels do not reach them: times are reckoned with
``ACHIEVABLE_FLOPS`` and ``ACHIEVABLE_BANDWIDTH`` of the peaks, assumed alike for all devices; small products
reach less. Plans depend on the ratios of times alone, and their memory does not depend on times.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.graph.costs import DeviceRates

ACHIEVABLE_FLOPS = 0.7
ACHIEVABLE_BANDWIDTH = 0.8

TERA, GIGA, GIBI = 1e12, 1e9, 1 << 30


@dataclass(frozen=True)
class DeviceSpec:
    """A device to plan for.

    Attributes
    ----------
    name
        What plans call it.
    fp32, tf32, bf16, fp16
        Peak flops in a second of dense matrix products, by the type of their inputs. ``tf32`` is what
        convolutions of float32 run in, ``fp32`` its other products: PyTorch's defaults on CUDA.
    bandwidth
        Peak bytes in a second from and to its memory.
    memory
        Bytes.
    allocation
        Sizes are rounded up to a multiple of this: 512 bytes in PyTorch's CUDA caching allocator.
    call_ns
        Nanoseconds that every kernel takes at least.
    """

    name: str
    fp32: float
    tf32: float
    bf16: float
    fp16: float
    bandwidth: float
    memory: int
    allocation: int = 512
    call_ns: float = 4_000

    def rates(self, dtype: str, *, convolution: bool = False) -> DeviceRates:
        """What it achieves in products of a type, named as torch names it."""
        by_type = {"bfloat16": self.bf16, "float16": self.fp16}
        peak = by_type.get(dtype, self.tf32 if convolution and dtype == "float32" else self.fp32)
        return DeviceRates(ACHIEVABLE_FLOPS * peak, ACHIEVABLE_BANDWIDTH * self.bandwidth, self.call_ns)

    def rounded(self, size: int) -> int:
        """Bytes that its allocator takes for ``size``."""
        return -(-size // self.allocation) * self.allocation


def _spec(name: str, *teraflops: float, bandwidth: float, memory: float) -> DeviceSpec:
    """Teraflops in the order of the fields; GB in a second; GiB (a card's "80 GB", less what is reserved)."""
    fp32, tf32, bf16, fp16 = (TERA * rate for rate in teraflops)
    return DeviceSpec(name, fp32, tf32, bf16, fp16, GIGA * bandwidth, int(GIBI * memory))


# NVIDIA's data sheets of H200 (2024; its 141 GB are 139.7 GiB with what is reserved), H100, A100 (40 and 80
# GB), L40S, L4, A10, V100 (SXM2) and T4; for the GeForce cards the whitepapers "Ada GPU Architecture" and
# "Ampere GA102 GPU Architecture" (products accumulated in float32). Where a sheet gives rates with sparsity,
# half of them stand here. Volta and Turing know no tf32 and bf16: both run at the rate of fp32 there.
_SPECS = (
    _spec("h200", 67, 494.7, 989.4, 989.4, bandwidth=4800, memory=139.7),
    _spec("h100", 67, 494.7, 989.4, 989.4, bandwidth=3350, memory=80),
    _spec("h100-pcie", 51, 378, 756, 756, bandwidth=2000, memory=80),
    _spec("a100-80g", 19.5, 156, 312, 312, bandwidth=2039, memory=80),
    _spec("a100-40g", 19.5, 156, 312, 312, bandwidth=1555, memory=40),
    _spec("l40s", 91.6, 183, 362, 362, bandwidth=864, memory=48),
    _spec("l4", 30.3, 60.5, 121, 121, bandwidth=300, memory=24),
    _spec("a10", 31.2, 62.5, 125, 125, bandwidth=600, memory=24),
    _spec("v100", 15.7, 15.7, 15.7, 125, bandwidth=900, memory=32),
    _spec("t4", 8.1, 8.1, 8.1, 65, bandwidth=300, memory=16),
    _spec("rtx4090", 82.6, 82.6, 165.2, 165.2, bandwidth=1008, memory=24),
    _spec("rtx3090", 35.6, 35.6, 71, 71, bandwidth=936, memory=24),
)

#: Known devices by name.
DEVICE_SPECS = {spec.name: spec for spec in _SPECS}
