"""Ranks of a policy replica, as the computation of a step sees them.

``Replica`` is a replica of one rank: it has nobody to tell anything, or to wait for.
``ranks.rank_group.RankGroup`` is one of several, which live, agree and die together.
"""

import secrets
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.errors import UserError


class ReplicaBroken(UserError):
    """A rank of this replica is gone or does not answer; the process must exit."""


class Replica:
    """A replica of one rank."""

    rank = 0
    size = 1
    host = ""
    """Address of this rank for those of other replicas; empty: the one of rank 0."""
    store: Any = None
    """Key-value store that the ranks share, for background threads; None for one rank."""
    mesh: Any = None
    """One-dimensional DeviceMesh over the ranks; None for one rank."""
    follower_pids: Sequence[int] = ()
    """Process ids of the ranks that rank 0 has started; known to rank 0."""

    def __init__(self) -> None:
        self.identity = secrets.token_hex(6)
        """Random name, equal on all ranks, different for every replica ever started."""
        self._ended_epoch = 0

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def announce(self, operation: str, **arguments: Any) -> None:
        """Rank 0: hands an operation and its JSON arguments to the other ranks. No effect there."""

    def agree(self, ok: bool) -> bool:
        """Collective. True on every rank if ``ok`` was true on every rank."""
        return ok

    def gather(self, value: Any) -> list[Any]:
        """Collective. Every rank's JSON value, in rank order, on every rank."""
        return [value]

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Collective. Adds ``tensor``, on the replica's device, up over ranks, in place."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Collective. [n] of every rank, on the replica's device, as [ranks, n] on every rank."""
        return tensor[None]

    def end_epoch(self, epoch: int) -> None:
        """Any rank, any thread, without blocking: mesh epochs up to ``epoch`` are over for all."""
        self._ended_epoch = max(self._ended_epoch, epoch)

    def epoch_over(self, epoch: int) -> bool:
        """Any rank, any thread, without blocking: whether a rank has ended ``epoch``."""
        return self._ended_epoch >= epoch

    def given_up(self, why: str) -> ReplicaBroken:
        """An error of this rank in the middle of a collective, to be raised until the process ends.
        Nothing is announced any more: the other ranks would not hear it."""
        return ReplicaBroken(f"rank {self.rank} of {self.size} ends its replica: {why}")

    def close(self) -> None:
        """Rank 0: has the other ranks exit with 0, and waits for them."""
