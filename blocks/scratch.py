"""Arrays of changing shapes in memory that is taken once."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Scratch:
    """Memory by name: the array of a name is written over by the next one of that name.

    Large arrays that numpy makes anew come from fresh pages each time, and to fault those in takes as long as
    the arithmetic on them.
    """

    def __init__(self) -> None:
        self._memory: dict[Hashable, NDArray[np.uint8]] = {}

    def array(self, name: Hashable, shape: tuple[int, ...], kind: type[np.generic]) -> NDArray[Any]:
        """An array of any content."""
        size = prod(shape) * np.dtype(kind).itemsize
        memory = self._memory.get(name)
        if memory is None or len(memory) < size:
            memory = self._memory[name] = np.empty(size, np.uint8)
        return memory[:size].view(kind).reshape(shape)
