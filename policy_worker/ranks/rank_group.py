"""Rank group of one policy replica: the ranks live, agree and die as one.

    controller ◄──► rank 0 (the worker)               ranks 1..n-1
                      │   operations (JSON, gloo)  ──►  executed in order
                      │   agree / gather         ◄──► the result of every rank
                      └── "epoch n is over" (links) ◄──► read between slices of a collective

- Only rank 0 talks to the controller. The others execute the operations that it announces.
- A rank that dies ends the replica (``rank_links``). Half a replica holds half the parameters:
  nothing it could still do would be right.
- Rank 0 starts the others on its host (``start_ranks``), where channels bind to loopback; or all
  are started from outside, on any hosts (``outside_ranks``). Nothing here is pickled.
"""

import contextlib
import functools
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.mesh import severable_sockets
from paceline.mesh.rendezvous import host_store
from paceline.process.structured_log import first_line
from paceline.user_code import python_module
from policy_worker.ranks.child_ranks import (
    RANK_SETTINGS,
    RankPlace,
    RankSettings,
    die_with_parent,
)
from policy_worker.ranks.rank_links import END_S, RankLinks, RankLost
from policy_worker.rows.replica import Replica, ReplicaBroken

FOREVER = timedelta(days=365)
"""Between two commands lies however long the rollouts take. Death is noticed by other means."""
STOP = "stop"
"""Announced in place of an operation: the process exits."""
CHILD_BEAT_S = 60.0
"""Nobody needs to hear of children: rank 0 waits for the end of each, and one that is stopped is
reported by rank 0 (``StuckRanks``)."""
Child = subprocess.Popen[bytes]


