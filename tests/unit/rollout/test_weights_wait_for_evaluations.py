"""A version that has come waits until the completions of an evaluation are generated."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch

from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.v1 import common_pb2, rollout_pb2
from paceline.weights.weight_link import WeightLink
from rollout_worker import weight_receiver
from rollout_worker.engine.base import ParametersDiffer
from rollout_worker.held_tasks import HeldTasks, Stage
from rollout_worker.weight_loading import PARITY_TRIES, WeightLoader
from rollout_worker.weight_receiver import WeightReceiver


def lease(task_id: str, kind: int) -> rollout_pb2.Lease:
    task = common_pb2.TaskRef(task_id=task_id, attempt=1)
    return rollout_pb2.Lease(task=task, kind=kind, group_size=1)  # type: ignore[arg-type]


def test_only_the_generation_of_an_evaluation_counts() -> None:
    held = HeldTasks()
    held.add(lease("t1", rollout_pb2.TASK_KIND_TRAIN))
    assert not held.evaluating()
    row = held.add(lease("e5.0", rollout_pb2.TASK_KIND_EVAL))
    assert row is not None and held.evaluating()
    row.stage = Stage.SCORING
    assert not held.evaluating(), "its tokens are there"


async def test_failures_of_the_parameters_add_up_over_incarnations() -> None:
    tasks, lifecycle, error = Mock(), Mock(), ParametersDiffer.of(4, ["w"])
    tasks.engine = Mock(version=3, load_weights=AsyncMock(side_effect=error))
    loader = WeightLoader(Mock(), tasks, lifecycle, asyncio.get_running_loop())
    for _ in range(PARITY_TRIES):
        assert not lifecycle.engine_failed.called
        loader.new_incarnation()
        with pytest.raises(ParametersDiffer):
            await loader.load(Mock(version=4))
    assert lifecycle.engine_failed.called


class Receiving:
    """The transfer of version 1 to a receiver that serves ``version``, in a thread of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, version: int = 0) -> None:
        self.evaluating, self.asked = threading.Event(), threading.Event()
        self.evaluating.set()
        self.loaded: list[int] = []
        came = iter([SimpleNamespace(version=1, seconds=0.1, base=None)])

        def receive(sources: Any, **named: Any) -> Any:
            for staged in came:
                return staged
            raise EpochCancelled("over")

        patch.setattr(weight_receiver, "say_hello", lambda mesh, version: 1)
        patch.setattr(weight_receiver, "acknowledge", lambda mesh, version: None)
        patch.setattr(weight_receiver, "receive_snapshot", receive)
        receiver: Any = WeightReceiver(
            url="redis://nowhere",
            run_id="r",
            device=torch.device("cpu"),
            on_link_error=print,
            on_weights=lambda staged: self.loaded.append(staged.version),
            evaluating=self.ask,
        )
        receiver.version = version
        self.link = WeightLink(1, "policy-0")
        self.thread = threading.Thread(target=self.run, args=(receiver,), daemon=True)
        self.thread.start()

    def ask(self) -> bool:
        self.asked.set()
        return self.evaluating.is_set()

    def run(self, receiver: Any) -> None:
        try:
            receiver.transfer(self.link, None)
        except EpochCancelled:
            pass


def test_weights_wait_for_an_evaluation_and_are_loaded_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiving = Receiving(monkeypatch)
    assert receiving.asked.wait(60)
    assert receiving.loaded == []
    receiving.evaluating.clear()
    receiving.thread.join(60)
    assert receiving.loaded == [1]


def test_a_link_that_is_replaced_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    receiving = Receiving(monkeypatch)
    assert receiving.asked.wait(60)
    receiving.link.withdrawn.set()
    receiving.thread.join(60)
    assert not receiving.thread.is_alive() and receiving.loaded == []


def test_the_first_weights_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    receiving = Receiving(monkeypatch, version=-1)
    receiving.thread.join(60)
    assert receiving.loaded == [1]


@pytest.mark.parametrize("first", ["hand over", "close"])
def test_a_worker_that_ends_frees_the_thread_that_hands_weights_over(first: str) -> None:
    """Its event loop runs no more."""
    loop = asyncio.new_event_loop()
    part: Any = SimpleNamespace(version=-1)
    loader = WeightLoader(part, part, part, loop)
    staged: Any = SimpleNamespace(version=1, tensors={}, seconds=0.1)
    if first == "close":
        loader.close()
    with ThreadPoolExecutor(1) as pool:
        handing_over = pool.submit(loader.on_weights, staged)
        while first == "hand over" and loader._handed is None:
            time.sleep(0.001)
        loader.close()
        assert isinstance(handing_over.exception(60), EpochCancelled)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
