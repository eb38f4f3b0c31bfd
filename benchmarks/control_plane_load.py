"""Load process of the control-plane benchmark: rollout clients, and in the first process the policy
replica.

It works from its start, and takes orders from standard input, one a line:

    begin    measure from now on
    count    print the number of accepted groups so far
    end      print the measurement as one JSON object, and exit

It prints ``ready`` once every client is registered and the time for warming up is over.
"""

import asyncio
import json
import sys
import time
from typing import Any

from paceline.config.load import load_config
from testbed.workers.fake_workers import FakePolicy, FakeRollout, FakeWorker, Timings

KINDS = ("lease", "submit", "vote")


def main() -> None:
    asyncio.run(_load(json.loads(sys.argv[1])))


async def _load(order: dict[str, Any]) -> None:
    workers = _workers(order)
    await asyncio.gather(*(worker.start() for worker in workers))
    tasks = [asyncio.create_task(worker.work(lambda: False)) for worker in workers]
    await asyncio.sleep(order["warm_up"])
    print("ready", flush=True)
    began = cpu = 0.0
    while (line := await asyncio.to_thread(sys.stdin.readline)) != "end\n":
        if line == "begin\n":
            for worker in workers:
                worker.timings = Timings()
            began, cpu = time.perf_counter(), time.process_time()
        elif line == "count\n":
            print(sum(worker.timings.groups for worker in workers), flush=True)
        else:
            raise SystemExit(f"unknown order {line!r}")
    measured = {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        **{n: sum(getattr(w.timings, n) for w in workers) for n in _COUNTS},
        **{kind: [t for w in workers for t in getattr(w.timings, kind)] for kind in KINDS},
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(worker.stop(goodbye=False) for worker in workers))
    print(json.dumps(measured), flush=True)


_COUNTS = ("groups", "steps", "refused", "errors")


def _workers(order: dict[str, Any]) -> list[FakeWorker]:
    config = load_config(order["config"], [f"auth.token_file={order['token_file']}"])
    addresses = [order["address"]]
    rollouts = [
        FakeRollout(
            config,
            addresses,
            f"rollout-{number}",
            tokens=order["tokens"],
            tasks_a_lease=order["tasks"],
            groups_a_submit=order["groups_a_submit"],
        )
        for number in order["clients"]
    ]
    if not order["policy"]:
        return [*rollouts]
    return [FakePolicy(config, addresses, "policy-0"), *rollouts]


if __name__ == "__main__":
    main()
