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
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.process.structured_log import event

log = logging.getLogger(__name__)

END_S = 10.0
ALIVE, FAREWELL = b".", b"x"
_MESSAGE = struct.Struct("!cq")
_READ_BYTES = 4096


@dataclass(eq=False)
class _Peer:
    rank: int
    link: socket.socket
    heard: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    unsent: bytes = b""
    left: bool = False
    open: bool = True


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
        which a silent rank counts as lost. ``lost`` is called once, on the thread of the links;
        default: this process ends at once. Other threads may wait in a collective for ever."""
        self._peers = [_Peer(rank, link) for rank, link in links.items()]
        self._leads = 0 not in links
        self._beat_s, self._silence_s, self._lost = beat_s, silence_s, lost
        self._epoch = 0
        self._lock = threading.Lock()
        self._farewell = False
        self._may_end = threading.Event()
        self._all_left = threading.Event()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken, *links.values()):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="rank-links", daemon=True)
        self._thread.start()

    @property
    def ended_epoch(self) -> int:
        """Newest epoch that a rank has ended, as far as known; 0 for none. Any thread."""
        return self._epoch

    def end_epoch(self, epoch: int) -> None:
        """Epochs up to ``epoch`` are over for all ranks. Any thread, without blocking."""
        with self._lock:
            if epoch <= self._epoch:
                return
            self._epoch = epoch
        self._poke()

    def begin_end(self) -> None:
        """From here on the other ranks may end."""
        self._may_end.set()

    def await_end(self) -> None:
        """After begin_end(). Rank 0: waits until the others have said that they end, at most 10 s.
        The others: say it."""
        if self._leads:
            self._all_left.wait(END_S)
        self._farewell = True
        self._poke()
        if not self._leads:
            self._all_left.wait(END_S)
        self._thread.join(END_S)

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already
            self._wake.send(b"!")

    # -- on the thread of the links -----------------------------------------------------------

    def _run(self) -> None:
        lost: RankLost | None = None
        try:
            self._serve()
        except RankLost as error:
            lost = error
        for peer in self._peers:
            peer.link.close()
        self._all_left.set()
        if lost is not None:
            event(log, "rank lost, replica ends", logging.ERROR, why=lost)
            self._lost(lost)

    def _serve(self) -> None:
        """Until all ranks have left. Raises RankLost."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._woken, selectors.EVENT_READ)
            for peer in self._peers:
                ready.register(peer.link, selectors.EVENT_READ, peer)
            beat = 0.0
            while any(peer.open for peer in self._peers):
                for key, _ in ready.select(max(0.0, beat - time.monotonic())):
                    if key.data is None:
                        self._woken.recv(_READ_BYTES)
                        beat = 0.0
                        continue
                    self._read(key.data)
                    if not key.data.open:
                        ready.unregister(key.data.link)
                now = time.monotonic()
                for peer in self._peers:
                    expected = peer.open and not peer.left and not self._may_end.is_set()
                    if expected and now - peer.heard > self._silence_s:
                        raise RankLost(peer.rank, f"no message for {now - peer.heard:.1f} s")
                if now >= beat:
                    beat = now + self._beat_s
                    self._send_all()
                if self._leads and all(p.left or not p.open for p in self._peers):
                    return
                if self._farewell and not any(p.unsent for p in self._peers if p.open):
                    return

    def _read(self, peer: _Peer) -> None:
        """Reads what has arrived."""
        try:
            data = peer.link.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._closed(peer, str(error))
            return
        if not data:
            self._closed(peer, "its link has closed")
            return
        peer.heard = time.monotonic()
        data = peer.unread + data
        whole = len(data) - len(data) % _MESSAGE.size
        peer.unread = data[whole:]
        for kind, epoch in _MESSAGE.iter_unpack(data[:whole]):
            if kind not in (ALIVE, FAREWELL):
                self._closed(peer, "it speaks another protocol")
                return
            peer.left = peer.left or kind == FAREWELL
            self.end_epoch(epoch)

    def _closed(self, peer: _Peer, why: str) -> None:
        peer.open = False
        if not peer.left and not self._may_end.is_set():
            raise RankLost(peer.rank, why)

    def _send_all(self) -> None:
        message = _MESSAGE.pack(FAREWELL if self._farewell else ALIVE, self._epoch)
        for peer in self._peers:
            if not peer.open:
                continue
            # One whole message at most waits behind the rest of another: a peer that reads nothing
            # costs no memory.
            if len(peer.unsent) <= _MESSAGE.size:
                peer.unsent += message
            try:
                peer.unsent = peer.unsent[peer.link.send(peer.unsent) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self._closed(peer, str(error))
