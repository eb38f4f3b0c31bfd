"""Weights to 1, 2, 4 and 8 receivers that send at a limited rate, from one trainer or two, with and
without relays.

    python -m benchmarks.weight_relays [--mbit 100] [--mib 32] [--out FILE]

Each trainer and each receiver is on a host of its own (a network namespace), which sends and
receives at most so much (token bucket; needs root, iproute2 and a kernel with tbf). A version is
bfloat16, trained by AdamW at a learning rate of 1e-6; "whole" sends all of it, "deltas" what a step
changed. Seconds run from the publication until the last receiver has all buckets, intact. The
trainers' bytes are those that the network device has counted. Buckets are 1/128 of the version: a
model of 16 GB has 1,000 of the usual 16 MiB.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.runs import REPOSITORY, machine, options, write
from benchmarks.weights import DEVIATION, LEARNING_RATE
from paceline.redis.server import find_server
from paceline.rpc.addresses import free_ports
from paceline.v1 import worker_pb2
from paceline.weights.weight_snapshot import WireDtype
from policy_worker.publisher import WeightPublisher
from rollout_worker.weight_receiver import WeightReceiver
from testbed.faults.network_namespaces import HUB, Hosts, why_not

RECEIVERS = (1, 2, 4, 8)
FANOUTS = (0, 1, 2)
"""0: the trainers send to all."""
TRAINERS = (1, 2)
"""Replicas with equal weights."""
BUCKETS = 128
VERSIONS = 3
"""The first one has no base, forms connections and pays for fresh memory: it is not counted."""
RUN = "relays"


def parent_of(receiver: int, fanout: int, trainers: int) -> int:
    """Receiver from which the weights come; -1 - n: trainer n. As the ledger deals them out."""
    roots = fanout * trainers
    if fanout == 0 or receiver < roots:
        return -1 - receiver % trainers
    return (receiver - roots) // fanout


class Trainer:
    """Takes the links that a line of its input names, trains a version, and publishes it with the
    line after that."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._version = 0
        self._generator = torch.Generator().manual_seed(0)
        size = (args.mib << 20) // 2
        self._weights = torch.randn(size, generator=self._generator) * DEVIATION
        self._weights.requires_grad_()
        self._optimizer = torch.optim.AdamW([self._weights], lr=LEARNING_RATE)
        self._publisher: WeightPublisher | None = None

    def serve(self, line: dict[str, Any]) -> None:
        if "links" in line:
            if self._publisher is not None:
                self._publisher.close()
            self._publisher = self._publishing(line["deltas"])
            self._publisher.set_links([worker_pb2.WeightsLink(epoch=k) for k in line["links"]])
        assert self._publisher is not None
        if "publish" not in line:
            self._weights.grad = torch.randn(self._weights.numel(), generator=self._generator)
            self._optimizer.step()
            self._version += 1
            say(trained=self._version)
            return
        at = time.time()
        self._publisher.publish(self._version, [("w", self._weights)])
        say(at=at, version=self._version)

    def _publishing(self, deltas: bool) -> WeightPublisher:
        return WeightPublisher(
            url=self._args.url,
            run_id=RUN,
            device=torch.device("cpu"),
            on_link_error=lambda epoch, detail: None,
            wire=WireDtype(torch.bfloat16),
            deltas=deltas,
            bucket_bytes=(self._args.mib << 20) // BUCKETS,
            host=self._args.host,
        )


class Receiver:
    """Takes the links that each line of its input names, and says when a version has come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._end = WeightReceiver(
            url=args.url,
            run_id=RUN,
            device=torch.device("cpu"),
            on_weights=lambda staged: say(version=staged.version, at=time.time()),
            on_link_error=lambda epoch, detail: None,
            relays=True,
            host=args.host,
        )

    def serve(self, line: dict[str, Any]) -> None:
        relay, link = self._end.relay, line["link"]
        assert relay is not None
        relay.set_links([worker_pb2.WeightsLink(epoch=k) for k in line["relays"]])
        self._end.set_link(None if link is None else worker_pb2.WeightsLink(epoch=link))


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def sent_by(hosts: Hosts, name: str) -> int:
    """Bytes that the host's network device has sent."""
    listed = subprocess.run(
        hosts.on(name, ["cat", "/proc/self/net/dev"]), capture_output=True, text=True, check=True
    )
    (line,) = [x for x in listed.stdout.splitlines() if x.strip().startswith("eth0:")]
    return int(line.split(":")[1].split()[8])


