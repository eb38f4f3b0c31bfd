"""Copies of the weights for engines: of every replica that feeds some, and of no other."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import BadInput
from paceline.payloads.store import StoreUnavailable
from paceline.v1 import worker_pb2
from policy_worker.after_commit import AfterCommit
from policy_worker.objectives.objective import POLICY
from policy_worker.publisher import PublishingPlace, ReplicaPublisher
from policy_worker.rows.replica import Replica as OneRank
from tests.fakes.policy_control import ScriptedControl
from tests.fixtures.policy_models import make_config

CPU = torch.device("cpu")
OWN, OTHER = 1, 2
"""Incarnations of replicas."""


class Trainer:
    """One rank, and weights that are changed by hand."""

    rank = 0
    parked = False

    def __init__(self, **config: Any) -> None:
        self.weights = [("w", torch.zeros(1000))]
        self.state: Any = SimpleNamespace(
            config=make_config(**config),
            step=0,
            version=0,
            parts={POLICY: None},
            weights_of=self.whole,
        )

    def whole(self, part: str) -> list[tuple[str, torch.Tensor]]:
        return self.weights

    def open_publisher(self, place: PublishingPlace, **given: Any) -> ReplicaPublisher:
        return ReplicaPublisher(self.state, OneRank(), CPU, place, **given)


class Replica:
    """One whose directive is changed by hand."""

    def __init__(self, **config: Any) -> None:
        self.control: Any = ScriptedControl()
        self.trainer: Any = Trainer(**config)
        reply = worker_pb2.RegisterReply(rendezvous_url="redis://", run_id="r")
        self.out = AfterCommit(self.control, self.trainer, reply, "127.0.0.1")
        (self.follow,) = self.control.followers

    def feed(self, *publishers: int) -> None:
        del self.control.directive.links[:]
        for epoch, incarnation in enumerate(publishers, 1):
            publisher = worker_pb2.MeshMember(incarnation=incarnation)
            self.control.directive.links.add(epoch=epoch, publisher=publisher)
        self.follow(self.control.directive)

    def commit(self) -> None:
        self.trainer.state.version += 1
        self.trainer.weights[0][1].add_(1)
        self.out.publisher.publish_newest()

    def copies(self) -> list[weakref.ref[torch.Tensor]]:
        newest = self.out.publisher._newest
        return [] if newest is None else [weakref.ref(newest.flat)]


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    # Its links have no other end.
    monkeypatch.setattr(ReplicaPublisher, "_begin", lambda publisher, link: None)
    made = Replica()
    yield made
    made.out.publisher.close()


def test_a_replica_that_has_lost_its_receivers_lets_go_of_its_copies(replica: Replica) -> None:
    replica.feed(OWN)
    for _ in range(3):
        replica.commit()
    (copy,) = replica.copies()
    replica.feed(OTHER)
    replica.commit()
    gc.collect()
    assert copy() is None and not replica.copies() and not replica.out.work_due()
    assert not replica.out.publisher._pool._free, "nor is one kept for later"
    replica.feed(OTHER, OWN)
    assert replica.out.work_due(), "it publishes what it holds"
    replica.out.serve()
    assert replica.out.publisher.version == 4


def test_rollout_workers_that_wait_for_a_policy_that_nobody_trains_end_the_run(
    replica: Replica,
) -> None:
    """A reward model alone has no weights for them: they would wait for ever."""
    replica.trainer.state.parts = {}
    replica.commit()  # nobody waits
    replica.feed(OWN)
    with pytest.raises(BadInput, match=r"rollout\.source"):
        replica.out.serve()


@pytest.fixture
def in_turns(tmp_path: Path) -> Iterator[Replica]:
    """It takes turns, and writes to a store that does not answer."""
    made = Replica(weights={"url": tmp_path.as_uri()})
    made.out.publisher._always = True
    writer = made.out.publisher.writer
    assert writer is not None

    def write(*_: Any) -> int:
        raise StoreUnavailable("down")

    writer._store.write = write  # type: ignore[method-assign]
    yield made
    writer.forget()
    made.out.publisher.close()


def test_a_replica_that_may_park_now_publishes_though_the_version_before_is_not_stored(
    in_turns: Replica,
) -> None:
    in_turns.feed(OWN)
    in_turns.commit()
    in_turns.commit()
    assert in_turns.out.publisher.version == 2
    writer = in_turns.out.publisher.writer
    assert writer is not None and writer._writing is in_turns.out.publisher._newest


def test_a_parked_replica_publishes_nothing(in_turns: Replica) -> None:
    """Its parameters have no memory."""
    in_turns.feed(OWN)
    in_turns.commit()
    in_turns.out.publisher._unreadable = True
    in_turns.trainer.parked, newest = True, in_turns.out.publisher._newest
    in_turns.out.serve()
    assert in_turns.out.publisher._newest is newest
    in_turns.trainer.parked = False
    assert in_turns.out.work_due()
    in_turns.out.serve()
    assert in_turns.out.publisher._newest is not newest
