"""One end of a weights link as a process of its own, for tests that kill or stop it.

``python -m testbed.workers.weight_link_peer receiver|half-sender REDIS_URL RUN_ID EPOCH`` prints a line of
JSON for what happens. A receiver stages every version; a half-sender sends the announcement and the
first of several buckets, then hangs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import torch

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.v1 import worker_pb2
from paceline.weights.frames import send_frame
from paceline.weights.weight_snapshot import WeightSnapshot
from paceline.weights.weight_transfer import (
    PUBLISHER,
    RECEIVER,
    StagedWeights,
    await_hello,
)
from rollout_worker.weight_receiver import WeightReceiver

CPU = torch.device("cpu")


def start(part: str, url: str, run_id: str, epoch: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "testbed.workers.weight_link_peer", part, url, run_id, str(epoch)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def next_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def receiver(url: str, run_id: str, epoch: int) -> None:
    def staged(weights: StagedWeights) -> None:
        say(version=weights.version, digest=weights.digest, seconds=weights.seconds)

    end = WeightReceiver(
        url=url,
        run_id=run_id,
        device=CPU,
        on_weights=staged,
        on_link_error=lambda epoch, detail: say(error=detail),
    )
    end.set_link(worker_pb2.WeightsLink(epoch=epoch))
    threading.Event().wait()


def half_sender(url: str, run_id: str, epoch: int) -> None:
    mesh = ProcessMesh.form(
        url=url,
        key=f"paceline:{run_id}:rdv:link:{epoch}",
        rank=PUBLISHER,
        size=2,
        device=CPU,
        cancelled=lambda: False,
    )
    await_hello(mesh)
    snapshot = WeightSnapshot.take(7, [("w", torch.ones(4096))], bucket_bytes=4096)
    announcement = {"version": 7, "direct": False, "manifest": snapshot.manifest.to_json()}
    send_frame(mesh, announcement, RECEIVER)
    mesh.send(snapshot.bucket(0), RECEIVER)
    say(sent="half")
    threading.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"receiver": receiver, "half-sender": half_sender}[sys.argv[1]](
        sys.argv[2], sys.argv[3], int(sys.argv[4])
    )
