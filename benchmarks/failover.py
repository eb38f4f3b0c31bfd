"""Time without a leader after the leader is killed.

    python -m benchmarks.failover [--trials 20]
    python -m benchmarks.failover --hint --out benchmarks/results/failover_hint.json

Two real controllers run with the default lease and a real Redis. In each trial the leader gets kill
-9 while a client calls it in a closed loop; each call is a registration, so it is journalled. The
result is the time from the kill to the first reply of the new leader. Then the killed controller is
started again, and the next trial begins when it stands by. With ``--hint`` the lease of the dead
process is released, as a supervisor does that observed the exit
(paceline.redis.leader_lease.release_dead).
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import runs
from paceline.config.load import fleet_digest
from paceline.redis.leader_lease import release_dead
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2, common_pb2, worker_pb2
from testbed.fleets.controller_processes import ControllerProcess, Controllers, write_config
from testbed.fleets.controllers import config_of


def main() -> None:
    parser = runs.options("failover", __doc__, "failover")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument(
        "--hint", action="store_true", help="release the lease as a supervisor does"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-failover-") as name:
        directory = Path(name)
        with Controllers(directory, write_config(directory)) as controllers:
            seconds = asyncio.run(_trials(controllers, args.trials, args.hint))
    row: dict[str, Any] = {
        "trials": len(seconds),
        "hint": args.hint,
        "median_s": statistics.median(seconds),
        "max_s": max(seconds),
        "min_s": min(seconds),
        "seconds": seconds,
    }
    print(f"median {row['median_s']:.3f} s, longest {row['max_s']:.3f} s")
    runs.write(args.out, row)


async def _trials(controllers: Controllers, trials: int, hint: bool) -> list[float]:
    processes: dict[str, ControllerProcess] = {}
    for number in range(2):
        process = controllers.start(f"controller-{number}")
        processes[process.id] = process
    config = config_of(controllers)
    control = ControlPlane.from_config(config, [p.address for p in processes.values()])
    seconds = []
    for _ in range(trials):
        leader = await _settled(control, processes)
        before = await _journalled_call(control, config)
        killed = time.perf_counter()
        processes[leader].kill()
        if hint:
            await asyncio.to_thread(
                release_dead, controllers.redis_url, "load", leader, processes[leader].pid
            )
        await _journalled_call(control, config)
        seconds.append(time.perf_counter() - killed)
        assert control.address != processes[leader].address, (before, control.address)
        port = int(processes[leader].address.rsplit(":", 1)[1])
        processes[leader] = await asyncio.to_thread(controllers.start, leader, port)
    await control.close()
    return seconds


async def _settled(control: ControlPlane, processes: dict[str, ControllerProcess]) -> str:
    """Id of the leader, once the other one stands by."""
    while True:
        status = await control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), None)
        pids = {c.controller_id: (c.pid, c.state) for c in status.controllers}
        wanted = {p.id: p.pid for p in processes.values()}
        states = sorted(state for _, state in pids.values())
        if {i: pid for i, (pid, _) in pids.items()} == wanted and states == ["leader", "standby"]:
            return next(i for i, (_, state) in pids.items() if state == "leader")
        await asyncio.sleep(0.1)


async def _journalled_call(control: ControlPlane, config: Any) -> str:
    digest, canonical = fleet_digest(config)
    request = worker_pb2.RegisterRequest(
        caller=common_pb2.Caller(worker_id="rollout-0", incarnation=secrets.randbits(63) | 1),
        role=common_pb2.ROLE_ROLLOUT,
        host="h",
        pid=1,
        config_digest=digest,
        config_json=canonical,
        state_version=-1,
        ranks=1,
    )
    await control.call("WorkerService.Register", request, None)
    return control.address


if __name__ == "__main__":
    main()
