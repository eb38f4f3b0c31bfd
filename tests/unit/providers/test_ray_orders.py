"""Ray gets everything that a worker needs, and no secret."""

import json
from pathlib import Path

import pytest

from paceline.config.load import fleet_digest, load_config
from paceline.providers.ray import RayProvider
from paceline.v1 import admin_pb2
from testbed.fleets.controller_processes import write_config

SECRETS = {"PACELINE_TOKEN": "t0ken-of-the-run-0123", "password": "p4ssword-of-redis"}


def test_no_secret_is_among_the_arguments_of_an_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reaches the Ray cluster can read them."""
    monkeypatch.setenv("PACELINE_TOKEN", SECRETS["PACELINE_TOKEN"])
    url = f"redis://:{SECRETS['password']}@redis:6379/0"
    path = write_config(tmp_path, redis={"url": url}, controller={"host": "0.0.0.0"})
    config = load_config(path, ["fleet.provider=ray"])

    async def drain(worker: admin_pb2.WorkerStatus) -> None: ...

    order = RayProvider(config, "run", drain)._order("rollout", "r0", admin_pb2.StatusReply())
    assert not [name for name, value in SECRETS.items() if value in json.dumps(order)]
    there = tmp_path / "there.toml"
    there.write_text(order["config"])
    assert fleet_digest(load_config(there, [])) == fleet_digest(config), "the controller accepts it"
