"""Share of the reduction between replicas that is hidden behind the backward of a step's last row.

    python -m benchmarks.reduction_overlap [--mbit 800 1600] [--hidden 1024] [--layers 8] [--repeats 5] [--out FILE]

Two replicas of one rank on hosts of their own (network namespaces), whose links carry ``--mbit``
each way (token bucket). A step is one row on each. Its time is measured with the reduction after
the backward and with the reduction during it, in turn; the time of the backward alone comes from
the same steps without a reduction, and that of the reduction alone from the wait after it. Needs
root, iproute2 and a kernel with tbf.

    exposed = step with reduction - step without        hidden share = 1 - exposed(during) / exposed(after)
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

import numpy as np
import torch

from benchmarks.runs import REPOSITORY, machine, write
from paceline.redis.server import find_server
from paceline.rpc.ports import free_ports
from paceline.v1 import common_pb2, rollout_pb2
from testbed.faults.network_namespaces import HUB, Hosts, why_not

HOSTS = ("one", "two")
VOCABULARY = 8192


def make_groups(seed: int) -> list[rollout_pb2.Group]:
    """Two groups of four completions of 32 to 64 tokens, with rewards that differ."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(2):
        group = rollout_pb2.Group(
            task=common_pb2.TaskRef(task_id=f"t{seed}-{number}", attempt=1),
            prompt_tokens=rng.integers(0, VOCABULARY, 12).astype("<i4").tobytes(),
        )
        for completion in range(4):
            length = int(rng.integers(32, 65))
            group.completions.add(
                tokens=rng.integers(0, VOCABULARY, length).astype("<i4").tobytes(),
                logprobs=np.full(length, -9.0, "<f4").tobytes(),
                versions=[common_pb2.VersionSpan(version=0, length=length)],
                reward=float(completion % 2),
            )
        groups.append(group)
    return groups


def member(arguments: argparse.Namespace) -> None:
    """One replica: prints the seconds of each step by kind."""
    from paceline.config.schema import Config
    from policy_worker.objectives.batch import StepTotals
    from policy_worker.trainer import EpochMesh, Trainer
    from testbed.groups_in_hand import add as add_groups

    torch.set_num_threads(1)
    settings = {
        "model": {"path": arguments.path, "device": "cpu"},
        "data": {"path": "d"},
        "train": {"memory": {"tokens_per_microbatch": 100_000}},
    }
    trainer = Trainer(Config.model_validate(settings), torch.device("cpu"))
    trainer.restore("", 0, 0)
    epoch = EpochMesh(1, arguments.member, 2, arguments.url, "overlap", arguments.host)
    trainer.form(epoch)
    groups = make_groups(arguments.member)
    tokens = sum(len(c.tokens) // 4 for g in groups for c in g.completions)
    keys = [(g.task.task_id, g.task.attempt) for g in groups]
    ready = torch.zeros(1)
    seconds: dict[str, list[float]] = {"backward": [], "after": [], "during": []}
    for number in range(arguments.repeats + 1):
        for kind, times in seconds.items():
            trainer.gradients.clear()
            trainer.begin(StepTotals(1, 0, tokens, 8), keys)
            assert trainer._mesh is not None
            trainer._mesh.all_reduce(ready)  # both begin together
            begun = time.monotonic()
            add_groups(trainer, groups, last=kind == "during")
            if kind != "backward":
                trainer.reduce()
            if number:  # the first warms up
                times.append(time.monotonic() - begun)
    elements = trainer.gradients.size
    trainer.close()
    print(json.dumps({"seconds": seconds, "elements": elements}), flush=True)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.measured_replica import make_model

    make_model(folder / "model", arguments.hidden, arguments.layers)
    with contextlib.ExitStack() as stack:
        hosts = Hosts(*HOSTS)
        stack.callback(hosts.close)
        for name in HOSTS:
            hosts.limit(name, arguments.mbit)
        (port,) = free_ports(hosts.address[HUB], 1)
        url = f"redis://:overlap@{hosts.address[HUB]}:{port}/0"
        server = subprocess.Popen(
            [
                *(str(find_server()), "--port", str(port), "--bind", hosts.address[HUB]),
                *("--requirepass", "overlap", "--save", "", "--dir", str(folder)),
            ],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(server.wait)
        stack.callback(server.terminate)
        running = []
        for number, name in enumerate(HOSTS):
            own = [
                *(sys.executable, "-m", "benchmarks.reduction_overlap"),
                *("--member", str(number), "--host", hosts.address[name], "--url", url),
                *("--path", str(folder / "model"), "--repeats", str(arguments.repeats)),
            ]
            running.append(
                subprocess.Popen(
                    hosts.on(name, own), stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
                )
            )
        found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    # A step is over when both members have it.
    steps = {
        kind: [max(pair) for pair in zip(*(f["seconds"][kind] for f in found), strict=True)]
        for kind in found[0]["seconds"]
    }
    median = {kind: statistics.median(values) for kind, values in steps.items()}
    exposed = {kind: median[kind] - median["backward"] for kind in ("after", "during")}
    return {
        "mbit": arguments.mbit,
        "gradient_mib": found[0]["elements"] * 4 / 2**20,
        "repeats": arguments.repeats,
        "step_s": median,
        "exposed_s": exposed,
        "hidden_share": min(1.0, 1 - exposed["during"] / exposed["after"]),
        "could_be_hidden": min(1.0, median["backward"] / exposed["after"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, nargs="+", default=[800, 1600])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    for own in ("--host", "--url", "--path"):
        parser.add_argument(own, default="", help=argparse.SUPPRESS)
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member is not None:
        member(arguments)
        return
    if missing := why_not():
        raise SystemExit(f"reduction_overlap: {missing}")
    rows = []
    for mbit in arguments.mbit:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(
                measure(argparse.Namespace(**vars(arguments) | {"mbit": mbit}), Path(folder))
            )
        print(json.dumps(rows[-1]), flush=True)
    write("reduction_overlap", {"machine": machine(), "links": rows}, arguments.out)


if __name__ == "__main__":
    main()
