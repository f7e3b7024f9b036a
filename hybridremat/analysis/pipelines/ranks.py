"""One plan of a pipeline for all ranks: the first makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import distributed

from hybridremat.errors import HybridRematError, RankError

T = TypeVar("T")


def on_first_rank(make: Callable[[], T], *, across_ranks: bool) -> T:
    """What the first rank of the default group makes; without a group or ``across_ranks`` it is made here.

    Raises
    ------
    HybridRematError
        What the first rank failed with, on all ranks; RankError if it is not one of ours.
    """
    if not across_ranks or not (distributed.is_available() and distributed.is_initialized()):
        return make()
    told: list[object] = [None]
    failure: BaseException | None = None
    if distributed.get_rank() == 0:
        try:
            told = [make()]
        except BaseException as error:  # noqa: BLE001 - the others wait
            failure = error
            told = [error if isinstance(error, HybridRematError) else RankError(f"rank 0 failed: {error!r}")]
    distributed.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    (found,) = told
    if isinstance(found, BaseException):
        raise found
    return found  # type: ignore[return-value]
