"""The ranks of a replica understand one another, and live and die together."""

import contextlib
import json
import os
import signal

import psutil
import pytest

from testbed.patience import Patience, patient
from tests.fixtures import ranks


def test_ranks_hear_the_leader_and_agree():
    said = ranks.run(3, "talk")
    assert said["heard"] == [["attach", {"words": ["ä", 1, None]}]] * 3
    assert len(set(said["identities"])) == 1
    assert said["all_ok"] is True
    assert said["one_not_ok"] is False
    assert (said["bytes"], said["none"]) == (100_000, 0)
    assert said["sum"] == 6.0
    assert said["over"] == [[True, True, False]] * 3
    assert said["threads"] == [1, 1, 1]
    # The store has no password: it is for this machine, and holds no configuration.
    assert said["listening"] == ["127.0.0.1"]
    assert said["config_in_store"] is False
    assert said["admitting"] == [1, 0, 0], "the store alone"


def test_killing_a_rank_ends_the_whole_replica():
    """Within the minute that is waited for; the shortest time limit of a collective is half an
    hour."""
    process, pids = _idle_replica(3, forks=2)
    (holds_its_link,) = psutil.Process(pids[2]).children()
    # Ctrl-C in a terminal reaches every rank; it is for the leader to decide what it means.
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(pids[1], signum)
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(pids[1]).wait(0.2)
    os.kill(pids[2], signal.SIGKILL)
    try:
        assert process.wait(patient(60)) == -signal.SIGKILL
    finally:
        holds_its_link.send_signal(signal.SIGKILL)
    assert "rank lost, replica ends" in process.stderr.read()
    _gone(pids)


def test_a_stopped_follower_dies_with_its_leader():
    process, pids = _idle_replica(2, stopped=1)
    process.kill()
    process.wait(patient(60))
    _gone(pids)


def _idle_replica(size, **arguments):
    process = ranks.start(size, "wait_for_death", **arguments)
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return process, json.loads(line)


def _gone(pids) -> None:
    """Waits until none of the processes runs any more."""
    patience = Patience(60)
    while running := [pid for pid in pids if _runs(pid)]:
        assert patience.left(), f"{running} still run"
        with contextlib.suppress(psutil.Error):
            psutil.Process(running[-1]).wait(0.01)


def _runs(pid: int) -> bool:
    """A zombie does not: it waits for init, which is in no hurry in a container."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
