"""When a replica writes a checkpoint: as soon as one is due that nobody is writing, and once."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.v1 import policy_pb2, worker_pb2
from policy_worker import after_commit
from policy_worker.checkpoint.checkpoint import CheckpointInfo
from tests.fakes.policy_control import ScriptedControl

RECORDED = policy_pb2.CheckpointReply()


class Writer:
    """A trainer whose saves end when it is told to."""

    def __init__(self) -> None:
        self.rank, self.parked = 0, False
        self.state = SimpleNamespace(step=0, version=0)
        self.publisher = SimpleNamespace(version=-1, due=False, publish_newest=lambda: None)
        self.open_publisher = lambda *a, **k: self.publisher
        self.saves: list[tuple[int, int, Future[CheckpointInfo]]] = []
        self.checkpointer = SimpleNamespace(delete=lambda paths: None)

    def save(self) -> Future[CheckpointInfo]:
        future: Future[CheckpointInfo] = Future()
        self.saves.append((self.state.step, self.state.version, future))
        return future

    def step_on(self) -> None:
        self.state.step += 1
        self.state.version += 1

    def written(self) -> None:
        step, version, future = self.saves[-1]
        future.set_result(CheckpointInfo(Path(f"step-{step}"), step, version, 1, 0.1))


@pytest.fixture
def due(monkeypatch):
    """(outlets, desk, trainer) after step 3, with a checkpoint of step 2 wanted."""
    desk, trainer = ScriptedControl(), Writer()
    reply = worker_pb2.RegisterReply(rendezvous_url="redis://", run_id="r")
    out = after_commit.AfterCommit(desk, trainer, reply, "127.0.0.1")
    desk.directive.checkpoint_step = 2
    trainer.state.step = trainer.state.version = 3
    return out, desk, trainer


def test_a_checkpoint_whose_step_has_passed_is_made_up_at_once_and_only_once(due) -> None:
    out, desk, trainer = due
    trainer.rank = 1
    assert not out.work_due()
    out.serve()
    assert trainer.saves == [], "only rank 0 writes"
    trainer.rank = 0
    assert out.work_due()
    out.serve()
    assert [s[0] for s in trainer.saves] == [3]
    trainer.step_on()
    out.serve()
    assert not out.work_due() and len(trainer.saves) == 1, "it is being written"
    trainer.written()
    out.serve()
    assert len(trainer.saves) == 1, "it is being recorded"
    assert desk.settle(RECORDED).step == 3
    out.serve()
    assert len(trainer.saves) == 1
    desk.directive.checkpoint_step = 6
    assert not out.work_due()
    trainer.state.step = trainer.state.version = 6
    out.serve()
    assert [s[0] for s in trainer.saves] == [3, 6]


@pytest.mark.parametrize("failure", ["write", "record"])
def test_a_checkpoint_that_failed_is_tried_again_after_a_while(due, failure, monkeypatch) -> None:
    out, desk, trainer = due
    now = 100.0
    monkeypatch.setattr(after_commit.time, "monotonic", lambda: now)
    out.serve()
    if failure == "write":
        trainer.saves[0][2].set_exception(OSError("disk full"))
    else:
        trainer.written()
        desk.settle()
    trainer.step_on()
    assert not out.work_due()
    now += after_commit.RETRY_S
    assert out.work_due()
    out.serve()
    assert [s[0] for s in trainer.saves] == [3, 4]


def test_what_was_saved_on_a_line_that_was_rolled_back_does_not_count(due) -> None:
    out, desk, trainer = due
    desk.directive.checkpoint_step = 4
    trainer.state.step = trainer.state.version = 4
    out.serve()
    assert [s[:2] for s in trainer.saves] == [(4, 4)]
    # Back to step 1, as version 5; step 4 comes again, as version 8.
    trainer.state.step, trainer.state.version = 3, 7
    assert not out.work_due()
    trainer.step_on()
    out.serve()
    assert [s[:2] for s in trainer.saves] == [(4, 4), (4, 8)]


def test_a_record_that_a_failover_has_lost_is_posted_again_and_the_files_are_not(due) -> None:
    out, desk, trainer = due
    desk.directive.term = 1
    out.serve()
    trainer.written()
    desk.settle(RECORDED)
    assert not out.work_due(), "a directive of this term may be older than the record"
    desk.directive.term = 2
    desk.caller.incarnation = 2
    assert out.work_due()
    out.serve()
    assert not out.work_due(), "it is being recorded"
    assert desk.posted[0][0].caller.incarnation == 2
    assert desk.settle(RECORDED).step == 3
    assert len(trainer.saves) == 1 and not out.work_due()
    desk.directive.term = 3
    desk.directive.checkpoint_step = 6
    assert not out.work_due(), "the leader of this term has the record"


def test_what_was_published_and_saved_as_the_version_that_came_from_another_is_forgotten(
    due,
) -> None:
    """This replica was outvoted about version 3, and has received it from another one."""
    out, _, trainer = due
    forgotten: list[object] = []
    trainer.publisher.version = 3
    trainer.publisher.take_back = lambda: forgotten.append("weights")
    trainer.checkpointer.abandon = forgotten.append
    out.save_checkpoint()
    out.forget_from(3)
    assert forgotten == ["weights", 3]
    assert out.checkpoint_due()
