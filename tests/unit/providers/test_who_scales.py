"""The answer to a scaling request: who starts and drains workers, or that nobody does."""

import os
from pathlib import Path

from paceline.observe.fleet_file import FleetRecord, ProcessId, ProcessRecord
from paceline.providers.base import who_scales

HERE = ProcessId.of(os.getpid())
GONE = ProcessId(1, 0.0)


def test_the_one_who_scales_is_named_and_if_there_is_nobody_the_remedy(tmp_path: Path) -> None:
    by_hand = who_scales("local", tmp_path)
    assert by_hand.startswith("nobody starts or drains workers")
    assert "`paceline rollout`" in by_hand

    fleet = FleetRecord("demo", HERE)
    fleet.processes.append(ProcessRecord("policy-0", "policy", "log", ids=[HERE]))
    fleet.write(tmp_path)
    assert f"`paceline up` (pid {os.getpid()}) starts or drains" in who_scales("local", tmp_path)

    fleet.supervisor = GONE
    fleet.write(tmp_path)
    alone = who_scales("local", tmp_path)
    assert alone.startswith("nobody starts or drains workers") and "--attach" in alone

    assert "the kubernetes provider" in who_scales("kubernetes", tmp_path)
