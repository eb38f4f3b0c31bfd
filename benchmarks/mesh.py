"""The tensor plane on gloo: forming, reducing, rebuilding after a fault, leaks.

    python -m benchmarks.mesh [--trials 20] [--out FILE]

Real member processes with one thread each, real Redis, loopback. Faults: kill -9 of one of three
members inside an all-reduce of 32 MB (survivors notice by themselves), and SIGSTOP of one (nobody
can notice, so the epoch is ended by hand, as the controller does after the lease). The time runs
from the fault, or from the end of the epoch, until both survivors hold the next epoch's sum.
"""

import queue
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import runs
from testbed.redis.redis_process import throwaway_redis
from testbed.workers.mesh_member import Crew, Member, crew_on

MB = 1_000_000
REDUCED_MB = (1, 8, 32)
REBUILDS = 200


def main() -> None:
    parser = runs.options("mesh", __doc__, "mesh")
    parser.add_argument("--trials", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": runs.machine()}
    with (
        tempfile.TemporaryDirectory(prefix="paceline-mesh-") as name,
        throwaway_redis(Path(name)) as url,
        crew_on(url) as crew,
    ):
        result["form_ms"] = form(crew, args.trials)
        result["reduce"] = reduce(crew, args.trials)
        result["fault_ms"] = [killed(crew, args.trials), stopped(crew, args.trials)]
        result["leaks"] = leaks(crew)
    runs.write(args.out, result)


def form(crew: Crew, trials: int) -> list[dict[str, Any]]:
    rows = []
    for size in (2, 3, 4):
        members = crew.members(size)
        took = [max(a["ms"] for a in crew.form(members)) for _ in range(trials)]
        rows.append({"members": size, **spread(took)})
    return rows


def reduce(crew: Crew, trials: int) -> list[dict[str, Any]]:
    rows = []
    for size in (2, 3):
        members = crew.members(size)
        crew.form(members)
        for megabytes in REDUCED_MB:
            took = [max(ms(all_reduce(members, megabytes), "reduce_ms")) for _ in range(trials)]
            middle = statistics.median(took)
            rows.append(
                {
                    "members": size,
                    "MB": megabytes,
                    **spread(took),
                    "MB/s": megabytes / middle * 1e3,
                }
            )
    return rows


class Noticed:
    """Milliseconds from a fault to the first and last error, and to the next epoch's sum."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.first: list[float] = []
        self.last: list[float] = []
        self.again: list[float] = []

    def add(self, fault: float, answers: Sequence[dict[str, Any]], summed: float) -> None:
        at = ms(answers, "at")
        for values, t in ((self.first, min(at)), (self.last, max(at)), (self.again, summed)):
            values.append((t - fault) * 1e3)

    def row(self) -> dict[str, Any]:
        return {
            "fault": self.fault,
            "first_error": statistics.median(self.first),
            "last_error": statistics.median(self.last),
            "summed_again": statistics.median(self.again),
            "summed_again_max": max(self.again),
        }


def killed(crew: Crew, trials: int) -> dict[str, Any]:
    noticed = Noticed("kill -9")
    while len(noticed.again) < trials:
        members = crew.members(3)
        crew.form(members)
        start_reducing(members, 32)
        fault = time.time()
        members[2].kill()
        answers = [member.answer() for member in members[:2]]
        if any("error" not in answer for answer in answers):
            # The all-reduce was over before the kill: no fault to recover from.
            continue
        noticed.add(fault, answers, recovered(crew, members[:2]))
    return noticed.row()


def stopped(crew: Crew, trials: int) -> dict[str, Any]:
    noticed = Noticed("SIGSTOP")
    for _ in range(trials):
        members = crew.members(3)
        crew.form(members)
        members[2].signal(signal.SIGSTOP)
        start_reducing(members[:2], 32)
        try:
            members[0].answer(timeout_s=0.2)
        except queue.Empty:
            pass
        fault = time.time()
        for member in members[:2]:
            member.tell("cancel")
        answers = [member.answer() for member in members[:2]]
        noticed.add(fault, answers, recovered(crew, members[:2]))
        members[2].kill()
    return noticed.row()


def recovered(crew: Crew, survivors: Sequence[Member]) -> float:
    """Time at which the last survivor holds the sum of the next epoch."""
    crew.form(list(survivors))
    return max(ms(all_reduce(survivors, 1), "at"))


def leaks(crew: Crew) -> list[dict[str, Any]]:
    members = crew.members(2)
    rows = []
    for rebuild in range(REBUILDS + 1):
        crew.form(members)
        all_reduce(members, 1)
        if rebuild % 50 == 0:
            usage = members[0].ask("usage")
            rows.append(
                {
                    "rebuilds": rebuild,
                    "threads": usage["threads"],
                    "descriptors": usage["descriptors"],
                    "rss_MB": usage["rss"] / MB,
                }
            )
    return rows


def start_reducing(members: Sequence[Member], megabytes: int) -> None:
    for seed, member in enumerate(members):
        member.tell("reduce", seed=seed, elements=megabytes * MB // 4)
    for member in members:
        member.answer()


def all_reduce(members: Sequence[Member], megabytes: int) -> list[dict[str, Any]]:
    start_reducing(members, megabytes)
    return [member.answer() for member in members]


def ms(answers: Sequence[dict[str, Any]], field: str) -> list[float]:
    return [answer[field] for answer in answers]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "max": max(values)}


if __name__ == "__main__":
    main()
