"""How long a real fleet takes to get over each fault.

    python -m benchmarks.recovery [--faults leader-kill,policy-reduce] [--trials 20] [--table]

A whole fleet of a tiny model with the default leases: Redis, 2 controllers, 2 policy replicas (or as
many as the fault is about), 2 rollout workers, restarted by its supervisor. Each trial waits until the fleet is whole, makes one
fault, and reads the journal for what followed: times are the leader's own, from the fault to the
event that shows detection and to the event that shows recovery. ``--table`` only writes the table
of docs/fault-tolerance.md from the results there are. Results of faults that are not measured this
time are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import instants
from benchmarks.runs import RESULTS, machine
from tests.helpers.local_run import Up
from tests.helpers.observed_fleet import Event, ObservedFleet

OUT = RESULTS / "recovery.json"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "fault-tolerance.md"
BEGIN, END = "<!-- recovery table: begin -->", "<!-- recovery table: end -->"
SERVE_LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Trial:
    detect_s: float | None
    recover_s: float
    repeated: str
    """Work done again."""
    joined_s: float | None = None
    """From the registration of the replacement (its model is loaded) to its first share of work."""


@dataclass(frozen=True, slots=True)
class Case:
    run: Callable[[ObservedFleet], Trial]
    what: str
    detected: str
    recovered: str
    """Which event counts as recovery."""
    seen: str
    fleet: tuple[tuple[str, int], ...] = ()
    """What is not as in the usual fleet."""


def kind(name: str) -> Callable[[Event], bool]:
    return lambda e: bool(e["type"] == name)


def of_worker(name: str, worker_id: str) -> Callable[[Event], bool]:
    return lambda e: e["type"] == name and e.get("worker_id") == worker_id


def between(fleet: ObservedFleet, start: int, end: int, name: str) -> list[Event]:
    return [e for _, e in fleet.tail.events[start:end] if e["type"] == name]


# -- controllers and Redis ------------------------------------------------------------------------


def leader_falls(fleet: ObservedFleet, number: signal.Signals) -> Trial:
    leader = fleet.status().leader
    at = fleet.mark()
    t0 = fleet.send(leader, number)
    detected, _, after = fleet.first(kind("TermBegun"), at)
    served, *_ = fleet.first(lambda e: e["type"] != "TermBegun", after)
    if number == signal.SIGSTOP:
        fleet.send(leader, signal.SIGCONT)
    return Trial(detected - t0, served - t0, "none")


def standby_killed(fleet: ObservedFleet) -> Trial:
    leader = fleet.status().leader
    standby = next(n for n in ("controller-0", "controller-1") if n != leader)
    before = fleet.process(standby)
    t0 = fleet.send(standby)

    def back() -> bool:
        found = {c.controller_id: (c.pid, c.state) for c in fleet.status().controllers}
        return found.get(standby, (before.pid, ""))[0] != before.pid

    fleet.until(back)
    return Trial(None, time.time() - t0, "none")


def all_controllers_killed(fleet: ObservedFleet) -> Trial:
    at = fleet.mark()
    t0 = time.time()
    for name in ("controller-0", "controller-1"):
        fleet.send(name)
    detected, _, after = fleet.first(kind("TermBegun"), at)
    served, *_ = fleet.first(lambda e: e["type"] != "TermBegun", after)
    return Trial(detected - t0, served - t0, "none")


def redis_killed(fleet: ObservedFleet) -> Trial:
    killed = fleet.redis_process()
    at = fleet.mark()
    t0 = time.time()
    os.kill(killed.pid, signal.SIGKILL)
    fleet.until(lambda: fleet.redis_process() != killed)
    detected = time.time()
    while True:
        t, _, at = fleet.first(kind("StepCommitted"), at)
        if t > detected:
            return Trial(detected - t0, t - t0, "none")


def redis_stopped(fleet: ObservedFleet) -> Trial:
    """10 s: twice the lease. Recovery counts from its continuation."""
    pid = fleet.redis_process().pid
    os.kill(pid, signal.SIGSTOP)
    stopped = time.time()
    fleet.until(lambda: "Redis" in fleet.status().phase)
    detected = time.time() - stopped
    time.sleep(max(0.0, 10.0 - detected))
    at = len(fleet.tail.events)
    os.kill(pid, signal.SIGCONT)
    t0 = time.time()
    while True:
        t, _, at = fleet.first(kind("StepCommitted"), at)
        if t > t0:
            return Trial(detected, t - t0, "none")


# -- policy replicas ------------------------------------------------------------------------------


def replica_falls(
    instant: str, number: signal.Signals = signal.SIGKILL
) -> Callable[[ObservedFleet], Trial]:
    def trial(fleet: ObservedFleet) -> Trial:
        victim = "policy-1"
        if instant == "send":
            links = [e for _, e in fleet.tail.events if e["type"] == "LinkAssigned"]
            victim = links[-1]["publisher"]
        at = fleet.mark()
        t0 = fleet.fall(victim, instant, number)
        detected, _, after = fleet.first(of_worker("WorkerDied", victim), at)
        committed, _, end = fleet.first(kind("StepCommitted"), after)
        open_step = [e for _, e in fleet.tail.events[:after] if e["type"] == "StepOpened"][-1:]
        moved = between(fleet, at, end, "StepDealt")
        lost = len(open_step[0]["shards"].get(victim, ())) if moved and open_step else 0
        if number == signal.SIGSTOP:
            fleet.send(victim, signal.SIGCONT)
        registered, _, after = fleet.first(
            of_worker("WorkerRegistered", victim), after, SERVE_LIMIT_S
        )
        voted, *_ = fleet.first(of_worker("VoteCast", victim), after, SERVE_LIMIT_S)
        repeated = f"{lost} of 4 groups of the step" if lost else "none"
        return Trial(detected - t0, committed - t0, repeated, voted - registered)

    return trial


def seeder_killed(fleet: ObservedFleet) -> Trial:
    """The one of two survivors that seeds the replacement of the third."""
    joiner = "policy-2"
    mesh = [e for _, e in fleet.tail.events if e["type"] == "MeshFormed"][-1]
    source = next(m["worker_id"] for m in mesh["members"] if m["worker_id"] != joiner)
    fallen = instants.fall(fleet.armed, fleet.process(source).pid, "seed")
    at = fleet.mark()
    fleet.send(joiner)
    t0 = fallen(SERVE_LIMIT_S)
    detected, _, after = fleet.first(of_worker("WorkerDied", source), at)
    committed, *_ = fleet.first(kind("StepCommitted"), after)
    return Trial(detected - t0, committed - t0, "none")


def all_replicas_killed(fleet: ObservedFleet) -> Trial:
    at = fleet.mark()
    t0 = time.time()
    for name in sorted(w for w in fleet.workers() if w.startswith("policy")):
        fleet.send(name)
    detected, _, after = fleet.first(kind("WorkerDied"), at)
    registered, *_ = fleet.first(kind("WorkerRegistered"), after, SERVE_LIMIT_S)
    committed, _, end = fleet.first(kind("StepCommitted"), after, SERVE_LIMIT_S)
    steps = sum(e["from_step"] - e["step"] for e in between(fleet, at, end, "RolledBack"))
    return Trial(
        detected - t0, committed - t0, f"{steps} steps since the checkpoint", committed - registered
    )


# -- rollout workers ------------------------------------------------------------------------------


def rollout_falls(
    instant: str, number: signal.Signals = signal.SIGKILL
) -> Callable[[ObservedFleet], Trial]:
    def trial(fleet: ObservedFleet) -> Trial:
        at = fleet.mark()
        t0 = fleet.fall("rollout-1", instant, number)
        detected, _, after = fleet.first(of_worker("WorkerDied", "rollout-1"), at)
        fleet.mark()
        released = [
            e["task_id"]
            for e in between(fleet, at, len(fleet.tail.events), "TaskReleased")
            if e["worker_id"] == "rollout-1"
        ]
        recovered = detected
        for task_id in released:
            t, *_ = fleet.first(leases(task_id), at)
            recovered = max(recovered, t)
        if number == signal.SIGSTOP:
            fleet.send("rollout-1", signal.SIGCONT)
        registered, _, after = fleet.first(
            of_worker("WorkerRegistered", "rollout-1"), after, SERVE_LIMIT_S
        )
        leased, *_ = fleet.first(of_worker("TasksLeased", "rollout-1"), after, SERVE_LIMIT_S)
        return Trial(detected - t0, recovered - t0, f"{len(released)} prompts", leased - registered)

    def leases(task_id: str) -> Callable[[Event], bool]:
        return lambda e: (
            e["type"] == "TasksLeased"
            and e["worker_id"] != "rollout-1"
            and any(lease[0] == task_id for lease in e["leases"])
        )

    return trial


# -- the supervisor -------------------------------------------------------------------------------


def supervisor_killed(fleet: ObservedFleet) -> Trial:
    fleet.up.process.kill()
    fleet.up.process.wait()
    t0 = time.time()
    fleet.up = Up(fleet.config, fleet.run_dir, "--attach", environment=fleet.environment)
    own = fleet.up.process.pid
    fleet.until(lambda: fleet.record().supervisor.pid == own)
    return Trial(None, time.time() - t0, "none")


def power_cut(fleet: ObservedFleet) -> Trial:
    t0 = time.time()
    fleet.kill_everything()
    killed = time.time()
    fleet.start_again()
    at = 0
    while True:
        committed, _, at = fleet.first(kind("StepCommitted"), at, SERVE_LIMIT_S)
        if committed > killed:
            break
    rolled = [e for t, e in fleet.tail.events[:at] if e["type"] == "RolledBack" and t > t0]
    steps = sum(e["from_step"] - e["step"] for e in rolled)
    return Trial(None, committed - killed, f"{steps} steps since the checkpoint")


STOP = signal.SIGSTOP
EXIT = "process exit, told by the supervisor"
LEASE = "lease (5 s) runs out"
COMMIT = "next commit"
NOTHING = "a line in the console; the step goes on"
CASES: dict[str, Case] = {
    "leader-kill": Case(
        lambda f: leader_falls(f, signal.SIGKILL),
        *("leader: kill -9", "lease released by the supervisor, else 1 s lease", "first event"),
        "new leader in the status; requests wait and are answered",
    ),
    "leader-stop": Case(
        lambda f: leader_falls(f, STOP),
        *("leader: SIGSTOP", "leader lease (1 s) runs out", "first event"),
        "the same; the old leader writes nothing when it wakes",
    ),
    "standby-kill": Case(
        standby_killed,
        *("standby: kill -9", "process exit", "stands by again"),
        "nothing but a line in the console",
    ),
    "controllers-kill": Case(
        all_controllers_killed,
        *("all controllers: kill -9", "process exit", "first event"),
        "status unanswered meanwhile; no worker restarts",
    ),
    "redis-kill": Case(
        redis_killed,
        *("embedded Redis: kill -9", "process exit", COMMIT),
        "a line in the console; nobody restarts",
    ),
    "redis-stop": Case(
        redis_stopped,
        *("Redis: SIGSTOP for 10 s", "appends unanswered", "commit after SIGCONT"),
        "status `paused: Redis ...`; nobody is declared dead",
    ),
    **{
        f"policy-{instant}": Case(
            replica_falls(instant), f"one of two replicas: kill -9 {where}", EXIT, COMMIT, NOTHING
        )
        for instant, where in (
            ("idle", "while idle"),
            ("forward", "in forward"),
            ("reduce", "in the all-reduce"),
            ("vote", "between vote and commit"),
            ("commit", "between commit and optimizer step"),
            ("send", "sending weights to a rollout worker"),
        )
    },
    "policy-stop": Case(
        replica_falls("reduce", STOP),
        *("one of two replicas: SIGSTOP in the all-reduce", LEASE, COMMIT),
        "the step takes a lease longer; awake, it is taken back and seeded",
    ),
    "policy-three": Case(
        replica_falls("reduce"),
        *("one of three replicas: kill -9 in the all-reduce", EXIT, COMMIT, NOTHING),
        fleet=(("policy", 3),),
    ),
    "policy-seed": Case(
        seeder_killed,
        *("one of three replicas: kill -9 while seeding a joiner", EXIT, COMMIT, NOTHING),
        fleet=(("policy", 3),),
    ),
    "policy-last": Case(
        all_replicas_killed,
        *("the only replica: kill -9", EXIT, COMMIT),
        "steps since the newest checkpoint are trained again, on the same groups",
        fleet=(("policy", 1),),
    ),
    "policies-kill": Case(
        all_replicas_killed,
        *("all replicas: kill -9", EXIT, COMMIT),
        "steps since the newest checkpoint are trained again, on the same groups",
    ),
    **{
        f"rollout-{instant}": Case(
            rollout_falls(instant),
            *(f"rollout worker: kill -9 {where}", EXIT, "its tasks leased to others"),
            "a line in the console",
        )
        for instant, where in (
            ("generate", "mid-generation"),
            ("submit", "mid-submit"),
            ("receive", "mid-weight-receive"),
        )
    },
    "rollout-stop": Case(
        rollout_falls("generate", STOP),
        *("rollout worker: SIGSTOP", LEASE, "its tasks leased to others"),
        "a line in the console; awake, it is taken back",
    ),
    "supervisor-kill": Case(
        supervisor_killed,
        *("`paceline up`: kill -9, then `--attach`", "you", "fleet taken over"),
        "the run goes on without it; nothing is restarted until --attach",
    ),
    "power-cut": Case(
        power_cut,
        *("power cut: kill -9 of everything, then `paceline up` again", "you", COMMIT),
        "the run goes on from its newest checkpoint",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", default=",".join(CASES), help="comma-separated, of the table")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--table", action="store_true", help="write the page's table only")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    names = [name for name in args.faults.split(",") if name]
    if unknown := set(names) - set(CASES):
        sys.exit(f"--faults: unknown {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if not args.table:
        measure(names, args.trials, args.out)
    write_table(args.out)


def measure(names: list[str], trials: int, out: Path) -> None:
    fleets = dict.fromkeys(CASES[name].fleet for name in names)
    for changes in fleets:
        measure_on(changes, [n for n in names if CASES[n].fleet == changes], trials, out)


def measure_on(
    changes: tuple[tuple[str, int], ...], names: list[str], trials: int, out: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-recovery-") as where:
        fleet = ObservedFleet(Path(where), fleet=dict(changes))
        try:
            fleet.settled(180.0)
            for name in names:
                found = []
                for _ in range(trials):
                    fleet.settled(180.0)
                    found.append(CASES[name].run(fleet))
                row = summarise(found)
                store(out, name, row)
                print(f"{name:<18} {json.dumps({k: row[k] for k in SHOWN})}", flush=True)
                fleet.assert_sound()
            fleet.settled(180.0)
            counts = fleet.assert_sound()
            print(f"ledger: {json.dumps(counts)}")
        finally:
            fleet.close()


SHOWN = ("trials", "detect_median_s", "recover_median_s", "recover_p99_s", "repeated")


def summarise(trials: list[Trial]) -> dict[str, Any]:
    detect = [t.detect_s for t in trials if t.detect_s is not None]
    joined = [t.joined_s for t in trials if t.joined_s is not None]
    repeated = sorted({t.repeated for t in trials}, key=_amount)
    return {
        "trials": len(trials),
        **of("detect", detect),
        **of("recover", [t.recover_s for t in trials]),
        **of("joined", joined),
        "repeated": repeated[0]
        if len(repeated) == 1
        else f"{_amount(repeated[0])} to {repeated[-1]}",
        "load_average": os.getloadavg()[0],
        "machine": machine(),
    }


def _amount(repeated: str) -> int:
    first = repeated.partition(" ")[0]
    return int(first) if first.isdigit() else 0


def of(name: str, values: list[float]) -> dict[str, Any]:
    """Median and 99th percentile (the largest, for fewer than 100), and every value."""
    if not values:
        return {f"{name}_median_s": None, f"{name}_p99_s": None, f"{name}_s": []}
    ranked = sorted(values)
    return {
        f"{name}_median_s": statistics.median(ranked),
        f"{name}_p99_s": ranked[math.ceil(0.99 * len(ranked)) - 1],
        f"{name}_s": values,
    }


def store(out: Path, name: str, row: dict[str, Any]) -> None:
    rows = json.loads(out.read_text()) if out.exists() else {}
    rows[name] = row
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({n: rows[n] for n in CASES if n in rows}, indent=1) + "\n")


def write_table(out: Path) -> None:
    """Replaces what is between the marks in the page."""
    rows = json.loads(out.read_text())
    lines = [
        "| fault | detected by | detected after, median / p99 (s) | recovered when | after, median"
        " / p99 (s) | work repeated | trials | what a user saw |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        if (row := rows.get(name)) is None:
            continue
        pairs = [
            f"{row[f'{w}_median_s']:.2f} / {row[f'{w}_p99_s']:.2f}"
            if row[f"{w}_median_s"] is not None
            else "n/a"
            for w in ("detect", "recover")
        ]
        cells = (case.what, case.detected, pairs[0], case.recovered, pairs[1], row["repeated"])
        lines.append(f"| {' | '.join(cells)} | {row['trials']} | {case.seen} |")
    joined = {
        role: [s for n, row in rows.items() if n.startswith(role) for s in row["joined_s"]]
        for role in ("policy-", "rollout-")
    }
    for role, what in (
        ("policy-", "policy replica: first vote"),
        ("rollout-", "rollout worker: first lease"),
    ):
        if joined[role]:
            found = of("joined", joined[role])
            lines += [
                "",
                f"Replacement {what} {found['joined_median_s']:.2f} s (median; p99 "
                f"{found['joined_p99_s']:.2f} s, {len(joined[role])} trials) after it registered "
                "with its model loaded.",
            ]
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    PAGE.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n" + END + tail)
    print(f"table written to {PAGE}")


if __name__ == "__main__":
    main()
