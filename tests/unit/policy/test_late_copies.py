"""What is saved and published is copied beside training: no update overtakes it, and nothing but an
update waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.weights import weight_snapshot
from policy_worker.checkpoint.checkpoint import Checkpointer
from policy_worker.checkpoint.shards import named_tensors
from policy_worker.model import host_memory
from policy_worker.publisher import PublishingPlace, ReplicaPublisher
from policy_worker.rows.replica import Replica
from policy_worker.trainer import Trainer
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import make_config, random_groups
from tests.fixtures.train_states import all_bits, assert_same_bits
from tests.fixtures.training_steps import CPU, form_alone, train_step

GROUPS = random_groups(2, group_size=3, seed=0, vocab=15)


class LateEvent:
    """The end of the work that a stream had then. Somebody who waits for it has the work done."""

    def __init__(self, name: str, work: list[Callable[[], Any]]) -> None:
        self.name, self.work = name, work

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


class LateStream:
    """A stream that does nothing before somebody waits for it, and nobody is done waiting before
    the gate is open."""

    def __init__(self, name: str, said: list[str], gate: threading.Event) -> None:
        self.name, self.said, self.gate = name, said, gate
        self.work: list[Callable[[], Any]] = []

    def wait_stream(self, other: LateStream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: LateEvent) -> None:
        self.said.append(f"{self.name} waits for {event.name}")
        event.synchronize()

    def synchronize(self) -> None:
        assert self.gate.wait(60)
        LateEvent(self.name, self.work).synchronize()

    def record_event(self) -> LateEvent:
        return LateEvent(self.name, self.work)


class LateDevice:
    """torch.cuda of one device, as far as copies of a state use it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.queued, self.gate = threading.Event(), threading.Event()
        self.training = LateStream("training", self.said, self.gate)
        self._of_thread = threading.local()

    @property
    def now(self) -> LateStream:
        return getattr(self._of_thread, "stream", self.training)

    def Stream(self, device: torch.device) -> LateStream:
        return LateStream("copies", self.said, self.gate)

    def current_stream(self, device: torch.device) -> LateStream:
        return self.now

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        self._of_thread.stream = stream
        yield
        self._of_thread.stream = self.training

    def copy_all(self, targets: list[Tensor], sources: list[Tensor], non_blocking: bool) -> None:
        assert self.now is not self.training, "the copies would hold up training"
        pairs = [(target, source.detach()) for target, source in zip(targets, sources, strict=True)]
        self.now.work.extend(lambda t=target, s=source: t.copy_(s) for target, source in pairs)
        self.queued.set()

    def wait(self, copies: list[Any]) -> None:
        self.training.wait_event(LateEvent("copies", []))
        self.gate.set()
        wait(copies)


class LateTorch:
    """torch with such a device's copies."""

    def __init__(self, late: LateDevice) -> None:
        self.cuda, self._foreach_copy_ = late, late.copy_all

    def zeros(self, shape: Any, *, pin_memory: bool, **options: Any) -> Tensor:
        return torch.zeros(shape, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    late = LateDevice()
    monkeypatch.setattr(host_memory, "torch", LateTorch(late))
    monkeypatch.setattr(host_memory, "wait", late.wait)
    monkeypatch.setattr(
        host_memory, "stream_of_its_own", lambda device: late.stream(late.Stream(device))
    )
    return late


@pytest.fixture
def trainer(tmp_path: Path, device: LateDevice) -> Iterator[Any]:
    config = make_config(model=make_tiny_model(tmp_path, hidden=32))
    trainer = Trainer(config, CPU)
    trainer._checkpointer = Checkpointer(tmp_path, config, device=torch.device("cuda"))
    trainer.restore("", 0, 0)
    yield trainer
    device.gate.set()
    trainer.close()


def update(trainer: Trainer) -> None:
    form_alone(trainer)
    train_step(trainer, GROUPS, 1, last=True)


def test_the_writer_waits_for_the_copies(trainer, device, tmp_path):
    update(trainer)
    bits = all_bits(trainer.state)
    saved = trainer.save()
    assert device.queued.wait(60)
    device.gate.set()
    path = saved.result(60).path
    again = Trainer(trainer.config, CPU)
    again.attach(tmp_path / "again")
    again.restore(str(path), 1, 1)
    assert_same_bits(all_bits(again.state), bits)
    again.close()


@pytest.fixture
def publisher(
    trainer: Trainer, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReplicaPublisher]:
    """Of the trainer; nobody receives."""
    monkeypatch.setattr(weight_snapshot, "torch", LateTorch(device))
    place = PublishingPlace("redis://127.0.0.1:1/0", "run", "127.0.0.1")
    publisher = trainer._publisher = ReplicaPublisher(trainer.state, Replica(), CPU, place)
    publisher._copies = host_memory.CopyStream(torch.device("cuda"))
    yield publisher
    publisher.close()


Named = dict[str, Tensor]
Copies = tuple[Callable[[], Named], Callable[[], Any], Callable[[], Named]]


@pytest.fixture(params=["checkpoint", "publication"])
def copies(request: pytest.FixtureRequest, trainer: Trainer) -> Copies:
    """The tensors that are copied, by name; has them copied; and what was copied."""
    if request.param == "checkpoint":
        checkpointer, device = trainer.checkpointer, request.getfixturevalue("device")

        def save() -> None:
            trainer.save()
            assert device.queued.wait(60)

        def saved() -> Named:
            job = checkpointer._newest
            return dict(zip(job.slices.tensors, job.copies.result(60), strict=True))

        return (
            lambda: {name: t.detach() for name, t in named_tensors(trainer.state) if t.numel()},
            save,
            saved,
        )
    publisher = request.getfixturevalue("publisher")
    return (
        lambda: {name: t.detach() for name, t in trainer.state.weights_of("policy")},
        lambda: publisher.publish_state(trainer.state.version),
        lambda: publisher._newest.manifest.views(publisher._newest.flat),
    )


def assert_copied(copied: Named, before: Named) -> None:
    for name, tensor in before.items():
        assert torch.equal(copied[name], tensor), name


def test_the_next_update_waits_for_the_copies_and_nothing_before_it(trainer, device, copies):
    live, take, copied = copies
    before = {name: t.clone() for name, t in live().items()}
    take()
    assert device.said == ["copies waits for training"]
    update(trainer)
    assert device.said == ["copies waits for training", "training waits for copies"]
    assert any(not torch.equal(t, before[name]) for name, t in live().items())
    assert_copied(copied(), before)


def test_a_state_that_is_replaced_waits_for_the_copies(trainer, device, copies):
    live, take, copied = copies
    update(trainer)
    before = {name: t.clone() for name, t in live().items()}
    take()
    trainer.restore("", 0, 2)
    assert_copied(copied(), before)