class RankGroup(Replica):
    """The ranks of a replica of several."""

    mesh: DeviceMesh

    def __init__(
        self,
        place: RankPlace,
        store: dist.Store,
        life: RankLinks,
        children: Sequence[Child] = (),
    ) -> None:
        super().__init__()
        self.rank, self.size = place.rank, place.size
        self.identity, self.host = place.identity, place.host
        self.store = store
        self.follower_pids = [child.pid for child in children]
        self._life, self._children = life, children
        self._closing = threading.Event()
        self._given_up = False
        before = severable_sockets.listeners()
        with _gloo_interface(place.interface):
            backend = "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo"
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"world/{place.identity}", store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(minutes=30),
            )
            # A group of its own, so that waiting for a command has no time limit while a
            # collective over parameters keeps one.
            self._control = dist.new_group(backend="gloo", timeout=FOREVER)
            self.mesh = dist.init_device_mesh(place.device, (self.size,), mesh_dim_names=("shard",))
        severable_sockets.admit_no_more(severable_sockets.listeners().keys() - before.keys())

    def announce(self, operation: str, **arguments: Any) -> None:
        if self.leads and not self._given_up:
            self.broadcast_bytes(json.dumps([operation, arguments]).encode())

    def next_operation(self) -> tuple[str, dict[str, Any]]:
        """Ranks above 0: blocks until rank 0 announces the next operation."""
        operation, arguments = json.loads(self.broadcast_bytes(None))
        return operation, arguments

    def agree(self, ok: bool) -> bool:
        flag = torch.tensor([int(ok)], dtype=torch.int32)
        with replica_errors():
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._control)
        return bool(flag.item())

    def gather(self, value: Any) -> list[Any]:
        data = json.dumps(value).encode()
        return [json.loads(self.broadcast_bytes(data, rank)) for rank in range(self.size)]

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Collective. The bytes of rank ``source``, on every rank."""
        mine = bytearray(data or b"") if self.rank == source else bytearray()
        size = torch.tensor([len(mine)])
        with replica_errors():
            dist.broadcast(size, source, group=self._control)
            if not int(size):
                return b""
            buffer = torch.frombuffer(mine or bytearray(int(size)), dtype=torch.uint8)
            dist.broadcast(buffer, source, group=self._control)
        return bytes(buffer.numpy().tobytes())

    def all_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        with replica_errors():
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.new_empty(self.size * len(tensor))
        with replica_errors():
            dist.all_gather_single(found, tensor)
        return found.view(self.size, -1)

    def end_epoch(self, epoch: int) -> None:
        self._life.end_epoch(epoch)

    def epoch_over(self, epoch: int) -> bool:
        return self._life.ended_epoch >= epoch

    def given_up(self, why: str) -> ReplicaBroken:
        self._given_up = True
        return super().given_up(why)

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._life.begin_end()
        if self.leads:
            with contextlib.suppress(ReplicaBroken):
                self.announce(STOP)
            self._life.await_end()
        if dist.is_initialized():
            dist.destroy_process_group()
        if not self.leads:
            self._life.await_end()
        for child in self._children:
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def start_ranks(
    size: int,
    *,
    config_json: str = "{}",
    threads: int = 1,
    device_type: str = "cpu",
    worker: Sequence[str] = ("policy_worker",),
) -> Replica:
    """Starts a replica of ``size`` ranks with the caller as rank 0; call it from the main thread.
    ``config_json`` reaches the other ranks as ``join_ranks()``'s second result. ``worker`` is the
    module they run (``python -m``), with its arguments. ``threads`` limits each one's CPU threads.
    Returns once every rank has joined. Raises ReplicaBroken if that fails."""
    if size == 1:
        return Replica()
    if device_type == "cuda" and torch.cuda.device_count() < size:
        raise ReplicaBroken(
            f"fleet.policy_ranks = {size}, but this process sees {torch.cuda.device_count()} CUDA "
            "devices: a rank needs one of its own"
        )
    if threading.current_thread() is not threading.main_thread():
        # PR_SET_PDEATHSIG fires when the *thread* that spawned the child ends.
        raise RuntimeError("a replica must be started from the main thread")
    store = host_store("127.0.0.1", timedelta(minutes=5))
    settings = RankSettings(
        rank=0,
        size=size,
        identity=secrets.token_hex(6),
        port=store.port,
        parent=os.getpid(),
        link=-1,
        device=device_type,
        threads=threads,
        config=config_json,
    )
    children, links = dict[int, Child](), dict[int, socket.socket]()
    for rank in range(1, size):
        links[rank], theirs = socket.socketpair()
        given = replace(settings, rank=rank, link=theirs.fileno())
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            RANK_SETTINGS: json.dumps(asdict(given)),
        }
        with theirs:
            children[rank] = subprocess.Popen(
                [*python_module(worker[0]), *worker[1:]],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
    lost = functools.partial(_end_with_child, children)
    life = RankLinks(links, beat_s=CHILD_BEAT_S, silence_s=math.inf, lost=lost)
    for rank, child in children.items():
        threading.Thread(target=_watch, args=(child, links[rank]), daemon=True).start()
    try:
        return RankGroup(settings, store, life, list(children.values()))
    except (RuntimeError, dist.DistError) as error:
        for child in children.values():
            child.kill()
        raise ReplicaBroken(f"the replica's ranks did not come together: {error}") from error


def _watch(child: Child, link: socket.socket) -> None:
    """Closes the link of a child that ends. A process that it forked may hold its end open."""
    child.wait()
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _end_with_child(children: Mapping[int, Child], lost: RankLost) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = children[lost.rank].wait(END_S)
        if -status in (signal.SIGKILL, signal.SIGTERM):
            # Killed from outside, the replica is too: a launcher that starts failures anew only so
            # often must not take this for one.
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def join_ranks() -> tuple[RankGroup, str]:
    """Joins the replica that spawned this process. Returns it and rank 0's ``config_json``."""
    settings = die_with_parent()
    torch.set_num_threads(settings.threads)
    link = socket.socket(fileno=settings.link)
    link.set_inheritable(False)  # programs that this rank starts
    life = RankLinks({0: link}, beat_s=CHILD_BEAT_S, silence_s=math.inf)
    store = dist.TCPStore("127.0.0.1", settings.port, None, timeout=timedelta(minutes=5))
    return RankGroup(settings, store, life), settings.config


@contextlib.contextmanager
def _gloo_interface(name: str) -> Iterator[None]:
    """Groups made inside bind to that network interface; gloo reads it from the environment."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before


@contextlib.contextmanager
def replica_errors(prefix: str = "") -> Iterator[None]:
    """Errors of torch's store and groups, as ReplicaBroken."""
    try:
        yield
    except RuntimeError as error:
        raise ReplicaBroken(prefix + first_line(error)) from error