class Members:
    """Trainers and receivers, each a process. They serve all measurements."""

    def __init__(self, args: argparse.Namespace, hosts: Hosts, url: str) -> None:
        self._hosts = hosts
        self._mib = args.mib
        self._epoch = 0
        self._by_name: dict[str, subprocess.Popen[str]] = {}
        for name in names():
            command = [sys.executable, "-m", "benchmarks.weight_relays", "--member", name]
            command += ["--url", url, "--mib", str(args.mib), "--host", hosts.address[name]]
            self._by_name[name] = subprocess.Popen(
                hosts.on(name, command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._receivers = [p for name, p in self._by_name.items() if name.startswith("r")]

    def measure(self, receivers: int, fanout: int, trainers: int, deltas: bool) -> dict[str, Any]:
        first = self._epoch + 1
        self._epoch += receivers
        parents = [parent_of(n, fanout, trainers) for n in range(receivers)]
        for number, process in enumerate(self._receivers):
            below = [first + n for n, parent in enumerate(parents) if parent == number]
            link = first + number if number < receivers else None
            write_line(process, link=link, relays=below)
        lines: list[dict[str, Any]] = [
            {
                "links": [first + n for n, parent in enumerate(parents) if parent == -1 - trainer],
                "deltas": deltas,
            }
            for trainer in range(max(TRAINERS))
        ]
        seconds, sent = [], []
        for _ in range(VERSIONS):
            before = self._sent()
            # All of them train every version: their weights are equal.
            for number, line in enumerate(lines):
                tell(self._by_name[f"trainer{number}"], **line)
            lines = [{} for _ in lines]
            senders = [self._by_name[f"trainer{number}"] for number in range(trainers)]
            for process in senders:
                write_line(process, publish=True)
            published = [answer(process) for process in senders]
            version, at = published[0]["version"], min(x["at"] for x in published)
            ends = [arrival(p, version) for p in self._receivers[:receivers]]
            seconds.append(max(ends) - at)
            sent.append([after - was for after, was in zip(self._sent(), before, strict=True)])
        version_bytes, counted = self._mib << 20, sent[1:]
        return {
            "receivers": receivers,
            "fanout": fanout,
            "trainers": trainers,
            "deltas": deltas,
            "seconds": statistics.median(seconds[1:]),
            "trainer_copies": statistics.median(map(sum, counted)) / version_bytes,
            "most_of_a_trainer": statistics.median(map(max, counted)) / version_bytes,
        }

    def _sent(self) -> list[int]:
        """Bytes that each trainer has sent."""
        return [sent_by(self._hosts, f"trainer{n}") for n in range(max(TRAINERS))]

    def close(self) -> None:
        for process in self._by_name.values():
            process.kill()
            process.wait()


def names() -> list[str]:
    trainers = (f"trainer{n}" for n in range(max(TRAINERS)))
    return [*trainers, *(f"r{n}" for n in range(max(RECEIVERS)))]


def write_line(process: subprocess.Popen[str], **line: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(line) + "\n")
    process.stdin.flush()


def tell(process: subprocess.Popen[str], **line: Any) -> dict[str, Any]:
    """The process's answer to the line."""
    write_line(process, **line)
    return answer(process)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def arrival(process: subprocess.Popen[str], version: int) -> float:
    """Time at which the receiver had the version; a relay may hand earlier ones on first."""
    while (line := answer(process)).get("version") != version:
        pass
    return float(line["at"])


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-relays-"))
        if missing := why_not():
            raise SystemExit(f"weight_relays: {missing}")
        hosts = Hosts(*names())
        stack.callback(hosts.close)
        for name in names():
            hosts.limit(name, args.mbit)
        hub = hosts.address[HUB]
        (port,) = free_ports(hub, 1)
        server = subprocess.Popen(
            [
                *(str(find_server()), "--port", str(port), "--bind", hub),
                *("--requirepass", "relays", "--save", "", "--dir", folder),
            ],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(server.wait)
        stack.callback(server.terminate)
        members = Members(args, hosts, f"redis://:relays@{hub}:{port}/0")
        stack.callback(members.close)
        rows = []
        for deltas, trainers, fanout, receivers in itertools.product(
            (False, True), TRAINERS, FANOUTS, RECEIVERS
        ):
            rows.append(members.measure(receivers, fanout, trainers, deltas))
            print(json.dumps(rows[-1]), flush=True)
        return rows


def main() -> None:
    parser = options("weight_relays", __doc__, "weight_relays_hosts")
    parser.add_argument("--mbit", type=int, default=100, help="of each host, each way")
    parser.add_argument("--mib", type=int, default=32, help="of a version in bfloat16")
    for internal in ("--member", "--url", "--host"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        torch.set_num_threads(1)
        member = Trainer(args) if args.member.startswith("trainer") else Receiver(args)
        for line in sys.stdin:
            member.serve(json.loads(line))
        return
    rows = measure(args)
    write(args.out, {"machine": machine(), "mib": args.mib, "mbit": args.mbit, "rows": rows})


if __name__ == "__main__":
    main()
