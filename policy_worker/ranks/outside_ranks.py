"""Ranks of a replica that were started from outside, on one host or several: how they find one
another.

    rank 0: store at MASTER_ADDR:MASTER_PORT ──► the others connect ── hello ──► all there: "go"
                                                      │
                    another world, another run ◄──────┘  refused on both sides,
                                                         before anything is loaded

- A rank that ended before all were there may come again. After "go" nobody joins: the replica lives
  and dies as one (``rank_links``), and its ranks meet again as another replica.
- Nothing of the configuration is in the store, which has no password.
"""

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.config.changes import differences
from paceline.config.load import fleet_digest
from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.mesh.rendezvous import host_store
from paceline.process.structured_log import event, first_line
from paceline.process.torchrun_environment import TorchrunPlace
from paceline.process.waits import WaitKind, waiting
from paceline.rpc.addresses import address_towards, interface_of, is_loopback
from policy_worker.ranks.child_ranks import RankPlace
from policy_worker.ranks.rank_group import RankGroup, replica_errors
from policy_worker.ranks.rank_links import RankLinks
from policy_worker.rows.replica import ReplicaBroken

log = logging.getLogger(__name__)

JOIN_S = 300.0
HELLO_S = 5.0
AGAIN_S = 0.2
APART = "the replica's ranks did not come together: "
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class OutsideRank:
    """One rank that meets the others."""

    place: TorchrunPlace
    config: Config
    worker_id: str
    host: str
    join_s: float = JOIN_S

    def join(self, device_type: str) -> tuple[RankGroup, str]:
        """Meets the other ranks. Returns the group and the worker id of rank 0. Raises BadInput if
        they belong to another run or world, or if MASTER_ADDR cannot be used, and ReplicaBroken if
        they do not come."""
        place = self.place
        devices = torch.cuda.device_count() if device_type == "cuda" else 0
        if device_type == "cuda" and place.local_rank >= devices:
            raise BadInput(
                f"LOCAL_RANK={place.local_rank}, but this process sees {devices} CUDA devices: "
                "start at most one rank a device (torchrun --nproc-per-node), or show it all of "
                "them (CUDA_VISIBLE_DEVICES)"
            )
        deadline = time.monotonic() + self.join_s
        address = _own_address(place)
        meet = self._reach if place.rank else self._gather
        with replica_errors(APART), waiting(WaitKind.PEERS, "meeting the ranks of its replica"):
            store, links, identity, worker_id = meet(address, deadline)
        fleet = self.config.fleet
        life = RankLinks(links, beat_s=fleet.heartbeat_s, silence_s=fleet.lease_ttl_s)
        event(log, "ranks met", rank=place.rank, size=place.size, master=place.master)
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
        if not interface:
            raise BadInput(f"no interface of this host has {address}: set GLOO_SOCKET_IFNAME")
        own = RankPlace(
            rank=place.rank,
            size=place.size,
            identity=identity,
            device=device_type,
            interface=interface,
            host=self.host,
        )
        with replica_errors(APART):
            return RankGroup(own, store, life), worker_id

    # -- rank 0 -------------------------------------------------------------------------------

    def _gather(
        self, address: str, deadline: float
    ) -> tuple[dist.Store, dict[int, socket.socket], str, str]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        identity = secrets.token_hex(6)
        store = self._store(address, deadline)
        links: dict[int, socket.socket] = {}
        with socket.create_server((address, 0), family=family) as server:
            meeting = {"host": address, "port": server.getsockname()[1], "identity": identity}
            store.set("rank0", json.dumps(meeting))
            try:
                while missing := sorted(set(range(1, self.place.size)) - links.keys()):
                    server.settimeout(max(0.01, deadline - time.monotonic()))
                    try:
                        link, _ = server.accept()
                    except TimeoutError:
                        raise ReplicaBroken(
                            f"ranks {', '.join(map(str, missing))} did not come to "
                            f"{self.place.master}:{self.place.port} within {self.join_s:.0f} s: "
                            f"start all {self.place.size} ranks of the replica"
                        ) from None
                    self._admit(link, identity, links)
                for link in links.values():
                    _say(link, {"go": True})
            except BaseException:
                for link in links.values():
                    link.close()
                raise
        return store, links, identity, self.worker_id

    def _admit(self, link: socket.socket, identity: str, links: dict[int, socket.socket]) -> None:
        """Takes the rank at the other end, or refuses it."""
        hello = _hear(link, HELLO_S)
        rank = hello.get("rank")
        if hello.get("identity") != identity or not isinstance(rank, int):
            link.close()  # a stranger
            return
        why = self._contradiction(hello)
        taken = why == "" and rank in links and not _has_ended(links[rank])
        refused = f"another process is RANK={rank} already" if taken else why
        _say(link, {"refused": refused, "worker_id": self.worker_id})
        if why:
            link.close()
            raise BadInput(f"rank {rank} contradicts rank 0: {why}")
        if taken:
            link.close()
            return
        if rank in links:
            links[rank].close()
        links[rank] = link

    def _contradiction(self, hello: Mapping[str, object]) -> str:
        if hello.get("size") != self.place.size:
            return (
                f"WORLD_SIZE={hello.get('size')} there, {self.place.size} on rank 0: start all "
                "ranks of a replica with the same environment"
            )
        own, theirs = self.config.run.name, hello.get("run")
        if theirs != own:
            return f"run.name is {own!r} on rank 0, {theirs!r} there: use the same file everywhere"
        if not 0 < int(str(hello["rank"])) < self.place.size:
            return f"there is no RANK={hello['rank']} beside rank 0"
        canonical = fleet_digest(self.config)[1]
        if hello.get("config") != canonical:
            what = differences(canonical, str(hello.get("config")))
            return f"{what}. Start every rank with the same file and the same --set options"
        return ""

    # -- the others ---------------------------------------------------------------------------

    def _reach(
        self, address: str, deadline: float
    ) -> tuple[dist.Store, dict[int, socket.socket], str, str]:
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ReplicaBroken(
                    f"rank 0 did not take rank {self.place.rank} within {self.join_s:.0f} s at "
                    f"{self.place.master}:{self.place.port}: start all ranks together"
                )
            with contextlib.suppress(OSError, dist.DistError):
                store = self._store(address, deadline)
                store.set_timeout(timedelta(seconds=max(0.01, left_s)))
                meeting = json.loads(store.get("rank0"))
                if is_loopback(meeting["host"]) and not is_loopback(address):
                    raise BadInput(
                        f"MASTER_ADDR={self.place.master} is a loopback address on rank 0: set it "
                        "to one that means the same on every host"
                    )
                link = socket.create_connection((meeting["host"], meeting["port"]), timeout=HELLO_S)
                if worker_id := self._introduce(link, meeting["identity"], deadline):
                    return store, {0: link}, meeting["identity"], worker_id
                link.close()
            # Rank 0 is that of an earlier replica, which is about to end, or not there yet: its
            # launcher decides when.
            time.sleep(AGAIN_S)

    def _introduce(self, link: socket.socket, identity: str, deadline: float) -> str:
        """Worker id of rank 0 once all are there; empty if its replica is over. Raises BadInput."""
        hello = {
            "identity": identity,
            "rank": self.place.rank,
            "size": self.place.size,
            "run": self.config.run.name,
            "config": fleet_digest(self.config)[1],
        }
        _say(link, hello)
        answer = _hear(link, HELLO_S)
        if answer.get("refused"):
            raise BadInput(f"rank 0 refuses rank {self.place.rank}: {answer['refused']}")
        if not answer or not _hear(link, max(0.01, deadline - time.monotonic())):
            return ""
        return str(answer["worker_id"])

    def _store(self, address: str, deadline: float) -> dist.Store:
        place = self.place
        left = timedelta(seconds=max(0.01, deadline - time.monotonic()))
        serves = place.rank == 0 and not place.agent_store
        while True:
            try:
                if serves:
                    store = host_store(address, left, port=place.port)
                else:
                    store = dist.TCPStore(
                        place.master, place.port, None, is_master=False, timeout=left
                    )
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    raise ReplicaBroken(
                        f"rank 0 cannot listen on {place.master}:{place.port} ({error.strerror}): "
                        f"choose another MASTER_PORT"
                    ) from error
                # The rank 0 before this one may be stopped, and about to be killed.
                time.sleep(AGAIN_S)
        return dist.PrefixStore(f"paceline/{place.attempt}", store)


def _own_address(place: TorchrunPlace) -> str:
    try:
        if place.rank:
            return address_towards(place.master, place.port)
        found = socket.getaddrinfo(place.master, place.port, type=socket.SOCK_STREAM)
        family, _, _, _, (bound, *_) = found[0]
        address = str(bound)
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            why = "is no address of this host, but RANK=0"
        else:
            why = f"leads nowhere ({first_line(error)})"
        raise BadInput(
            f"MASTER_ADDR={place.master} {why}: set it to the address of rank 0's host"
        ) from error
    return address


def _say(link: socket.socket, message: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):  # it has ended: found out by the next read
        link.sendall(json.dumps(message).encode() + b"\n")


def _hear(link: socket.socket, limit_s: float) -> dict[str, object]:
    """The next line; empty if none comes in time, or if it is no JSON object."""
    line = bytearray()
    link.settimeout(limit_s)
    try:
        # Byte by byte: what follows the line belongs to the heartbeats.
        while not line.endswith(b"\n"):
            more = link.recv(1)
            if not more or len(line) > _LONGEST_LINE:
                return {}
            line += more
        found = json.loads(line)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_ended(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
