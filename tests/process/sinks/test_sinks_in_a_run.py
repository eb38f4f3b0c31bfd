"""Sinks and alerts of real controllers: one leader after the other, beside sinks that hang and that
are gone."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from paceline.observe.run_files import read_lines
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import running_controllers, until, working_fleet
from tests.fakes.scripted_sinks import recorded
from tests.fixtures.rest import rest_url
from tests.unit.sinks.test_sink_tensorboard import read_as_tensorboard_does

SINKS = [
    "tensorboard",
    *(f"tests.fakes.scripted_sinks:{n}Sink" for n in ("Recording", "Hanging", "Broken")),
]


ALERT = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """What the run itself has written down: one line a point."""
    return list(read_lines(run_dir / "metrics.jsonl"))


def curve(run_dir: Path, tag: str) -> list[int]:
    found = read_as_tensorboard_does(run_dir / "tensorboard")
    return [step for name, step, _ in found if name == tag]


def metric(url: str, name: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                return {s.labels["sink"]: s.value for s in family.samples if s.name == name}
    return {}


async def _kill_the_leader_of_a_working_fleet(controllers: Controllers) -> None:
    run_dir = controllers.run_dir
    async with working_fleet(controllers, rollouts=1) as (trainers, _):
        await until(lambda: len(recorded(run_dir)) >= 3)
        for sign in ("hanging", "broken"):
            await until(lambda s=sign: (run_dir / s).exists())  # type: ignore[misc]
        controllers.started[0].kill()
        steps = trainers[0].timings.steps
        await until(lambda: trainers[0].timings.steps >= steps + 3)
        last = trainers[0]
    # At rest: what was trained is written down, and that is all there is to write.
    await until(lambda: rows(run_dir)[-1]["step"] >= last.trained[-1][0])
    await until(lambda: len(rows(run_dir)) == len(recorded(run_dir)))
    await until(lambda: len(curve(run_dir, "train/loss")) >= len(rows(run_dir)))


def test_a_new_leader_goes_on_and_bad_sinks_delay_nobody(tmp_path: Path) -> None:
    told_of = tmp_path / "alerts"
    alerts = {"command": [sys.executable, "-c", ALERT, str(told_of)], "disk_free_gb": 0.0}
    settings: dict[str, Any] = {"metrics": {"sinks": SINKS}, "fleet": {"lease_ttl_s": 60.0}}
    settings["alerts"] = alerts
    with running_controllers(tmp_path, 2, **settings) as controllers:
        run_dir = controllers.run_dir
        asyncio.run(_kill_the_leader_of_a_working_fleet(controllers))
        asyncio.run(until(told_of.exists))
        (alert,) = map(json.loads, told_of.read_text().splitlines())
        assert alert["kind"] == "fault", "the loss of the leader, once"
        lines, truth = recorded(run_dir), rows(run_dir)
        assert [(x["kind"], x["step"]) for x in lines] == [(x["kind"], x["step"]) for x in truth]
        assert [x["number"] for x in lines] == sorted({x["number"] for x in lines})
        assert len({x["writer"] for x in lines}) == 2, "both leaders wrote"
        assert len({x["run"] for x in lines}) == 1, "into one run"
        # A point that the killed leader had just written may be repeated by the next one.
        assert list(dict.fromkeys(curve(run_dir, "train/loss"))) == [x["step"] for x in truth]
        url = rest_url(controllers, 1)
        failing = metric(url, "paceline_sink_failing")
        assert failing[SINKS[3]] == 1 and failing["tensorboard"] == 0
        assert metric(url, "paceline_sink_points_total")["tensorboard"] > 0
        told = {s["name"]: s for s in httpx.get(f"{url}/api/v1/run", timeout=60).json()["sinks"]}
        assert "sink.example" in told[SINKS[3]]["trouble"] and not told["tensorboard"]["trouble"]
        # A process with a sink that never comes back still ends when it is told to.
        last = controllers.started[1]
        last.process.terminate()
        assert last.process.wait(60) == 0
