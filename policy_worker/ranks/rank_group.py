"""Rank group of one policy replica: the ranks live, agree and die as one.

    controller ◄──► rank 0 (the worker)               ranks 1..n-1
                      │   commands (JSON, gloo)  ──►  executed in order
                      │   agree / gather         ◄──► the result of every rank
                      └── "epoch n is over" (their shared life) ◄► read between slices of a collective

- Only rank 0 talks to the controller. The others execute its commands, in its order.
- A rank that dies ends the replica (``rank_life``). Half a replica holds half the parameters:
  nothing it could still do would be right.
- Rank 0 starts the others on its host (``start_ranks``), where channels bind to loopback; or all
  are started from outside, on any hosts (``outside_ranks``). Nothing here is pickled.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from enum import StrEnum, auto
from typing import Any

import torch
import torch.distributed as dist
from google.protobuf.message import DecodeError
from torch.distributed.device_mesh import DeviceMesh

from paceline.byte_slices import slices
from paceline.errors import UserError
from paceline.mesh.tcp_store import host_store
from paceline.process.user_code import python_module
from paceline.v1 import rollout_pb2
from policy_worker.ranks.child_ranks import ChildRanks
from policy_worker.ranks.follower_bootstrap import (
    RANK_SETTINGS,
    RankPlace,
    RankSettings,
    die_with_parent,
)
from policy_worker.ranks.rank_life import AloneLife, RankLife

COMMAND_BYTES = 256 << 20
"""Held-out groups travel in messages of at most this size: protobuf reads none above 2 GiB. Groups
of a step do not travel: each rank reads its own."""
FOREVER = timedelta(days=365)
"""Between two commands lies however long the rollouts take. Death is noticed by other means."""


class RankCommand(StrEnum):
    """Command of rank 0 to the other ranks of its replica: one for each operation of the Trainer."""

    ATTACH = auto()
    FORM = auto()
    ABANDON = auto()
    RESTORE = auto()
    SEND_STATE = auto()
    RECEIVE_STATE = auto()
    DIGEST = auto()
    BEGIN = auto()
    TAKE = auto()
    ADD = auto()
    MEASURE = auto()
    REDUCE = auto()
    COMMIT = auto()
    SAVE = auto()
    OPEN_PUBLISHER = auto()
    PUBLISH = auto()
    FORGET_PUBLISHED = auto()
    FREE_PUBLISHED = auto()
    STOP = auto()
    """The process exits."""


class ReplicaBroken(UserError):
    """A rank of this replica is gone or does not answer; the process must exit."""


class RankGroup:
    """The ranks of one replica. A replica of one rank has nobody to announce anything to or to wait
    for."""

    command_bytes = COMMAND_BYTES
    mesh: DeviceMesh | None = None
    """One-dimensional device mesh over the ranks; None for one rank."""

    def __init__(
        self,
        place: RankPlace | None = None,
        store: dist.Store | None = None,
        life: RankLife | None = None,
    ) -> None:
        """``life``: that the ranks share. Without any arguments: the group of one rank."""
        self.rank, self.size = (place.rank, place.size) if place else (0, 1)
        self.identity = place.identity if place else secrets.token_hex(6)
        """Random name, equal on all ranks, different for every replica ever started."""
        self.host = place.host if place else ""
        """Address of this rank for those of other replicas; empty: the one of rank 0."""
        self.store = store
        """Key-value store the ranks share, for background threads; None for one rank."""
        self._life: RankLife = life or AloneLife()
        self._closing = threading.Event()
        self._given_up = False
        if place is None:
            return
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

    @property
    def follower_pids(self) -> Sequence[int]:
        """Process ids of the ranks that rank 0 has started; known to rank 0."""
        return self._life.follower_pids

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def announce(
        self, command: RankCommand, groups: Sequence[rollout_pb2.Group] = (), **arguments: Any
    ) -> None:
        """Rank 0: hands the command and its JSON arguments to the others, where it has no effect."""
        if not self.leads or self.size == 1 or self._given_up:
            return
        parts = list(slices(((g, g.ByteSize()) for g in groups), self.command_bytes))
        self.broadcast_bytes(json.dumps([command, arguments, len(parts)]).encode())
        for part in parts:
            packed = rollout_pb2.Groups(groups=part)
            self.broadcast_bytes(packed.SerializeToString())

    def next_command(self) -> tuple[RankCommand, dict[str, Any]]:
        """Ranks above 0: blocks until rank 0 announces the next command.

        Raises ReplicaBroken if its groups cannot be read: this rank could not execute it.
        """
        if self.leads:
            raise ReplicaBroken("rank 0 has nobody to take commands from")
        command, arguments, parts = json.loads(self.broadcast_bytes(None))
        if parts:
            groups: list[rollout_pb2.Group] = []
            for _ in range(parts):
                packed = self.broadcast_bytes(None)
                try:
                    groups += rollout_pb2.Groups.FromString(packed).groups
                except DecodeError as error:
                    raise ReplicaBroken(
                        f"rank {self.rank} cannot read {len(packed)} bytes of groups: {error}"
                    ) from error
            arguments["groups"] = groups
        return RankCommand(command), arguments

    def agree(self, ok: bool) -> bool:
        """Collective. True on every rank if ``ok`` was true on every rank."""
        if self.size == 1:
            return ok
        flag = torch.tensor([int(ok)], dtype=torch.int32)
        with _replica_errors():
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._control)
        return bool(flag.item())

    def gather(self, value: Any) -> list[Any]:
        """Collective. Every rank's JSON value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        data = json.dumps(value).encode()
        return [json.loads(self.broadcast_bytes(data, rank)) for rank in range(self.size)]

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Collective. The bytes of rank ``source``, on every rank; those of the others are ignored."""
        mine = bytearray(data or b"") if self.rank == source else bytearray()
        if self.size == 1:
            return bytes(mine)
        size = torch.tensor([len(mine)])
        with _replica_errors():
            dist.broadcast(size, source, group=self._control)
            if not int(size):
                return b""
            buffer = torch.frombuffer(mine or bytearray(int(size)), dtype=torch.uint8)
            dist.broadcast(buffer, source, group=self._control)
        return bytes(buffer.numpy().tobytes())

    def all_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collective. Adds ``tensor`` (any dtype, on the replica's device) up over ranks, in place."""
        if self.size > 1:
            with _replica_errors():
                dist.all_reduce(tensor)
        return tensor

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        sizes_from: Sequence[int],
        sizes_to: Sequence[int],
    ) -> None:
        """Collective. Sends each rank its part of ``sent`` and fills ``received``, both of one
        dimension on the replica's device, with what the ranks send to this one; parts are in the
        order of ranks."""
        with _replica_errors():
            dist.all_to_all_single(received, sent, list(sizes_from), list(sizes_to))

    def end_epoch(self, epoch: int) -> None:
        """Any rank, any thread, without blocking: mesh epochs up to ``epoch`` are over for all."""
        self._life.end_epoch(epoch)

    def epoch_over(self, epoch: int) -> bool:
        """Any rank, any thread, without blocking: whether a rank has ended ``epoch``."""
        return self._life.ended_epoch >= epoch

    def given_up(self, why: str) -> ReplicaBroken:
        """An error of this rank in the middle of a collective, to be raised until the process ends.
        Nothing is announced any more: the other ranks would not hear it."""
        self._given_up = True
        return ReplicaBroken(f"rank {self.rank} of {self.size} ends its replica: {why}")

    def close(self) -> None:
        """Rank 0: has the other ranks exit with 0, and waits for them."""
        if self.size == 1 or self._closing.is_set():
            return
        self._closing.set()
        self._life.begin_end()
        if self.leads:
            with contextlib.suppress(ReplicaBroken):
                self.announce(RankCommand.STOP)
            self._life.await_end()
        if dist.is_initialized():
            dist.destroy_process_group()
        if not self.leads:
            self._life.await_end()


