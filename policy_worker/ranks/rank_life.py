"""Life that the ranks of a replica share, beside their collectives: the end of one, and of an
epoch, reaches all.

Two kinds: ranks that rank 0 has started on its host (``child_ranks``), and ranks that were started
on any hosts from outside (``rank_links``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RankLife(Protocol):
    """Of one rank. Until ``begin_end`` the end of another rank ends this process."""

    @property
    def follower_pids(self) -> Sequence[int]:
        """Process ids of the ranks from 1 on that run on rank 0's host and that it has started;
        known to rank 0."""

    @property
    def ended_epoch(self) -> int:
        """Newest epoch that a rank has ended, as far as this rank knows; 0 for none. Any thread,
        without blocking."""

    def end_epoch(self, epoch: int) -> None:
        """Epochs up to ``epoch`` are over for all ranks. Any thread, without blocking."""

    def begin_end(self) -> None:
        """From here on the other ranks may end."""

    def await_end(self) -> None:
        """After begin_end(). Rank 0: waits until the others have ended, at most 10 s. The others:
        say that they end."""


class AloneLife:
    """Of the only rank."""

    follower_pids: Sequence[int] = ()
    ended_epoch = 0

    def end_epoch(self, epoch: int) -> None:
        self.ended_epoch = max(self.ended_epoch, epoch)

    def begin_end(self) -> None:
        pass

    def await_end(self) -> None:
        pass
