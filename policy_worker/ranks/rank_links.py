"""Links between rank 0 and every other rank of a replica, on one host or several: heartbeats, ends
of epochs, farewells.

    rank 0 ──"." or "x", newest ended epoch──► each other rank
           ◄────────────────────────────────   every beat, and at once when an epoch ends

- A link that closes without a farewell ("x"), or on which nothing came for the detection time, ends
  this process. So a rank that is killed, stopped or cut off ends all: rank 0 notices it, and its
  own end closes the other links. Children of rank 0 have no detection time: a stopped one ends
  nothing, and none of them outlives rank 0 (``child_ranks``).
- What has arrived is read before silence is judged: a process that stood still does not blame its
  peers for it.
- A stopped process ends itself when it goes on: its links are closed by then.
"""

import contextlib
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

from paceline.process.structured_log import event

log = logging.getLogger(__name__)

END_S = 10.0
ALIVE, FAREWELL = b".", b"x"
_MESSAGE = struct.Struct("!cq")


class RankLost(Exception):
    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank


class RankLinks:
    """The ranks' common life. Until ``begin_end`` the end of another ends this process."""

    def __init__(
        self,
        links: Mapping[int, socket.socket],
        *,
        beat_s: float,
        silence_s: float,
        lost: Callable[[RankLost], None] = lambda _: os._exit(1),
    ) -> None:
        """``links``: connected sockets by the rank at the other end. ``silence_s``: the time after
        which a silent rank counts as lost. ``lost`` is called once, on a thread of the links;
        default: this process ends at once. Other threads may wait in a collective for ever."""
        self._links, self._beat_s, self._lost = dict(links), beat_s, lost
        self._changed = threading.Condition()
        """Guards what follows."""
        self._epoch = 0
        self._may_end = self._farewell = self._over = False
        self._left = set[int]()
        for link in links.values():
            link.settimeout(silence_s if silence_s < math.inf else None)
        self._beats = threading.Thread(target=self._beat, name="rank-links", daemon=True)
        self._beats.start()
        for each in links.items():
            threading.Thread(target=self._hear, args=each, name="rank-link", daemon=True).start()

    @property
    def ended_epoch(self) -> int:
        """Newest epoch that a rank has ended, as far as known; 0 for none. Any thread."""
        return self._epoch

    def end_epoch(self, epoch: int) -> None:
        """Epochs up to ``epoch`` are over for all ranks. Any thread, without blocking."""
        with self._changed:
            if epoch > self._epoch:
                self._epoch = epoch
                self._changed.notify_all()

    def begin_end(self) -> None:
        """From here on the other ranks may end."""
        self._may_end = True

    def await_end(self) -> None:
        """After begin_end(). Rank 0: waits until the others have said that they end, at most 10 s.
        The others: say it."""
        with self._changed:
            if 0 not in self._links:
                self._changed.wait_for(lambda: self._left == self._links.keys(), END_S)
            self._farewell = True
            self._changed.notify_all()
        self._beats.join(END_S)
        self._close()

    # -- on threads of the links --------------------------------------------------------------

    def _beat(self) -> None:
        """Until the farewell is said."""
        while not self._over:
            sent = self._message()
            for link in self._links.values():
                with contextlib.suppress(OSError):  # who hears it, finds out
                    link.sendall(sent)
            if sent.startswith(FAREWELL):
                return
            with self._changed:
                self._changed.wait_for(lambda: self._message() != sent or self._over, self._beat_s)  # noqa: B023

    def _message(self) -> bytes:
        return _MESSAGE.pack(FAREWELL if self._farewell else ALIVE, self._epoch)

    def _hear(self, rank: int, link: socket.socket) -> None:
        """Until the rank has said farewell, or is lost."""
        kind, why, heard = ALIVE, "its link has closed", time.monotonic()
        try:
            with link.makefile("rb") as messages:
                while kind == ALIVE and len(raw := messages.read(_MESSAGE.size)) == _MESSAGE.size:
                    kind, epoch = _MESSAGE.unpack(raw)
                    if kind in (ALIVE, FAREWELL):
                        self.end_epoch(epoch)
                    else:
                        why = "it speaks another protocol"
                    heard = time.monotonic()
        except TimeoutError:
            why = f"no message for {time.monotonic() - heard:.1f} s"
        except (OSError, ValueError) as error:
            why = str(error)
        with self._changed:
            lost = kind != FAREWELL and not (self._may_end or self._over)
            self._over = self._over or lost
            self._left.add(rank)
            self._changed.notify_all()
        if lost:
            self._close()
            event(log, "rank lost, replica ends", logging.ERROR, why=RankLost(rank, why))
            self._lost(RankLost(rank, why))

    def _close(self) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
