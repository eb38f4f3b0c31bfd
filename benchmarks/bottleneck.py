"""Bottleneck sentences tried: six limits, each told by the controller, then lifted by its own
remedy.

    python -m benchmarks.bottleneck [--cases staleness rewards] [--seconds 15]

A real controller with a real Redis; workers of emulated durations
(``testbed/workers/emulated_workers.py``), so that each limit is known. A case is run as it is and
then with the change that the sentence names, everything else equal. Rates are committed steps per
second of the last ``--seconds``.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import runs
from paceline.v1 import admin_pb2
from testbed.faults.tcp_proxy import TcpProxy
from testbed.fleets.controllers import addresses, config_of, control_of, running_controllers
from testbed.redis.redis_process import throwaway_redis
from testbed.workers.emulated_workers import Durations, EmulatedPolicy, EmulatedRollout

GROUPS = 8
"""Of a step."""
ASK_S = 20.0


@dataclass(frozen=True, slots=True)
class Setting:
    durations: Durations = field(default_factory=Durations)
    policies: int = 1
    rollouts: int = 1
    max_staleness: int = 4
    redis_delay_s: float = 0.0
    """One way, between the controllers and Redis."""


@dataclass(frozen=True, slots=True)
class Case:
    setting: Setting
    remedy: Callable[[Setting, str], Setting]
    """Of the setting and the sentence."""


def named_staleness(sentence: str) -> int:
    """The ``max_staleness`` that the sentence advises."""
    found = re.search(r"train\.max_staleness(?: \(now \d+\))? to (\d+)", sentence)
    if found is None:
        raise SystemExit(f"the sentence names no max_staleness: {sentence}")
    return int(found[1])


def durations(**changes: Any) -> Durations:
    return replace(Durations(), **changes)


CASES: dict[str, Case] = {
    "trainers": Case(
        Setting(durations(compute_s=0.08, slots=16)),
        lambda s, _: replace(s, policies=s.policies + 1),
    ),
    "generation": Case(
        Setting(durations(generate_s=0.4, slots=3)),
        lambda s, _: replace(s, rollouts=s.rollouts + 1),
    ),
    "rewards": Case(
        Setting(durations(reward_s=0.25, reward_processes=1)),
        lambda s, _: replace(s, durations=replace(s.durations, reward_processes=2)),
    ),
    "staleness": Case(
        Setting(durations(reward_s=1.5, slots=64), max_staleness=1),
        lambda s, said: replace(s, max_staleness=named_staleness(said)),
    ),
    "controller": Case(
        Setting(durations(compute_s=0.01, slots=16), redis_delay_s=0.06),
        lambda s, _: replace(s, redis_delay_s=0.0),
    ),
    "weights": Case(
        Setting(durations(transfer_s=1.2, slots=64), max_staleness=1),
        lambda s, said: replace(s, max_staleness=named_staleness(said)),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=15.0, help="measured window")
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds before it")
    parser.add_argument(
        "--out", type=Path, help="JSON; default: benchmarks/results/bottleneck.json"
    )
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": runs.machine(), "seconds": args.seconds, "cases": {}}
    rows = []
    for name in args.cases:
        found = asyncio.run(tried(CASES[name], args))
        result["cases"][name] = found
        before, after = found["before"], found["after"]
        gain = after["steps_per_s"] / before["steps_per_s"]
        found["gain"] = gain
        right = "yes" if before["bottleneck"] == name else f"no: {before['bottleneck']}"
        rates = [f"{run['steps_per_s']:.2f}" for run in (before, after)]
        rows.append([name, right, found["change"], *rates, f"{gain:.2f}", after["bottleneck"]])
        print(f"{name}: {before['pace']}", file=sys.stderr)
    header = ["limit", "told", "its remedy", "steps/s before", "after", "times", "then told"]
    print(runs.table(header, rows))
    print(runs.write("bottleneck", result, args.out))
    wrong = [n for n, f in result["cases"].items() if f["before"]["bottleneck"] != n]
    slower = [n for n, f in result["cases"].items() if f["gain"] <= 1.0]
    return 1 if wrong or slower else 0


async def tried(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    before = await measured(case.setting, args)
    lifted = case.remedy(case.setting, before["pace"])
    after = await measured(lifted, args)
    return {
        "change": change(case.setting, lifted),
        "before": {**before, "setting": asdict(case.setting)},
        "after": {**after, "setting": asdict(lifted)},
    }


def change(before: Setting, after: Setting) -> str:
    """ "max_staleness 1 to 9"."""
    flat = [{**asdict(s), **asdict(s)["durations"]} for s in (before, after)]
    return ", ".join(
        f"{name} {flat[0][name]:g} to {value:g}"
        for name, value in flat[1].items()
        if not isinstance(value, dict) and flat[0][name] != value
    )


async def measured(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Rate, kind and sentence of a run with ``setting``."""
    with ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sections: dict[str, Any] = {
            "train": {"groups_per_step": GROUPS, "max_staleness": setting.max_staleness},
            "rollout": {"group_size": 2, "max_tokens": 16},
            "reward": {"processes": max(1, setting.durations.reward_processes)},
        }
        if setting.redis_delay_s:
            url = urlsplit(stack.enter_context(throwaway_redis(where / "redis")))
            proxy = stack.enter_context(TcpProxy((str(url.hostname), int(url.port or 0))))
            proxy.delay_s = setting.redis_delay_s
            sections["redis"] = {"url": url._replace(netloc=proxy.address).geturl()}
        controllers = stack.enter_context(running_controllers(where, **sections))
        config, targets = config_of(controllers), addresses(controllers)
        d = setting.durations
        trainers = [
            EmulatedPolicy(config, targets, f"policy-{i}", d) for i in range(setting.policies)
        ]
        workers = [
            *trainers,
            *(EmulatedRollout(config, targets, f"rollout-{i}", d) for i in range(setting.rollouts)),
        ]
        await asyncio.gather(*(worker.start() for worker in workers))
        loops = [asyncio.create_task(worker.work(lambda: False)) for worker in workers]
        try:
            await asyncio.sleep(args.warm_up)
            begun = trainers[0].timings.steps
            await asyncio.sleep(args.seconds)
            steps = trainers[0].timings.steps - begun
            control = control_of(controllers)
            said = await control.call("AdminService.Why", admin_pb2.WhyRequest(), ASK_S)
            await control.close()
        finally:
            for loop in loops:
                loop.cancel()
            ended = await asyncio.gather(*loops, return_exceptions=True)
            await asyncio.gather(*(worker.stop(goodbye=False) for worker in workers))
        failed = [e for e in ended if isinstance(e, Exception)]
        if failed:
            raise failed[0]
    return {
        "steps_per_s": steps / args.seconds,
        "bottleneck": said.bottleneck,
        "pace": said.pace,
        "diagnosis": said.sentence,
    }


if __name__ == "__main__":
    raise SystemExit(main())
