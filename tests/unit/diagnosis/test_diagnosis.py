"""The diagnosis of constructed states: the right process or thing is named at every wait point."""

from dataclasses import replace
from typing import Any

import pytest

from controller.diagnosis.diagnose import diagnose
from controller.diagnosis.evidence import (
    CulpritKind,
    Diagnosis,
    Process,
)
from controller.ledger import decisions as cmd
from controller.ledger.enums import Role
from paceline.observe.vocabulary import Severity
from paceline.process.kernel_state import KernelState
from paceline.process.waits import Wait, WaitKind
from testbed.faults import failpoints
from tests.fixtures.diagnoses import STOPPED, evidence, fleet, silent, wait, worker
from tests.fixtures.ledgers import Driven


def assert_names(found: Diagnosis, name: str, kind: CulpritKind = CulpritKind.WORKER) -> None:
    assert (found.culprit.kind, found.culprit.name) == (kind, name), found.sentence
    assert found.severity is not Severity.INFO, found.sentence
    assert found.next and found.remedy, found
    assert found.since_s > 0


IN_REDUCE = wait(WaitKind.COLLECTIVE, "inside the all-reduce of epoch 4")
VOTING = wait(WaitKind.VOTES, "waiting for the votes of step 1")

MATRIX: dict[str, tuple[bool, dict[str, Any], dict[str, Any], str]] = {
    # Wait point: step open, of the stopped p1 (or r1), of its peer p0 (or r0), words of the
    # sentence.
    "idle": (
        False,
        {"waits": (wait(WaitKind.GROUPS, "waiting for the groups of step 1"),)},
        {"waits": (wait(WaitKind.GROUPS, "waiting for the groups of step 1"),)},
        "while waiting for the groups of step 1",
    ),
    "forward": (
        True,
        {"activity": "step 1: computing 2 groups"},
        {"waits": (IN_REDUCE,)},
        "inside the all-reduce of epoch 4",
    ),
    "reduce": (
        True,
        {"waits": (IN_REDUCE,)},
        {"waits": (IN_REDUCE,)},
        "inside the all-reduce of epoch 4",
    ),
    # The last report was sent before the wait was a second old.
    "vote": (True, {"activity": "step 1: voting"}, {"waits": (VOTING,)}, 'at "step 1: voting"'),
    "commit": (True, {"activity": "step 1: voting"}, {"waits": (IN_REDUCE,)}, "all-reduce"),
    "state_transfer": (
        True,
        {"mesh_epoch": 4, "waits": (wait(WaitKind.STATE, "sending the state to p0"),)},
        {"mesh_epoch": 0, "waits": (wait(WaitKind.STATE, "receiving the state from p1", "p1"),)},
        "while sending the state to p0",
    ),
    "send": (
        False,
        {"waits": (wait(WaitKind.WEIGHTS, "sending weights to r0", "r0"),)},
        {},
        "while sending weights to r0",
    ),
    "generate": (False, {"waits": (wait(WaitKind.ENGINE, "generating"),)}, {}, "while generating"),
    "submit": (False, {"waits": (wait(WaitKind.VERDICT, "submitting groups"),)}, {}, "submitting"),
    "receive": (
        False,
        {"loaded_version": -1, "waits": (wait(WaitKind.WEIGHTS, "waiting for weights from p0"),)},
        {},
        "while waiting for weights from p0",
    ),
}


def test_every_wait_point_of_the_kill_matrix_is_here() -> None:
    assert set(MATRIX) == set(failpoints.POLICY) | set(failpoints.ROLLOUT)


@pytest.mark.parametrize("local", [True, False], ids=["same_host", "other_host"])
@pytest.mark.parametrize("instant", MATRIX)
def test_the_process_that_is_stopped_at_a_wait_point_is_named(instant: str, local: bool) -> None:
    step_open, own, peers, words = MATRIX[instant]
    role = "r" if instant in failpoints.ROLLOUT else "p"
    run = fleet(step_open)
    culprit = silent(f"{role}1", kernel=STOPPED if local else None, **own)
    found = diagnose(evidence(run, culprit, worker(f"{role}0", **peers)))
    assert_names(found, f"{role}1")
    assert found.severity is Severity.ERROR
    assert found.culprit.host == "b" and found.culprit.pid == 801
    assert words in found.sentence
    if role == "r":
        assert found.subject == "step 1 (0 of 4 groups ready)"
    assert "it is declared dead in 1.9 s" in found.sentence
    if local:
        assert "stopped" in found.because and "kill -CONT 801" in found.remedy
    else:
        assert "silent" in found.because and f"paceline stacks {role}1" in found.remedy


