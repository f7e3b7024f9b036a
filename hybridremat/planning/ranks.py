"""The rendezvous of all ranks of a process group that wrap a model, in rounds, until all are done.

In every round each rank sends one message: it asks, is done, or has failed. The first failure ends the
rendezvous on all ranks with the same error, so no rank waits for a failed one. Ranks that ask with the same
key form a group, whose first rank works for all of it. Ranks need not ask equally often (pipeline stages,
other batch shapes): one that is done says so in each round until all are.

Messages are JSON, and go through the store of the process group, not through collectives: messages are sent
while a graph is traced, where gloo's all_gather hung in 3 of about 18 runs (torch 2.13, cause not found;
never in 6,000 calls outside of tracing), and NCCL's watchdog ends the process if a plan takes long.
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
    """What a rank sends in one round.

    Attributes
    ----------
    state
        Whether it asks, is done with its part, or has failed.
    key
        What it asks about; the digest of its plan once it is done; the type of its error if it failed.
    text
        For the other ranks of its group, or the error's message.
    figures
        Of an infeasible limit: the limit and the least feasible one, in bytes.
    """

    state: Literal["asks", "done", "failed"]
    key: str
    text: str = ""
    figures: tuple[int, int] | None = None


@dataclass(frozen=True)
class RankGroup:
    """Ranks that ask with one key; ``texts`` is what each of them sent, in the order of ranks."""

    texts: tuple[str, ...]
    members: tuple[int, ...] = (0,)
    ranks: Ranks | None = None

    def from_leader(self, make: Callable[[], T], write: Callable[[T], str], read: Callable[[str], T]) -> T:
        """What the first rank of the group makes; the others read what it wrote.

        Raises
        ------
        HybridRematError
            Whatever making it raised, on all ranks.
        """
        if self.follows:
            return read(self.heard())
        made = make()
        self.tell(write(made))
        return made

    @property
    def follows(self) -> bool:
        """Whether another rank makes what this one reads."""
        return self.ranks is not None and self.ranks.rank != self.members[0]

    def heard(self) -> str:
        """What the first rank tells the others."""
        assert self.ranks is not None
        return self.ranks.exchange(_Message("asks", "lead"))[self.members[0]].text

    def tell(self, text: str) -> None:
        """Tell the others, as the first rank; nothing if this process is alone."""
        if self.ranks is not None:
            self.ranks.exchange(_Message("asks", "lead", text))


class Ranks:
    """All ranks of the default process group, or this process alone; rank 0 gathers each round's messages."""

    def __init__(self, rank: int, size: int, store: Store | None = None, call: str = "wrap") -> None:
        """``call``: the function of hybridremat that all ranks call."""
        self.rank, self.size, self._store, self._call = rank, size, store, call
        self._rounds = 0
        self._over = self._finished = False
        self._failure: tuple[_Message, int] | None = None

    @property
    def alone(self) -> bool:
        """Whether no other rank takes part (any more)."""
        return self.size == 1 or self._finished

    def group(self, key: str, text: str) -> RankGroup:
        """The ranks that ask with the same key now, and the text of each of them."""
        if self.alone:
            return RankGroup((text,))
        messages = self.exchange(_Message("asks", key, text))
        members = tuple(r for r, sent in enumerate(messages) if (sent.state, sent.key) == ("asks", key))
        return RankGroup(tuple(messages[r].text for r in members), members, self)

    def exchange(self, message: _Message) -> list[_Message]:
        """One round: the messages of all ranks, by rank.

        Raises
        ------
        HybridRematError
            That of the first rank that failed, also in each later round: who tries again there is alone.
        """
        messages = []
        if self._failure is None:
            texts = self._gathered(json.dumps(asdict(message)))
            messages = [_Message(**json.loads(text)) for text in texts]
            failed = ((sent, rank) for rank, sent in enumerate(messages) if sent.state == "failed")
            self._failure = next(failed, None)
        if self._failure is not None:
            self._over = True
            raise _error(*self._failure, self._call)
        return messages

    def finish(self, digest: Callable[[], str], *, one_plan: bool = False) -> None:
        """Wait until every rank is done; ``digest`` is that of this rank's plan. Each is then alone.

        Raises
        ------
        RankError
            If ranks have different plans, and ``one_plan`` is needed.
        """
        plan = "" if self.alone else digest()
        while not self.alone:
            messages = self.exchange(_Message("done", plan))
            if all(sent.state == "done" for sent in messages):
                self._over = self._finished = True
                self._store = None  # it must not outlive the process group
                plans = {sent.key for sent in messages}
                if len(plans) > 1 and one_plan:
                    raise errors.RankError(_NOT_ONE_PLAN.format(size=self.size, plans=len(plans)))
                if len(plans) > 1 and self.rank == 0:
                    logger.warning(_MANY_PLANS, self.size, len(plans))

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, once, and not after the process group itself failed."""
        if self.size == 1 or self._over:
            return
        figures = (error.limit, error.least) if isinstance(error, errors.InfeasibleLimitError) else None
        try:
            self.exchange(_Message("failed", type(error).__name__, str(error), figures))
        except errors.HybridRematError:
            return  # another rank failed as well; the caller raises its own error

    def _gathered(self, text: str) -> list[str]:
        store, number = self._store, self._rounds
        assert store is not None
        self._over = True  # if the store fails, no rank can be reached
        try:
            store.set(f"{number}/{self.rank}", text)
            if self.rank == 0:
                texts = [self._read(store, f"{number}/{rank}") for rank in range(self.size)]
                store.set(f"{number}", json.dumps(texts))
                for rank in range(self.size):
                    store.delete_key(f"{number}/{rank}")
                store.delete_key(f"{number - 1}")  # every rank has sent a message since, so has read it
            gathered: list[str] = json.loads(self._read(store, f"{number}"))
        except RuntimeError as error:  # not every store raises DistStoreError
            raise errors.RankError(_BROKEN.format(error=error, call=self._call)) from error
        self._rounds, self._over = number + 1, False
        return gathered

    def _read(self, store: Store, key: str) -> str:
        try:
            store.wait([key], PATIENCE)
        except RuntimeError:  # FileStore has no other type for a timeout
            if self._rounds == 0:
                logger.warning(_WAITING, self.rank, PATIENCE.total_seconds(), self._call, self._call)
            store.wait([key], TIMEOUT)
        text: bytes = store.get(key)
        return text.decode()


_WAITING = (
    "rank %d has waited for %.0f seconds in hybridremat.%s for the other ranks to come. In a process group "
    "every rank has to %s; pass across_ranks=False if this one does so alone."
)
_BROKEN = (
    "the ranks could not reach each other in hybridremat.{call}, and for this one nothing has changed: "
    "{error}. Every rank of the group has to {call} at the same point; pass across_ranks=False if this "
    "one does so alone."
)
_MANY_PLANS = (
    "the %d ranks run %d different plans: their models, sample inputs or requests differ. Each keeps its "
    "own limit; pass sample inputs of one shape on all ranks to have one plan, made once."
)
_NOT_ONE_PLAN = (
    'gathers="plan" needs one plan for all ranks, and the {size} ranks made {plans} different ones: their '
    "models, sample inputs or requests differ, or they hold unequal parts of a parameter (101 rows on 2 "
    "ranks), which makes their graphs differ. Nothing has changed. Give all of them sample inputs of one "
    "shape and equal parts (pad the parameter, or split another dimension of it), or leave "
    'gathers="keep".'
)


def _error(sent: _Message, rank: int, call: str) -> errors.HybridRematError:
    text = f"{sent.text} (Raised on rank {rank}; hybridremat.{call} has changed nothing on any rank.)"
    kind = getattr(errors, sent.key, None)
    if kind is errors.InfeasibleLimitError and sent.figures is not None:
        limit, least = sent.figures
        return errors.InfeasibleLimitError(text, limit=limit, least=least)
    if isinstance(kind, type) and issubclass(kind, errors.HybridRematError):
        return kind(text)
    return errors.RankError(f"{sent.key}: {text}")


def _all_ranks(call: str) -> Ranks:
    if not distributed.is_available() or not distributed.is_initialized():
        return ALONE
    store, size = group_store(f"hybridremat/{next(_NUMBERS)}"), distributed.get_world_size()
    if size == 1 or store is None:  # MPI has none
        return ALONE
    return Ranks(distributed.get_rank(), size, store, call)


@contextmanager
def rendezvous(across_ranks: bool, call: str = "wrap") -> Iterator[Ranks]:
    """The ranks that take part in a call; an exception inside is raised on all of them."""
    ranks = _all_ranks(call) if across_ranks else ALONE
    try:
        yield ranks
    except Exception as error:
        ranks.fail(error)
        raise


ALONE = Ranks(0, 1)
_NUMBERS = count()  # the same number on all ranks: each has taken part in as many
