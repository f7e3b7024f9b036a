"""``rotor``: each block saves all that its backward reads, or only its input, as is best under the limit.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory" (Inria RR-9302, 2019). A dynamic program over sub-chains and
memory finds the fastest *persistent* schedule: a checkpoint stays until the backward of its block. It is the
program of this chain (:mod:`hybridremat.sequence.dynamic_program`) with one option a block, which recomputes
nothing, and optimal among persistent schedules of these options in slots of memory, not in bytes.
"""

from __future__ import annotations

from typing import Final

from hybridremat.sequence.strategies.strategy import Strategy, fastest_option

ROTOR: Final = Strategy("rotor", fastest_option)