def test_a_member_that_computes_is_named_and_not_those_that_wait_for_it() -> None:
    run = fleet()
    slow = worker("p0", still_s=40.0, wedged_in_s=260.0, activity="step 1: computing 2 groups")
    found = diagnose(evidence(run, slow, worker("p1", waits=(replace(IN_REDUCE, age_s=40.0),))))
    assert_names(found, "p0")
    assert found.since_s == 40.0 and "declared dead in 260 s" in found.next


def test_members_that_all_wait_in_one_collective_accuse_the_network_between_them() -> None:
    run = fleet()
    stuck = {"waits": (replace(IN_REDUCE, age_s=40.0),), "wedged_in_s": 260.0}
    found = diagnose(evidence(run, worker("p0", **stuck), worker("p1", **stuck)))
    assert_names(found, "the network between p0, p1", CulpritKind.NETWORK)


def test_a_rank_that_is_stopped_is_named_and_not_rank_0_that_reports_it() -> None:
    run = fleet()
    rank = wait(WaitKind.RANK, "rank 1, stopped", "913", 4.0)
    p1 = worker("p1", waits=(rank, IN_REDUCE), still_s=4.0, wedged_in_s=296.0)
    found = diagnose(evidence(run, worker("p0", waits=(IN_REDUCE,)), p1))
    assert_names(found, "rank 1 of p1")
    assert (found.culprit.host, found.culprit.pid) == ("b", 913)
    assert found.subject == "step 1" and "p1 is declared dead in 296 s" in found.next
    assert found.remedy == "Continue it: kill -CONT 913 on b"


def test_an_event_loop_that_does_not_run_is_said_by_the_process_itself() -> None:
    run = fleet(step_open=False)
    loop = wait(WaitKind.EVENT_LOOP, "its event loop does not run: a call in it blocks")
    alone = Process("r1", Role.ROLLOUT, "b", 801, (loop,))
    found = diagnose(evidence(run, silent("r1"), sessionless=(alone,)))
    assert_names(found, "r1")
    assert "event loop has not run for 3 s" in found.because


def test_a_reward_that_never_returns_is_named_with_its_limit() -> None:
    run = fleet(step_open=False)
    reward = wait(WaitKind.REWARD, "scoring with mine:judge", "mine:judge", 8.0, 10.0)
    busy = worker("r0", held=2, waits=(replace(reward, count=2),))
    found = diagnose(evidence(run, busy))
    assert_names(found, "mine:judge", CulpritKind.REWARD)
    assert "r0 (host b, pid 800)" in found.sentence and "fails in 2 s" in found.next


def test_an_engine_that_makes_no_token_is_named_and_a_long_generation_is_not() -> None:
    run = fleet(step_open=False)
    long = wait(WaitKind.ENGINE, "generating", age_s=100.0)
    at_work = diagnose(evidence(run, worker("r0", held=2, waits=(long,), still_s=0.2)))
    assert at_work.severity is Severity.INFO
    hung = worker("r0", held=2, waits=(long,), still_s=20.0, wedged_in_s=280.0)
    assert_names(diagnose(evidence(run, hung)), "r0")


@pytest.mark.parametrize(
    ("trouble", "kernel", "words"),
    [
        ("paused: Redis full", None, "full"),
        ("paused: Redis cannot write to its disk", None, "cannot write to its disk"),
        ("waiting for Redis (TimeoutError)", STOPPED, "stopped"),
        ("waiting for Redis (ConnectionError)", None, "does not answer (ConnectionError)"),
    ],
)
def test_redis_is_named_and_not_the_workers_that_wait_for_it(
    trouble: str, kernel: KernelState | None, words: str
) -> None:
    append = wait(WaitKind.STORE, "appending to the journal", "Redis", 4.0)
    at = evidence(
        fleet(),
        silent("p1"),
        trouble=trouble,
        redis_kernel=kernel,
        redis_pid=77,
        own_waits=(append,),
    )
    found = diagnose(at)
    assert_names(found, "Redis", CulpritKind.REDIS)
    assert words in found.because and found.since_s == 4.0 and "declares nobody dead" in found.next


