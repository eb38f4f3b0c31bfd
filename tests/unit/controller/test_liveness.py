"""Who is declared dead, on what evidence, and who is not."""

from collections.abc import ValuesView
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest

from controller.fleet.liveness import FORM_DELAY_S, Liveness
from controller.ledger import decisions as cmd
from controller.ledger.state.fleet import Worker
from tests.fixtures.ledgers import Driven

LIMITS = SimpleNamespace(lease_ttl_s=5.0, suspect_grace_s=1.0, wedged_after_s=60.0)


@dataclass
class Report:
    caller: SimpleNamespace
    progress: int = 0
    busy: bool = False
    held_leases: list[SimpleNamespace] = field(default_factory=list)


class Watched:
    """A driven ledger whose leader watches it; commands of every tick are executed."""

    def __init__(self, *policy: str) -> None:
        self.run = Driven()
        self.now = 0.0
        self.liveness = Liveness(LIMITS)
        self.liveness.begin(self.run.ledger, self.now)
        self.run.policy(*policy)
        self.run.rollout("r0")
        for worker_id in self.run.current:
            self.hear(worker_id)

    def hear(self, worker_id: str, **report: object) -> None:
        who = SimpleNamespace(worker_id=worker_id, incarnation=self.run.current[worker_id])
        self.liveness.observe(Report(who, **report), self.now)  # type: ignore[arg-type]

    def lose(self, worker_id: str) -> None:
        self.liveness.session_lost(worker_id, self.run.current[worker_id], self.now)

    def suspected(self, worker_id: str) -> bool:
        found = self.liveness.prognosis(worker_id, self.run.current[worker_id], self.now)
        return found is not None and found.suspect

    def complain(self, worker_id: str) -> None:
        epoch = self.run.state.fleet.mesh.epoch
        incarnation = self.run.current[worker_id]
        self.run.do(cmd.break_mesh(worker_id, incarnation, epoch, "reset"))
        self.liveness.peer_error(epoch)

    def wait(self, seconds: float, *heard: str, step: float = 0.1, **report: object) -> list[str]:
        """Time passes; ``heard`` keep reporting. What was concluded, in short."""
        said: list[str] = []
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += step
            for worker_id in heard:
                self.hear(worker_id, **report)
            for command in self.liveness.tick(self.run.ledger, self.now):
                self.run.do(command)
                if command.name == "declare_dead":
                    said.append(f"{command.args[0]} {command.args[2]}")
                else:
                    said.append(command.name)
        return said


def test_silence_ends_in_death_by_lease_and_not_before() -> None:
    watched = Watched("p0", "p1")
    assert watched.wait(4.8, "p0", "r0") == []
    assert watched.wait(0.4, "p0", "r0") == ["p1 lease"]
    assert [m.worker_id for m in watched.run.state.fleet.mesh.members] == ["p0"]


def test_a_broken_session_alone_kills_nobody_before_the_lease() -> None:
    watched = Watched("p0", "p1")
    watched.lose("p1")
    assert watched.suspected("p1")
    assert watched.wait(4.8, "p0", "r0") == []
    watched.hear("p1")
    assert not watched.suspected("p1")
    assert watched.wait(4.8, "p0", "p1", "r0") == []


def test_a_peers_error_shortens_a_suspects_grace() -> None:
    watched = Watched("p0", "p1")
    watched.lose("p1")
    watched.complain("p0")
    assert watched.wait(0.8, "p0", "r0") == []
    assert watched.wait(0.4, "p0", "r0") == ["p1 suspect", "form_mesh"]
    assert [m.worker_id for m in watched.run.state.fleet.mesh.members] == ["p0"]


def test_a_peers_error_without_a_suspect_is_no_death_sentence() -> None:
    watched = Watched("p0", "p1")
    watched.complain("p0")
    assert watched.wait(10.0, "p0", "p1", "r0") == ["form_mesh"]
    assert len(watched.run.state.fleet.mesh.members) == 2


def test_no_epoch_is_formed_with_a_suspect() -> None:
    watched = Watched("p0", "p1")
    watched.complain("p0")
    watched.lose("p1")
    assert watched.wait(0.5, "p0", "r0") == []
    watched.hear("p1")
    assert watched.wait(0.5, "p0", "p1", "r0") == ["form_mesh"]


def test_epochs_that_break_in_a_row_are_formed_ever_more_slowly() -> None:
    watched = Watched("p0", "p1")
    delays = []
    for _ in range(8):
        watched.complain("p0")
        began = watched.now
        while watched.wait(0.01, "p0", "p1", "r0", step=0.01) == []:
            pass
        delays.append(watched.now - began)
    assert all(b > a - 0.01 for a, b in pairwise(delays))
    assert delays[0] < 2 * FORM_DELAY_S + 0.02 and 1.9 < delays[-1] < 2.2


def test_a_report_of_an_earlier_epoch_accuses_nobody() -> None:
    watched = Watched("p0", "p1")
    watched.complain("p0")
    watched.wait(0.5, "p0", "p1", "r0")
    watched.lose("p1")
    assert watched.wait(4.0, "p0", "r0") == []


def test_a_silent_but_healthy_replica_outside_a_collective_is_never_removed() -> None:
    watched = Watched("p0", "p1")
    assert watched.wait(300.0, "p0", "p1", "r0", step=1.0, busy=False) == []


def test_a_busy_worker_without_progress_is_wedged() -> None:
    watched = Watched("p0")
    assert watched.wait(59.0, "p0", step=1.0, busy=True) == ["r0 lease"]
    assert watched.wait(3.0, "p0", step=1.0, busy=True) == ["p0 wedged"]


