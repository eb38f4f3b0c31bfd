"""Faults of ``paceline up``, and power cuts."""

from __future__ import annotations

import time

from benchmarks.recovery.case import SERVE_LIMIT_S, Trial, commit_after
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.fleets.local_run import Up


def supervisor_killed(fleet: LaunchedFleet) -> Trial:
    fleet.up.process.kill()
    fleet.up.process.wait()
    t0 = time.time()
    fleet.up = Up(fleet.config, fleet.run_dir, "--attach", environment=fleet.environment)
    pid = fleet.up.process.pid
    fleet.until(lambda: fleet.record().supervisor.pid == pid)
    return Trial(None, time.time() - t0)


def power_cut(fleet: LaunchedFleet) -> Trial:
    t0 = time.time()
    fleet.kill_everything()
    killed = time.time()
    fleet.start_again()
    committed, at = commit_after(fleet, killed, 0, SERVE_LIMIT_S)
    rolled = [e for t, e in fleet.tail.events[:at] if e["type"] == "RolledBack" and t > t0]
    steps = sum(e["from_step"] - e["step"] for e in rolled)
    return Trial(None, committed - killed, f"{steps} steps since the checkpoint")


TRIALS = {"supervisor-kill": supervisor_killed, "power-cut": power_cut}
