"""A run's alerts arrive: a change of leader, and the end, sent by whoever leads then."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.workers.fake_workers import FakePolicy
from tests.fixtures.rest import TextRollout

APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"


async def work(controllers: Controllers, done: Callable[[], bool]) -> None:
    """A trainer and a generator work until ``done``, which is first asked after a step."""
    config, where = config_of(controllers), addresses(controllers)
    trainer = FakePolicy(config, where, "policy-0")
    workers = [trainer, TextRollout(config, where, "rollout-0", tasks_a_lease=2)]
    await asyncio.gather(*(w.start() for w in workers))
    loops = [asyncio.create_task(w.work(lambda: False)) for w in workers]
    await until(lambda: trainer.timings.steps >= 1)
    await until(done, 90.0)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await asyncio.gather(*(w.stop(goodbye=False) for w in workers))


def test_a_lost_leader_and_the_end_of_the_run_are_told_once(tmp_path: Path) -> None:
    got = tmp_path / "alerts"
    command = [sys.executable, "-c", APPEND, str(got)]

    def alerts() -> list[dict[str, Any]]:
        return [json.loads(line) for line in got.read_text().splitlines()] if got.exists() else []

    def told_of(kind: str) -> bool:
        return any(alert["kind"] == kind for alert in alerts())

    with running_controllers(
        tmp_path,
        2,
        train={"steps": 4, "checkpoint_every": 2},
        alerts={"command": command, "disk_free_gb": 0.0},
    ) as controllers:
        asyncio.run(work(controllers, lambda: controllers.started[0].kill() or True))
        asyncio.run(work(controllers, lambda: told_of("fault") and told_of("end")))
    told = alerts()
    assert len({alert["id"] for alert in told}) == len(told)
    assert [alert["kind"] for alert in told][-1] == "end" and "finished" in told[-1]["text"]