def test_an_append_that_does_not_return_is_named_before_it_fails() -> None:
    append = wait(WaitKind.STORE, "appending to the journal", "Redis", 1.5)
    assert_names(diagnose(evidence(fleet(), own_waits=(append,))), "Redis", CulpritKind.REDIS)


@pytest.mark.parametrize("open_step", [True, False])
@pytest.mark.parametrize(
    ("name", "waits_for"),
    [
        ("p1", wait(WaitKind.PAYLOADS, "fetching 2 groups of step 1", age_s=20.0)),
        ("r1", wait(WaitKind.STORE, "storing payloads (it is full)", "the payload store", 20.0)),
    ],
)
def test_a_payload_store_is_named_and_not_the_workers_that_wait_for_it(
    name: str, waits_for: Wait, open_step: bool
) -> None:
    submitting = wait(WaitKind.VERDICT, "submitting groups", age_s=21.0)
    store = "the payload store (redis://b:1/0)"
    run = fleet(open_step)
    found = diagnose(evidence(run, worker(name, waits=(submitting, waits_for)), payloads=store))
    assert_names(found, store, CulpritKind.PAYLOADS)
    assert f"{name} is {waits_for.what}" in found.sentence
    assert "payloads.url" in found.remedy


def test_a_payload_that_is_read_or_stored_as_usual_accuses_nobody() -> None:
    for name, kind in (("p1", WaitKind.PAYLOADS), ("r1", WaitKind.STORE)):
        found = diagnose(evidence(fleet(), worker(name, waits=(wait(kind, "at it", age_s=2.0),))))
        assert found.severity is Severity.INFO


def test_a_hub_that_does_not_answer_is_named_with_the_process_that_asks_it() -> None:
    run = Driven()
    hub = wait(WaitKind.HUB, "loading the model me/m from http://hub:1", "http://hub:1", 30.0)
    starting = Process("p0", Role.POLICY, "b", 800, (hub,))
    found = diagnose(evidence(run, sessionless=(starting,)))
    assert_names(found, "http://hub:1", CulpritKind.HUB)
    assert "p0 (host b, pid 800)" in found.because and "HF_ENDPOINT" in found.remedy


def test_a_broken_epoch_names_the_member_that_has_not_reported() -> None:
    run = fleet()
    mesh = run.state.fleet.mesh
    run.do(cmd.break_mesh("p0", run.current["p0"], mesh.epoch, "reset by peer"))
    found = diagnose(evidence(run, silent("p1"), worker("p0")))
    assert_names(found, "p1")
    assert found.subject == f"mesh epoch {mesh.epoch + 1}"


def test_a_stopping_run_names_the_checkpoint_it_waits_for() -> None:
    run = fleet()
    run.train()
    run.do(cmd.stop("s", "enough"))
    path = "/mnt/run/checkpoints/step-000001"
    writing = wait(WaitKind.CHECKPOINT, f"writing checkpoint {path}", path, 90.0)
    found = diagnose(evidence(run, worker("p0", waits=(writing,))))
    assert_names(found, path, CulpritKind.CHECKPOINT)


def test_a_run_of_recorded_data_waits_for_no_weights() -> None:
    """No engine loads any: a rollout worker without weights is a healthy one."""
    run = Driven.fleet("p0", recorded=True)
    run.register("r0")
    found = diagnose(evidence(run, worker("r0", loaded_version=-1), since_commit_s=1.0))
    for absent in ("engine", "weights"):
        assert absent not in f"{found.sentence} {found.next}"


def test_a_worker_that_cannot_load_weights_is_named_with_the_reason() -> None:
    run = fleet(step_open=False)
    for failures, name in ((1, "r0"), (2, "r1")):
        state = cmd.Lifecycle.RUNNING, -1, 0, 0, ""
        trouble = (
            "weights not staged: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
        )
        run.do(cmd.observe(name, run.current[name], *state, failures, trouble))
    found = diagnose(evidence(run))
    assert (found.culprit.name, found.severity) == ("r1", Severity.ERROR)
    assert "failed 2 times to load them, like 1 more (weights not staged: OutOf" in found.sentence
    assert "more memory" in found.remedy
    run.train()
    run.observe("r0", loaded=1)
    assert diagnose(evidence(run)).severity is Severity.WARNING
    run.observe("r1", loaded=1)
    assert "failed" not in diagnose(evidence(run)).sentence
