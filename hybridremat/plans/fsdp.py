"""How ``torch.distributed.fsdp.fully_shard`` is going to shard a model whose units are planned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hybridremat.errors import LimitError
from hybridremat.units import require_count


@dataclass(frozen=True)
class Fsdp:
    """What ``fully_shard`` of each unit, and then of the model, is called with.

    Attributes
    ----------
    ranks
        How many ranks parameters are split among: the size of the mesh.
    param_dtype, reduce_dtype, output_dtype
        Those of a ``MixedPrecisionPolicy``, as ``torch.bfloat16`` or ``"bfloat16"``; None for those of the
        parameters, of the gradients, and of what modules return.
    reshard_after_forward
        Of the units: whether their parameters are freed between forward and backward.
    tail
        Names of the units that are one group, which stays gathered between forward and backward:
        ``fully_shard([norm, head], reshard_after_forward=False)``.
    """

    ranks: int
    param_dtype: Any = None
    reduce_dtype: Any = None
    reshard_after_forward: bool = True
    output_dtype: Any = None
    tail: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _DTYPES:
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else str(given).removeprefix("torch."))
        tail: Any = self.tail  # as a caller writes it
        several = isinstance(tail, Iterable) and not isinstance(tail, (str, bytes))
        object.__setattr__(self, "tail", tuple(tail) if several else (tail,))

    @staticmethod
    def of(given: int | Fsdp | None) -> Fsdp | None:
        """The record of ``fsdp=``; None where nothing is sharded."""
        if given is None or isinstance(given, Fsdp):
            return given
        return Fsdp(given)

    def validated(self) -> Fsdp:
        """The same record.

        Raises
        ------
        LimitError
            For what ``fully_shard`` does not take.
        """
        require_count("fsdp", self.ranks, "of ranks that fully_shard splits parameters among")
        for name in _DTYPES:
            if (given := getattr(self, name)) not in (None, *_FLOATS):
                raise LimitError(
                    f"fsdp: {name}={given!r} is no dtype that FSDP2 casts to; use "
                    f"{' or '.join(map(repr, _FLOATS))}, or None"
                )
        if self.reshard_after_forward not in (True, False):
            raise LimitError(
                f"fsdp: reshard_after_forward={self.reshard_after_forward!r} is neither True nor False"
            )
        if not all(isinstance(each, str) and each for each in self.tail):
            raise LimitError(f'fsdp: tail={self.tail!r} are no names of units; pass tail=("norm", "head")')
        return self

    def __str__(self) -> str:
        """As it is written."""
        more = [
            f"{name}={value!r}"
            for name, value, usual in (
                ("param_dtype", self.param_dtype, None),
                ("reduce_dtype", self.reduce_dtype, None),
                ("reshard_after_forward", self.reshard_after_forward, True),
                ("output_dtype", self.output_dtype, None),
                ("tail", self.tail, ()),
            )
            if value != usual
        ]
        return f"Fsdp({', '.join([str(self.ranks), *more])})" if more else str(self.ranks)


_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")
_FLOATS = ("bfloat16", "float16", "float32", "float64")
