"""A run's alerts arrive: a change of leader, and the end, sent by whoever leads then."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from testbed.controllers import running_controllers
from tests.fixtures.rest import train

APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"


def test_a_lost_leader_and_the_end_of_the_run_are_told_once(tmp_path: Path) -> None:
    got = tmp_path / "alerts"
    command = [sys.executable, "-c", APPEND, str(got)]

    def alerts() -> list[dict[str, Any]]:
        return [json.loads(line) for line in got.read_text().splitlines()] if got.exists() else []

    def until(kind: str) -> None:
        deadline = time.monotonic() + 90
        while not any(alert["kind"] == kind for alert in alerts()):
            assert time.monotonic() < deadline, alerts()
            time.sleep(0.1)

    with running_controllers(
        tmp_path,
        2,
        train={"steps": 4, "checkpoint_every": 2},
        alerts={"command": command, "disk_free_gb": 0.0},
    ) as controllers:
        asyncio.run(train(controllers, 2))
        controllers.started[0].kill()
        until("fault")
        asyncio.run(train(controllers, 2))
        until("end")
    told = alerts()
    assert len({alert["id"] for alert in told}) == len(told)
    assert [alert["kind"] for alert in told][-1] == "end" and "finished" in told[-1]["text"]