def start_ranks(
    size: int,
    *,
    config_json: str = "{}",
    threads: int = 1,
    device_type: str = "cpu",
    worker: Sequence[str] = ("policy_worker.ranks.rank_worker",),
) -> RankGroup:
    """Starts a replica of ``size`` ranks with the caller as rank 0; call it from the main thread.

    ``config_json`` reaches the other ranks as ``join_ranks()``'s second result. ``worker`` is the
    module they run (``python -m``), with its arguments. ``threads`` limits each one's CPU threads.
    Returns once every rank has joined. Raises ReplicaBroken if that fails.
    """
    if size == 1:
        return RankGroup()
    if device_type == "cuda" and torch.cuda.device_count() < size:
        raise ReplicaBroken(
            f"fleet.policy_ranks = {size}, but this process sees {torch.cuda.device_count()} CUDA "
            "devices: a rank needs one of its own"
        )
    if threading.current_thread() is not threading.main_thread():
        # PR_SET_PDEATHSIG fires when the *thread* that spawned the child ends.
        raise RuntimeError("a replica must be started from the main thread")
    store = host_store("127.0.0.1", timedelta(minutes=5))
    children = []
    with tempfile.TemporaryFile() as shared:
        shared.truncate(mmap.PAGESIZE)
        epochs = mmap.mmap(shared.fileno(), mmap.PAGESIZE)
        settings = RankSettings(
            rank=0,
            size=size,
            identity=secrets.token_hex(6),
            port=store.port,
            parent=os.getpid(),
            epochs=shared.fileno(),
            device=device_type,
            threads=threads,
            config=config_json,
        )
        for rank in range(1, size):
            env = os.environ | {
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                RANK_SETTINGS: json.dumps(asdict(replace(settings, rank=rank))),
            }
            children.append(
                subprocess.Popen(
                    [*python_module(worker[0]), *worker[1:]],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(shared.fileno(),),
                )
            )
    try:
        return RankGroup(settings.place, store, ChildRanks(0, size, epochs, children))
    except (RuntimeError, dist.DistError) as error:
        for child in children:
            child.kill()
        raise ReplicaBroken(f"the replica's ranks did not come together: {error}") from error


def join_ranks() -> tuple[RankGroup, str]:
    """Joins the replica that spawned this process. Returns it and rank 0's ``config_json``."""
    settings = die_with_parent()
    torch.set_num_threads(settings.threads)
    epochs = mmap.mmap(settings.epochs, mmap.PAGESIZE)
    os.close(settings.epochs)
    store = dist.TCPStore("127.0.0.1", settings.port, None, timeout=timedelta(minutes=5))
    life = ChildRanks(settings.rank, settings.size, epochs)
    return RankGroup(settings.place, store, life), settings.config


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
def _replica_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ReplicaBroken(str(error).splitlines()[0]) from error
