"""A wrap that all ranks of a process group make together: one talk, in rounds, until all are done.

In every round each rank says one thing: what it asks, that it is done, or that it failed. So no rank waits
for one that has failed: the first failure ends the talk on all of them, with the same error. Ranks that ask
with the same key form a circle; its first rank works for all of it. Ranks need not ask equally often, so
that models that differ (the stages of a pipeline) or inputs that do (a batch of each rank's own) are no
special case: each circle has its leader, and who is done says so until the others are.

What they say is text in JSON, and goes through the store of the process group. Collectives would not do.
The talk takes place while a graph is traced, and there gloo's all_gather hung in 3 of about 18 runs (torch
2.13, cause not found; never in 6,000 calls outside of tracing). NCCL's have a watchdog that ends the process
if a plan takes long.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Literal, TypeVar

from torch import distributed

from hybridremat import errors
from hybridremat.graph.private_torch import group_store

if TYPE_CHECKING:
    from hybridremat.graph.private_torch import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = timedelta(minutes=1)  # until a rank says that it waits for others to come
TIMEOUT = timedelta(hours=1)  # until it gives up; planning a large model may take long


@dataclass(frozen=True)
class _Message:
    """What a rank says in one round.

    Attributes
    ----------
    state
        Whether it asks, is done with its part, or has failed.
    key
        What it asks about; when it is done, what names its plan; when it failed, the type of the error.
    text
        What it has to say to its circle, or the error's message.
    figures
        Of an infeasible limit: the limit and the least feasible one, in bytes.
    """

    state: Literal["asks", "done", "failed"]
    key: str
    text: str = ""
    figures: tuple[int, int] | None = None


@dataclass(frozen=True)
class Circle:
    """Ranks with one question; ``texts`` is what each of them said, in the order of ranks."""

    texts: tuple[str, ...]
    members: tuple[int, ...] = (0,)
    ranks: Ranks | None = None

    def lead(self, make: Callable[[], T], write: Callable[[T], str], read: Callable[[str], T]) -> T:
        """What the first rank of the circle makes; the others read what it wrote.

        Raises
        ------
        HybridRematError
            Whatever making it raised, on all ranks.
        """
        if self.ranks is None:
            return make()
        leader = self.members[0]
        if self.ranks.rank == leader:
            made = make()
            self.ranks.hear(_Message("asks", "lead", write(made)))
            return made
        return read(self.ranks.hear(_Message("asks", "lead"))[leader].text)


class Ranks:
    """All ranks of the default process group, or this process alone.

    Rank 0 gathers what everybody says in a round, and writes it where everybody reads it.
    """

    def __init__(self, rank: int, size: int, store: Store | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._rounds = 0
        self._over = False

    def circle(self, key: str, text: str) -> Circle:
        """The ranks that ask with the same key now, and what each of them says."""
        if self.size == 1:
            return Circle((text,))
        heard = self.hear(_Message("asks", key, text))
        members = tuple(r for r, said in enumerate(heard) if (said.state, said.key) == ("asks", key))
        return Circle(tuple(heard[r].text for r in members), members, self)

    def hear(self, message: _Message) -> list[_Message]:
        """One round: what every rank says, by rank.

        Raises
        ------
        HybridRematError
            What the first rank that failed says.
        """
        texts = self._gathered(json.dumps(asdict(message)))
        heard = [_Message(**json.loads(text)) for text in texts]
        failed = next((rank for rank, said in enumerate(heard) if said.state == "failed"), None)
        if failed is not None:
            self._over = True
            raise _error(heard[failed], failed)
        return heard

    def finish(self, plan: str) -> None:
        """Wait until every rank is done, each with the plan of that name."""
        while self.size > 1:
            heard = self.hear(_Message("done", plan))
            if all(said.state == "done" for said in heard):
                self._over = True
                plans = {said.key for said in heard}
                if len(plans) > 1 and self.rank == 0:
                    logger.warning(_MANY_PLANS, self.size, len(plans))
                return

    def fail(self, error: Exception) -> None:
        """Let the other ranks know; nobody is told twice, nor after the process group itself failed."""
        if self.size == 1 or self._over:
            return
        figures = (error.limit, error.least) if isinstance(error, errors.InfeasibleLimitError) else None
        try:
            self.hear(_Message("failed", type(error).__name__, str(error), figures))
        except errors.HybridRematError:
            return  # all have been told; the caller raises its own error

    def _gathered(self, text: str) -> list[str]:
        store, number = self._store, self._rounds
        assert store is not None
        self._over = True  # should the store fail, there is nobody to tell
        try:
            store.set(f"{number}/{self.rank}", text)
            if self.rank == 0:
                texts = [self._read(store, f"{number}/{rank}") for rank in range(self.size)]
                store.set(f"{number}", json.dumps(texts))
                for rank in range(self.size):
                    store.delete_key(f"{number}/{rank}")
                store.delete_key(f"{number - 1}")  # everybody has read it, having said something since
            heard: list[str] = json.loads(self._read(store, f"{number}"))
        except RuntimeError as error:  # not every store has a type of its own for them
            raise errors.RankError(_BROKEN.format(error=error)) from error
        self._rounds, self._over = number + 1, False
        return heard

    def _read(self, store: Store, key: str) -> str:
        try:
            store.wait([key], PATIENCE)
        except RuntimeError:  # a store of files says that its time is over in no other type
            if self._rounds == 0:
                logger.warning(_WAITING, self.rank, PATIENCE.total_seconds())
            store.wait([key], TIMEOUT)
        text: bytes = store.get(key)
        return text.decode()


_WAITING = (
    "rank %d has waited for %.0f seconds in hybridremat.wrap for the other ranks to come. In a process group "
    "every rank has to wrap; pass across_ranks=False if this one wraps alone."
)
_BROKEN = (
    "the ranks could not talk in hybridremat.wrap, and this one has not wrapped the model: {error}. Every "
    "rank of the group has to wrap at the same point; pass across_ranks=False if this one wraps alone."
)
_MANY_PLANS = (
    "the %d ranks run %d different plans, for their models, sample inputs or requests differ. Each keeps its "
    "own limit; pass sample inputs of one shape on all ranks to have one plan, made once."
)


def _error(said: _Message, rank: int) -> errors.HybridRematError:
    text = f"{said.text} (Rank {rank} says so; no rank has wrapped the model.)"
    kind = getattr(errors, said.key, None)
    if kind is errors.InfeasibleLimitError and said.figures is not None:
        limit, least = said.figures
        return errors.InfeasibleLimitError(text, limit=limit, least=least)
    if isinstance(kind, type) and issubclass(kind, errors.HybridRematError):
        return kind(text)
    return errors.RankError(f"{said.key}: {text}")


def _all_ranks() -> Ranks:
    if not distributed.is_available() or not distributed.is_initialized():
        return ALONE
    store, size = group_store(f"hybridremat/{next(_TALKS)}"), distributed.get_world_size()
    if size == 1 or store is None:  # MPI has none
        return ALONE
    return Ranks(distributed.get_rank(), size, store)


@contextmanager
def together(across_ranks: bool) -> Iterator[Ranks]:
    """The ranks that take part; an exception inside ends the talk on all of them."""
    ranks = _all_ranks() if across_ranks else ALONE
    try:
        yield ranks
    except Exception as error:
        ranks.fail(error)
        raise


ALONE = Ranks(0, 1)
_TALKS = count()  # the same number on all ranks: each has taken part in as many
