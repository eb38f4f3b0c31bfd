"""Weights to 1, 2, 4 and 8 receivers whose hosts send at a limited rate, with and without relays.

    python -m benchmarks.weight_relays [--mbit 400] [--mib 64] [--out FILE]

The trainer and each receiver are processes on hosts of their own (network namespaces), which send and receive at most
``--mbit`` each (token bucket). A version is bfloat16, trained by AdamW at a learning rate of 1e-6; "whole" sends all of it,
"deltas" what a step changed. Seconds run from the publication until the last receiver has all buckets, intact. The
trainer's bytes are those of its network device. Buckets are 1/128 of the version: a model of 16 GB has 1,000 of the
usual 16 MiB. Needs root, iproute2 and a kernel with tbf.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import REPOSITORY, machine, write
from benchmarks.weights import DEVIATION, LEARNING_RATE
from paceline.redis.server import find_server
from paceline.rpc.ports import free_ports
from paceline.v1 import worker_pb2
from paceline.weights.weight_snapshot import WireDtype
from policy_worker.weight_publisher import WeightPublisher
from rollout_worker.weight_receiver import WeightReceiver
from testbed.faults.network_namespaces import HUB, Hosts, why_not

RECEIVERS = (1, 2, 4, 8)
FANOUTS = (0, 1, 2)
"""0: the trainer sends to all."""
BUCKETS = 128
VERSIONS = 3
"""The first one has no base, forms connections and pays for fresh memory: it is not counted."""
RUN = "relays"


def parent_of(receiver: int, fanout: int) -> int:
    """Receiver from which the weights come; -1: the trainer."""
    return -1 if fanout == 0 or receiver < fanout else (receiver - fanout) // fanout


class Trainer:
    """Publishes a version for each line of its input, over the links that the line names."""

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
        self._weights.grad = torch.randn(self._weights.numel(), generator=self._generator)
        self._optimizer.step()
        self._version += 1
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
            through_host=True,
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
    shown = subprocess.run(
        hosts.on(name, ["cat", "/proc/self/net/dev"]), capture_output=True, text=True, check=True
    )
    (line,) = [x for x in shown.stdout.splitlines() if x.strip().startswith("eth0:")]
    return int(line.split(":")[1].split()[8])


class Members:
    """Trainer and receivers, each a process on a host of its own. They serve all measurements."""

    def __init__(self, args: argparse.Namespace, hosts: Hosts, url: str) -> None:
        self._hosts = hosts
        self._mib = args.mib
        self._epoch = 0
        self.processes: list[subprocess.Popen[str]] = []
        for name in hosts_of():
            own = [sys.executable, "-m", "benchmarks.weight_relays", "--member", name]
            own += ["--url", url, "--mib", str(args.mib), "--host", hosts.address[name]]
            self.processes.append(
                subprocess.Popen(
                    hosts.on(name, own),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=REPOSITORY,
                )
            )
        self._trainer, *self._receivers = self.processes

    def measure(self, receivers: int, fanout: int, deltas: bool) -> dict[str, Any]:
        first = self._epoch + 1
        self._epoch += receivers
        parents = [parent_of(n, fanout) for n in range(receivers)]
        for number, process in enumerate(self._receivers):
            below = [first + n for n, parent in enumerate(parents) if parent == number]
            link = first + number if number < receivers else None
            write_line(process, link=link, relays=below)
        links = [first + n for n, parent in enumerate(parents) if parent < 0]
        line: dict[str, Any] = {"links": links, "deltas": deltas}
        seconds, sent = [], []
        for _ in range(VERSIONS):
            before = sent_by(self._hosts, "trainer")
            published = tell(self._trainer, **line)
            line = {}
            ends = [arrival(p, published["version"]) for p in self._receivers[:receivers]]
            seconds.append(max(ends) - published["at"])
            sent.append(sent_by(self._hosts, "trainer") - before)
        return {
            "receivers": receivers,
            "fanout": fanout,
            "deltas": deltas,
            "seconds": statistics.median(seconds[1:]),
            "trainer_bytes": statistics.median(sent[1:]),
            "trainer_copies": statistics.median(sent[1:]) / (self._mib << 20),
        }

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def hosts_of() -> list[str]:
    return ["trainer", *(f"r{n}" for n in range(max(RECEIVERS)))]


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
    """When the receiver had the version; earlier ones may come from a relay that had them."""
    while (line := answer(process)).get("version") != version:
        pass
    return float(line["at"])


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-relays-"))
        hosts = Hosts(*hosts_of())
        stack.callback(hosts.close)
        for name in hosts_of():
            hosts.limit(name, args.mbit)
        (port,) = free_ports(hosts.address[HUB], 1)
        server = subprocess.Popen(
            [
                *(str(find_server()), "--port", str(port), "--bind", hosts.address[HUB]),
                *("--requirepass", "relays", "--save", "", "--dir", folder),
            ],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(server.wait)
        stack.callback(server.terminate)
        members = Members(args, hosts, f"redis://:relays@{hosts.address[HUB]}:{port}/0")
        stack.callback(members.close)
        rows = []
        for deltas in (False, True):
            for fanout in FANOUTS:
                for receivers in RECEIVERS:
                    rows.append(members.measure(receivers, fanout, deltas))
                    print(json.dumps(rows[-1]), flush=True)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, default=400, help="of each host, each way")
    parser.add_argument("--mib", type=int, default=64, help="of a version in bfloat16")
    parser.add_argument("--out", type=Path)
    for own in ("--member", "--url", "--host"):
        parser.add_argument(own, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        torch.set_num_threads(1)
        member = Trainer(args) if args.member == "trainer" else Receiver(args)
        for line in sys.stdin:
            member.serve(json.loads(line))
        return
    if missing := why_not():
        raise SystemExit(f"weight_relays: {missing}")
    found = {"machine": machine(), "mbit": args.mbit, "mib": args.mib, "rows": measure(args)}
    write("weight_relays", found, args.out)


if __name__ == "__main__":
    main()
