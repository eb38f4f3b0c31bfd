"""Ranks that were started from outside find one another, refuse strangers, and live and die
together."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.rpc.addresses import free_ports
from testbed.patience import patient, until
from tests.fixtures import ranks
from tests.fixtures.ranks import Forked
from tests.fixtures.train_states import tiny_config

SIZE = 3


class Job:
    """The ranks of one replica, each started by itself."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports("127.0.0.1", 1)
        settings = tiny_config(folder).model_dump(mode="json")
        settings["fleet"] |= {"policy_ranks": SIZE, "heartbeat_s": 0.2, "lease_ttl_s": 3.0}
        self.settings = settings
        self.processes: list[Forked] = []

    def start(self, rank: int, scenario: str, *, run: str = "", **place: str) -> Forked:
        given = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            **place,
        }
        settings = json.loads(json.dumps(self.settings))
        settings["fleet"]["policy_ranks"] = int(given["WORLD_SIZE"])
        settings["run"]["name"] = run or settings["run"]["name"]
        process = ranks.start_outside(given, scenario, json.dumps(settings))
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.end()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def met(job: Job) -> list[Forked]:
    """All ranks, which wait for a command."""
    # Rank 0 last: the others wait for it.
    found = {rank: job.start(rank, "wait_for_death") for rank in (2, 1, 0)}
    found[0].until_printed()
    return [found[rank] for rank in range(SIZE)]


def assert_end(processes: list[Forked], *, without: int) -> None:
    """Both end because a rank is silent, and one of them says which."""
    found = [p.end() for p in processes]
    assert [code for code, _ in found] == [1, 1]
    assert any(f"rank {without}: no message" in err for _, err in found), found


def test_ranks_from_outside_do_what_ranks_of_rank_0_do(job: Job) -> None:
    processes = [job.start(rank, "talk") for rank in range(SIZE)]
    status, err = processes[0].end()
    assert status == 0, err
    said = json.loads(processes[0].printed())
    assert said["heard"] == [["attach", {"words": ["ä", 1, None]}]] * SIZE
    assert len(set(said["identities"])) == 1
    assert (said["all_ok"], said["one_not_ok"], said["sum"]) == (True, False, 6.0)
    assert said["listening"] == ["127.0.0.1"]
    # Each in order, and none because another one had gone.
    assert [p.end()[0] for p in processes[1:]] == [0, 0]


@pytest.mark.parametrize("victim", [0, 2])
def test_killing_any_rank_ends_all(job: Job, victim: int) -> None:
    processes = met(job)
    processes[victim].kill()
    others = [p.end() for p in processes if p is not processes[victim]]
    assert [code for code, _ in others] == [1, 1]
    # Whichever notices first: the link between ranks, or the collective in which those above 0
    # wait.
    assert all("rank lost, replica ends" in err or "by peer" in err for _, err in others), others


def test_a_stopped_rank_ends_all_and_itself_when_it_goes_on(job: Job) -> None:
    first, stopped, last = met(job)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert_end([first, last], without=1)
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.end()[0] == 1


def test_ranks_started_again_meet_while_an_old_one_is_still_about(job: Job) -> None:
    """The launcher of one host is quicker than that of the other: rank 0 of the old replica still
    serves the store."""
    old = met(job)
    os.kill(old[0].pid, signal.SIGSTOP)
    assert_end(old[1:], without=0)
    new = [job.start(rank, "talk") for rank in (1, 2)]
    old[0].kill()
    new.append(job.start(0, "talk"))
    assert [p.end()[0] for p in new] == [0, 0, 0]


def test_a_rank_that_died_before_all_were_there_may_come_again(job: Job) -> None:
    first = job.start(1, "talk")
    rank0 = job.start(0, "talk")
    first.kill()
    assert first.end()[0] == -signal.SIGKILL
    rest = [job.start(rank, "talk") for rank in (1, 2)]
    assert [p.end()[0] for p in (rank0, *rest)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"run": "another"}, "run.name is"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 there, 3 on rank 0"),
    ],
)
def test_a_rank_of_another_run_or_world_is_refused_on_both_sides(
    job: Job, place: dict, said: str
) -> None:
    processes = [job.start(0, "talk"), job.start(1, "talk", **place)]
    for process in processes:
        code, err = process.end()
        assert (code, said in err) == (2, True), err


def test_two_processes_of_one_rank_are_told_apart(job: Job) -> None:
    job.start(0, "talk")
    twins = [job.start(1, "talk") for _ in range(2)]
    until(lambda: any(p.has_ended() for p in twins), 120.0)
    (refused,) = (p for p in twins if p.has_ended())
    code, err = refused.end()
    assert (code, "another process is RANK=1 already" in err) == (2, True), err


def test_an_address_that_is_not_this_hosts_is_named(job: Job) -> None:
    code, err = job.start(0, "talk", MASTER_ADDR="192.0.2.1").end()
    assert code == 2
    assert "MASTER_ADDR=192.0.2.1 " in err and "no address of this host" in err, err


def test_torchrun_starts_the_ranks_and_serves_their_store(job: Job) -> None:
    job.settings["fleet"]["policy_ranks"] = 2
    handed = json.dumps({"_config": json.dumps(job.settings)})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.fixtures.ranks", "0", "talk", handed],
        cwd=ranks.ROOT,
        capture_output=True,
        text=True,
        timeout=patient(120),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sum"] == 3.0