def test_a_slow_worker_that_makes_progress_is_kept() -> None:
    watched = Watched("p0")
    for progress in range(10):
        assert watched.wait(50.0, "p0", "r0", step=1.0, busy=True, progress=progress) == []


def test_time_spent_idle_does_not_count_as_being_stuck() -> None:
    watched = Watched("p0")
    watched.wait(100.0, "p0", "r0", step=1.0, busy=False)
    assert watched.wait(50.0, "p0", "r0", step=1.0, busy=True) == []


def test_only_the_first_of_the_stuck_members_is_wedged_the_others_waited_for_it() -> None:
    watched = Watched("p0", "p1", "p2")
    watched.hear("p1", busy=True, progress=1)
    watched.wait(0.2, "r0")
    for worker_id in ("p0", "p2"):
        watched.hear(worker_id, busy=True, progress=1)
    said = watched.wait(100.0, "p0", "p1", "p2", "r0", step=0.5, busy=True, progress=1)
    assert [x for x in said if x.startswith("p")] == ["p1 wedged"]


def test_a_lease_its_owner_does_not_name_expires() -> None:
    watched = Watched("p0")
    one, two = watched.run.lease("r0", 2).leases
    named = [SimpleNamespace(task_id=one.task_id, attempt=one.attempt)]
    assert watched.wait(4.8, "p0", "r0", held_leases=named) == []
    assert watched.wait(0.6, "p0", "r0", held_leases=named) == ["expire"]
    assert watched.run.state.tasks.pending == [int(two.task_id[1:])]
    assert watched.wait(600.0, "p0", "r0", step=1.0, held_leases=named) == []


def test_a_new_leader_gives_everybody_a_fresh_lease() -> None:
    watched = Watched("p0", "p1")
    watched.wait(4.5, "r0")
    watched.liveness = Liveness(LIMITS)
    watched.liveness.begin(watched.run.ledger, watched.now)
    assert watched.wait(4.8, "r0") == []
    assert watched.wait(0.4, "r0") == ["p0 lease", "p1 lease"]


def test_a_leader_that_could_not_listen_holds_no_silence_against_anybody() -> None:
    watched = Watched("p0", "p1")
    assert watched.wait(2.0, "p0", "p1", "r0") == []
    watched.now += 30.0  # the leader did not run; nothing of what was said has been read yet
    assert watched.wait(0.1) == []
    assert watched.wait(3.0, "p0", "r0") == []
    assert watched.wait(1.5, "p0", "r0") == ["p1 lease"]


def test_a_leader_that_always_looks_late_still_finds_the_dead() -> None:
    watched = Watched("p0", "p1")
    assert watched.wait(30.0, "p0", "r0", step=2.0) == ["p1 lease"]


def test_what_a_silent_worker_held_is_free_when_its_lease_ends_not_later() -> None:
    watched = Watched("p0")
    (lease,) = watched.run.lease("r0").leases
    assert watched.wait(LIMITS.lease_ttl_s - 0.001, "p0", step=0.05) == ["r0 lease"]
    assert watched.run.state.tasks.pending == [int(lease.task_id[1:])]


def test_a_new_leader_forms_no_mesh_before_it_has_heard_from_the_members() -> None:
    watched = Watched("p0", "p1")
    watched.complain("p0")
    watched.liveness = Liveness(LIMITS)
    watched.liveness.begin(watched.run.ledger, watched.now)
    assert watched.wait(2.0, "p0", "r0") == []
    assert watched.wait(1.0, "p0", "p1", "r0") == ["form_mesh"]


def test_any_request_of_a_worker_shows_that_it_lives() -> None:
    watched = Watched("p0")
    for _ in range(10):
        watched.wait(2.0, "p0", step=0.5)
        watched.liveness.heard("r0", watched.run.current["r0"], watched.now)
    assert watched.run.state.fleet.workers["r0"].alive


@pytest.mark.parametrize("how", ["exit", "lease"])
def test_the_pulse_of_the_dead_is_forgotten(how: str) -> None:
    watched = Watched("p0")
    watched.run.die("r0", how)
    watched.liveness.tick(watched.run.ledger, watched.now)
    assert {worker_id for worker_id, _ in watched.liveness.pulses} == {"p0"}


SILENCE = "heartbeat_silence"


@pytest.mark.parametrize(
    ("on_host", "heard", "causes"),
    [
        (["p1", "p2"], ["p0", "r0"], {"p1": "host_lost", "p2": "host_lost"}),
        (["p1", "p2"], ["p0", "p2", "r0"], {"p1": SILENCE}),
        (["p0", "p1"], [], dict.fromkeys(("p0", "p1", "p2", "r0"), SILENCE)),
    ],
    ids=["all of the host", "one of the host", "the leader hears nobody"],
)
def test_a_host_is_lost_if_all_of_its_workers_fall_silent_and_others_do_not(
    on_host: list[str], heard: list[str], causes: dict[str, str]
) -> None:
    watched = Watched("p0", "p1", "p2")
    workers = watched.run.state.fleet.workers
    for worker_id in on_host:
        workers[worker_id].host = "b"
    watched.wait(6.0, *heard)
    assert {name: str(w.death) for name, w in workers.items() if not w.alive} == causes


def test_hosts_are_counted_once_in_a_tick_however_many_workers_are_silent() -> None:
    class Counted(dict[str, Worker]):
        looks = 0

        def values(self) -> ValuesView[str, Worker]:  # type: ignore[override]
            self.looks += 1
            return super().values()

    watched = Watched("p0", "p1", "p2", "p3")
    fleet = watched.run.state.fleet
    fleet.workers = workers = Counted(fleet.workers)
    watched.wait(4.8, "r0")
    watched.now, workers.looks = 5.0, 0
    assert len(watched.liveness.tick(watched.run.ledger, watched.now)) == 4
    assert workers.looks == 2
