"""A real fleet whose rollout workers hand weights on, and whose relay is killed."""

import re

import pytest

from testbed.fleets.local_run import Up
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

SENT = re.compile(r"weights sent .*peer=(\S+) version=(\d+)")


def sent(up: Up, sender: str) -> list[tuple[str, int]]:
    """(receiver, version) of each transfer that the receiver has acknowledged."""
    log = up.run_dir / "logs" / f"{sender}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return [(peer, int(version)) for peer, version in SENT.findall(text)]


def relays(up: Up) -> dict[str, str]:
    """Rollout workers that have handed weights on, with the newest of their receivers."""
    names = [f"rollout-{n}" for n in range(3)]
    return {name: done[-1][0] for name in names if (done := sent(up, name))}


def test_the_fleet_follows_the_trainer_over_relays_and_after_one_was_killed(start: Start) -> None:
    up = start(
        model={"dtype": "bfloat16"},
        train={"steps": 1000, "checkpoint_every": 1000, "eval_every": 1000},
        rollout={"relay_fanout": 1, "relay_stall_s": 5.0},
        fleet={"policy": 1, "rollout": 3},
    )
    up.until(lambda: up.step() >= 3 and len(relays(up)) == 2)
    assert len({peer for peer, _ in sent(up, "policy-0")}) <= 2, "one, and a passing second"
    relay, child = next(iter(relays(up).items()))
    up.kill(relay)
    step = up.step()

    def versions() -> list[int]:
        workers = up.status()["workers"]
        return [int(w["version"]) for w in workers if w["role"] == "rollout"]

    up.until(lambda: up.step() >= step + 3)
    # All three serve what was committed after the death.
    up.until(lambda: len(versions()) == 3 and min(versions()) > step)
    assert child in [w["worker_id"] for w in up.status()["workers"]]
    up.command("stop")
    assert up.wait() == 0
    up.command("ledger", "verify")
