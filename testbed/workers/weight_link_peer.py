"""One end of a weights link as a process of its own, for tests that kill or stop it.

``python -m testbed.workers.weight_link_peer PART REDIS_URL RUN_ID EPOCH`` prints a line of JSON for
what happens. A receiver stages every version; with ``--relays EPOCH ...`` it hands them on over
these links. A half-sender sends the announcement and the first of several buckets, then hangs. A
half-source is a rank above 0 (``--share SOURCE SOURCES``) that sends its first bucket of
shared_weights(1) and the record of the next one, then hangs.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.mesh.gloo_backend import GlooBackend
from paceline.v1 import worker_pb2
from paceline.weights.link_messages import (
    PUBLISHER,
    RECEIVER,
    WHOLE,
    Answer,
    await_hello,
    recv_ask,
    send_answer,
    send_record,
)
from paceline.weights.tensor_checksum import weights_digest
from paceline.weights.weight_manifest import WeightShard
from paceline.weights.weight_sending import announce
from paceline.weights.weight_snapshot import WeightSnapshot
from paceline.weights.weight_transfer import StagedWeights
from rollout_worker.weight_receiver import WeightReceiver

CPU = torch.device("cpu")
SHARED_BUCKET_BYTES = 5120
_SO_MAX_PACING_RATE = 47  # Linux; the socket module does not name it.


def start(
    part: str,
    url: str,
    run_id: str,
    epoch: int,
    *,
    relays: Sequence[int] | None = None,
    relayed: bool = False,
    share: tuple[int, int] = (0, 1),
    stall_s: float = 30.0,
    host: str = "",
    pace: int = 0,
    on: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """``relays``: epochs of the links over which a receiver hands weights on; None: relays are off.
    ``relayed``: its publisher is a relay. ``share``: of a source. ``stall_s``: as for
    WeightReceiver. ``host``: its address. ``pace``: bytes a second that each of its connections
    sends at most. ``on``: command in front of it.
    """
    command = [sys.executable, "-m", "testbed.workers.weight_link_peer", part, url, run_id]
    command += [str(epoch), "--stall-s", str(stall_s), "--host", host]
    command += ["--pace", str(pace)]
    command += ["--relayed"] if relayed else []
    command += ["--share", *map(str, share)]
    if relays is not None:
        command += ["--relays", *map(str, relays)]
    return subprocess.Popen(
        [*on, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def next_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def receiver(args: argparse.Namespace) -> None:
    def staged(weights: StagedWeights) -> None:
        at = time.time()
        say(
            version=weights.version,
            at=at,
            digest=weights_digest(weights.tensors.items()),
            seconds=weights.seconds,
        )

    end = WeightReceiver(
        url=args.url,
        run_id=args.run_id,
        device=CPU,
        on_weights=staged,
        on_link_error=lambda epoch, detail: say(error=detail),
        relays=args.relays is not None,
        stall_s=args.stall_s,
        host=args.host or None,
    )
    if end.relay is not None:
        end.relay.set_links([worker_pb2.WeightsLink(epoch=epoch) for epoch in args.relays])
    end.set_link(worker_pb2.WeightsLink(epoch=args.epoch, relayed=args.relayed))
    threading.Event().wait()


def half_sender(args: argparse.Namespace) -> None:
    mesh = ProcessMesh.form(
        url=args.url,
        key=f"paceline:{args.run_id}:rdv:link:{args.epoch}",
        rank=PUBLISHER,
        size=2,
        device=CPU,
        cancelled=lambda: False,
    )
    await_hello(mesh)
    snapshot = WeightSnapshot.take(7, [("w", torch.ones(4096))], bucket_bytes=4096)
    announce(mesh, snapshot)
    while recv_ask(mesh) is not True:
        send_answer(mesh, Answer(ready=True, kept=True))
    send_record(mesh, WHOLE, snapshot.checksum(0))
    mesh.send(snapshot.bucket(0), RECEIVER)
    say(sent="half")
    threading.Event().wait()


def half_source(args: argparse.Namespace) -> None:
    share = WeightShard(*args.share)
    say(joins=args.epoch)
    mesh = ProcessMesh.form(
        url=args.url,
        key=f"paceline:{args.run_id}:rdv:link:{args.epoch}:{share.source}",
        rank=PUBLISHER,
        size=2,
        device=CPU,
        cancelled=lambda: False,
    )
    named = shared_weights(1).items()
    snapshot = WeightSnapshot.take(1, named, bucket_bytes=SHARED_BUCKET_BYTES)
    while recv_ask(mesh) is not True:
        send_answer(mesh, Answer(ready=True, kept=True))
    first, second = share.buckets(snapshot.manifest)[:2]
    send_record(mesh, WHOLE, snapshot.checksum(first))
    mesh.send(snapshot.bucket(first), RECEIVER)
    send_record(mesh, WHOLE, snapshot.checksum(second))
    say(sent="half")
    threading.Event().wait()


def shared_weights(seed: int) -> dict[str, Tensor]:
    """Weights of 12 buckets, of which the last is not full. Two are tied."""
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(200, 70, generator=generator).bfloat16()
    norm = torch.randn(70, generator=generator).bfloat16()
    middle = torch.randn(90, 180, generator=generator).bfloat16()
    return {"embed": embed, "norm": norm, "middle": middle, "head": embed}


PARTS = {"receiver": receiver, "half-sender": half_sender, "half-source": half_source}


def pace_sockets(bytes_per_s: int) -> None:
    """From here on each connection of this process sends at most so many bytes a second, in the
    kernel: a message is under way byte by byte, and can be cut in its middle."""
    form = GlooBackend.__init__

    def slow(backend: GlooBackend, *arguments: Any) -> None:
        form(backend, *arguments)
        for end in backend._sockets:
            with socket.socket(fileno=os.dup(end.descriptor)) as connection:
                connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)

    GlooBackend.__init__ = slow  # type: ignore[assignment, method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("url", help="of the Redis of the rendezvous")
    parser.add_argument("run_id")
    parser.add_argument("epoch", type=int, help="of the link")
    parser.add_argument(
        "--relays", type=int, nargs="*", help="links over which weights are handed on"
    )
    parser.add_argument("--share", type=int, nargs=2, help="of a source, and of how many")
    parser.add_argument("--relayed", action="store_true", help="the publisher is a relay")
    parser.add_argument("--stall-s", type=float, help="silence after which a relay has failed")
    parser.add_argument("--host", default="", help="address at which the other ends reach this one")
    parser.add_argument("--pace", type=int, default=0, help="bytes a second of each connection")
    args = parser.parse_args()
    if args.pace:
        pace_sockets(args.pace)
    PARTS[args.part](args)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
