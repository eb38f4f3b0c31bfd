"""The worker's side of the contract: what it holds, hands in, hands back and drops, and when.

Most tests choose the instant of every message with a controller in the test and an engine without a
model; the last ones run the real engine against a real controller, and the worker as a process.
"""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from transformers import AutoModelForCausalLM

from controller.store.journal_audit import verify
from paceline.config.schema import Config
from paceline.process.lifetime import exit_status
from paceline.v1 import common_pb2, rollout_pb2, worker_pb2
from paceline.weights.weight_transfer import StagedWeights
from rollout_worker import main as worker_main
from rollout_worker.engine.base import (
    EngineDied,
    EngineError,
    GenerationFailed,
    ParametersDiffer,
    SwapFailed,
)
from rollout_worker.lifecycle import EngineFailed, EngineLost
from rollout_worker.main import RolloutWorker
from rollout_worker.weight_loading import LOAD_TRIES
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.tiny_model import make_tiny_model
from testbed.workers.fake_workers import FakePolicy
from tests.fakes import worker_rewards
from tests.fakes.engine import FakeEngine
from tests.fakes.rollout_controller import Key, RolloutController

GATED = "tests.fakes.worker_rewards:gated"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class Scene:
    """A worker with a loaded engine and its controller."""

    def __init__(
        self, controller: RolloutController, worker: RolloutWorker, engine: FakeEngine
    ) -> None:
        self.controller, self.worker, self.engine = controller, worker, engine
        self.ended = asyncio.create_task(worker.run())

    async def held(self) -> set[Key]:
        """What the worker says it holds, in a report that was made after this was asked."""
        seen = len(self.controller.reports)
        await until(lambda: len(self.controller.reports) > seen + 1)
        return self.controller.held

    async def load(self, version: int) -> None:
        await self.worker.loading.load(StagedWeights(version, {}))

    async def fail_to_load(self, version: int, error: Exception) -> None:
        """Into the receiver, which so knows that the link must be replaced."""
        self.engine.load_error = error
        with pytest.raises(type(error)):
            await self.load(version)
        self.engine.load_error = None

    async def begin(self, *task_ids: str) -> list[Key]:
        """These tasks are leased; returns when the engine is at work on them."""
        tasks = [self.controller.lease(task_id) for task_id in task_ids]
        await until(lambda: self.engine.running >= set(task_ids))
        return tasks

    async def hand_in(self, task_id: str) -> Key:
        """This task is leased, generated and handed in."""
        (task,) = await self.begin(task_id)
        self.engine.finish(task_id)
        await until(lambda: task in self.controller.groups)
        return task

    async def drain(self) -> None:
        """Returns when the worker says that it leaves."""
        self.controller.lifecycle = worker_pb2.LIFECYCLE_DRAINING
        draining = worker_pb2.LIFECYCLE_DRAINING
        await until(lambda: self.controller.reports[-1].lifecycle == draining)

    async def end(self) -> None:
        """Returns when the worker has ended, in whatever way."""
        await asyncio.wait_for(asyncio.wait([self.ended]), 60)


Play = Callable[..., AbstractAsyncContextManager[Scene]]


@pytest.fixture
async def play(model: Path) -> AsyncIterator[Play]:
    # drain_s by default: longer than every wait of a test, so that its end is never what passes.
    @asynccontextmanager
    async def start(
        *,
        at_once: bool = False,
        reward: str = "exact_match",
        drain_s: float = 600.0,
        **rollout: Any,
    ) -> AsyncIterator[Scene]:
        worker_rewards.gate = asyncio.Event()
        controller = RolloutController()
        address = await controller.start()
        config = Config.model_validate(
            {
                "model": {"path": str(model), "device": "cpu"},
                "data": {"path": "unused", "max_prompt_tokens": 64},
                "reward": {"functions": [reward], "processes": 0},
                "rollout": {"group_size": 2, "max_tokens": 16, "max_sequences": 64, **rollout},
                "fleet": {"drain_s": drain_s},
            }
        )
        worker = RolloutWorker(config, [address], "rollout-0", "127.0.0.1")
        engine = worker.engine = FakeEngine(held=not at_once)
        scene = Scene(controller, worker, engine)
        try:
            # Without a connection the last report of a worker that ends is not waited for.
            await until(lambda: controller.reports and worker.session.connected)
            await scene.load(3)
            yield scene
        finally:
            worker.lifecycle.stop()
            await asyncio.wait([scene.ended], timeout=60)
            await controller.close()
        scene.ended.result()

    yield start


async def test_a_lease_is_named_in_every_report_until_its_group_is_acknowledged(
    play: Play,
) -> None:
    async with play(reward=GATED) as scene:
        controller, engine = scene.controller, scene.engine
        assert await scene.held() == set()
        first, second = await scene.begin("t0", "t1")
        since = len(controller.reports)
        assert await scene.held() == {first, second}, "generating"
        engine.finish("t0")
        await until(lambda: engine.running == {"t1"})
        assert await scene.held() == {first, second}, "scoring"
        controller.acknowledging.clear()
        worker_rewards.gate.set()
        await until(lambda: controller.groups)
        assert await scene.held() == {first, second}, "submitted, not acknowledged"
        named = [{r.task_id for r in report.held_leases} for report in controller.reports[since:]]
        assert all(names == {"t0", "t1"} for names in named)
        controller.acknowledging.set()
        await until(lambda: controller.held == {second})
        assert set(controller.groups) == {first}


async def test_slots_that_short_samples_leave_are_filled_while_the_long_one_runs(
    play: Play,
) -> None:
    async with play(max_sequences=4) as scene:
        controller, engine = scene.controller, scene.engine
        await scene.begin("t0", "t1")
        controller.lease("t2")
        asked = len(controller.lease_requests)
        assert await scene.held() == {("t0", 1), ("t1", 1)}
        assert len(controller.lease_requests) == asked, "full"
        for _ in range(2):
            engine.completion_finished("t1/1")
        engine.completion_finished("t0/1")
        await until(lambda: engine.running == {"t0", "t1", "t2"})
        assert controller.reports[-1].gauges["slot_occupancy"] > 0
        for task_id in ("t0", "t1", "t2"):
            engine.finish(task_id)
        await until(lambda: len(controller.groups) == 3)


async def test_a_task_leased_twice_by_a_repeated_reply_is_generated_once(play: Play) -> None:
    async with play() as scene:
        scene.controller.lease("t0")
        scene.controller.lease("t0")
        await until(lambda: scene.engine.running)
        assert len(await scene.held()) == 1
        assert len(scene.engine.requests) == 1


async def test_a_lease_of_which_no_row_fits_into_the_reply_is_not_asked_for_again(
    play: Play,
) -> None:
    async with play() as scene:
        scene.controller.too_large.add("t0")
        scene.controller.lease("t0")
        asked = len(scene.controller.lease_requests)
        await until(lambda: len(scene.controller.lease_requests) > asked)
        scene.controller.lease("t1")
        await until(lambda: scene.engine.running == {"t1"})


@pytest.mark.parametrize("stage", ["generating", "scoring", "waiting to be sent"])
async def test_a_cancelled_task_is_aborted_and_never_handed_in(play: Play, stage: str) -> None:
    async with play(reward=GATED if stage == "scoring" else "exact_match") as scene:
        controller, engine = scene.controller, scene.engine
        cancelled, kept, ahead = await scene.begin("t0", "t1", "t2")
        if stage == "waiting to be sent":
            # Another submission is on its way, and an outage holds it up.
            controller.refusing_submits = True
            engine.finish("t2")
            await until(lambda: controller.submits)
        if stage != "generating":
            engine.finish("t0")
            await until(lambda: "t0" not in engine.running)
        controller.cancelled = [common_pb2.TaskRef(task_id="t0", attempt=1)]
        await until(lambda: controller.held == {kept, ahead})
        assert engine.aborted == (["t0"] if stage == "generating" else [])
        controller.refusing_submits = False
        worker_rewards.gate.set()
        for task_id in engine.running:
            engine.finish(task_id)
        await until(lambda: set(controller.groups) == {kept, ahead})
        assert await scene.held() == set() and not controller.returns
        assert cancelled not in controller.groups


async def test_a_draining_worker_finishes_what_it_holds_takes_nothing_new_and_leaves(
    play: Play,
) -> None:
    async with play() as scene:
        controller = scene.controller
        (held,) = await scene.begin("t0")
        await scene.drain()
        # The lease request that was open when the directive came is answered after it.
        late = controller.lease("t1")
        await until(lambda: late in controller.returns)
        assert controller.returns[late].kind == rollout_pb2.RETURN_KIND_HAND_BACK
        assert not scene.ended.done()
        scene.engine.finish("t0")
        await asyncio.wait_for(scene.ended, 60)
        assert set(controller.groups) == {held} and set(controller.returns) == {late}
        assert controller.reports[-1].lifecycle == worker_pb2.LIFECYCLE_STOPPED
        assert not controller.reports[-1].held_leases


@pytest.mark.parametrize("lifecycle", ["DRAINING", "STOPPED"])
async def test_a_stopped_worker_and_a_drain_that_takes_too_long_hand_back(
    play: Play, lifecycle: str
) -> None:
    async with play(drain_s=0.2 if lifecycle == "DRAINING" else 600.0) as scene:
        (held,) = await scene.begin("t0")
        scene.controller.lifecycle = getattr(worker_pb2, f"LIFECYCLE_{lifecycle}")
        await asyncio.wait_for(scene.ended, 60)
        assert scene.controller.returns[held].kind == rollout_pb2.RETURN_KIND_HAND_BACK
        assert scene.engine.aborted == ["t0"] and not scene.controller.groups
        assert scene.controller.reports[-1].lifecycle == worker_pb2.LIFECYCLE_STOPPED


async def test_a_drain_is_over_when_its_last_task_is_cancelled(play: Play) -> None:
    async with play() as scene:
        await scene.begin("t0")
        await scene.drain()
        scene.controller.cancelled = [common_pb2.TaskRef(task_id="t0", attempt=1)]
        await asyncio.wait_for(scene.ended, 60)
        assert not scene.controller.groups and not scene.controller.returns


async def test_what_an_engine_dies_with_is_not_handed_back_as_by_one_that_leaves(
    play: Play,
) -> None:
    """One of those prompts may have killed it: the ledger finds out which, by the worker's
    death."""
    with pytest.raises(EngineLost, match="device lost"):
        async with play(reward=GATED) as scene:
            (scored,) = await scene.begin("t0")
            scene.engine.finish("t0")
            await until(lambda: not scene.engine.running)
            with_it = await scene.begin("t1", "t2")
            assert await scene.held() == {scored, *with_it}
            scene.engine.fail(EngineError("device lost"))
            await scene.end()
            assert set(scene.controller.returns) == {scored}
            assert set(with_it) <= scene.controller.held
            assert {r.lifecycle for r in scene.controller.reports} == {
                worker_pb2.LIFECYCLE_RUNNING
            }, "nobody who leaves is suspected of anything"


async def test_weights_count_as_loaded_when_the_engine_serves_them_not_when_they_came(
    play: Play,
) -> None:
    async with play() as scene:
        scene.engine.load_gate.clear()
        loading = asyncio.create_task(scene.load(4))
        await until(lambda: scene.engine.loads == [3, 4])
        await scene.held()
        assert scene.controller.reports[-1].loaded_version == 3
        scene.engine.load_gate.set()
        await loading
        await until(lambda: scene.controller.reports[-1].loaded_version == 4)


async def test_a_failed_generation_never_enters_training_as_a_zero_reward(play: Play) -> None:
    async with play() as scene:
        (held,) = await scene.begin("t0")
        scene.engine.spoil("t0", GenerationFailed("the model's logits are not finite"))
        await until(lambda: scene.controller.returns)
        returned = scene.controller.returns[held]
        failed = rollout_pb2.RETURN_KIND_FAILED, "generation_error"
        assert (returned.kind, returned.reason) == failed
        assert not scene.controller.groups


async def test_weights_that_fail_to_load_are_asked_for_again_while_the_old_ones_serve(
    play: Play,
) -> None:
    async with play(at_once=True) as scene:
        for version in range(4, 3 + LOAD_TRIES):
            await scene.fail_to_load(version, SwapFailed("another checksum"))
        task = scene.controller.lease("t0")
        await until(lambda: task in scene.controller.groups)
        assert scene.controller.groups[task].completions[0].versions[0].version == 3
        await scene.load(4)
        await until(lambda: scene.controller.reports[-1].loaded_version == 4)
        # A failure now and then adds up to nothing.
        await scene.fail_to_load(5, SwapFailed("once more"))
        await scene.held()
        assert not scene.ended.done()


async def test_an_engine_whose_parameters_differ_serves_nothing_until_it_has_loaded_them_again(
    play: Play,
) -> None:
    async with play() as scene:
        (busy,) = await scene.begin("t0")
        differ = ParametersDiffer.of(4, ["lm_head.weight", "model.norm.weight"])
        await scene.fail_to_load(4, differ)
        await until(lambda: busy in scene.controller.returns)
        returned = scene.controller.returns[busy]
        assert (returned.kind, returned.reason) == (
            rollout_pb2.RETURN_KIND_HAND_BACK,
            "weights_differ",
        )
        late = scene.controller.lease("t1")
        await until(lambda: scene.controller.reports[-1].parity_failures == 1)
        report = scene.controller.reports[-1]
        assert report.loaded_version == -1 and "lm_head.weight and 1 more" in report.parity_detail
        assert not scene.engine.running and not scene.controller.groups
        await scene.load(4)
        (again,) = await scene.begin("t2")
        scene.engine.release()
        await until(lambda: again in scene.controller.groups)
        assert late in {*scene.controller.returns, *scene.controller.groups}
        for group in scene.controller.groups.values():
            assert {v.version for c in group.completions for v in c.versions} == {4}


async def test_the_third_swap_with_differing_parameters_ends_the_worker(play: Play) -> None:
    """Not in a row: memory that loses what is written to it fails now and then."""
    with pytest.raises(EngineFailed, match=r"differed .* after 3 swaps: .*lm_head"):
        async with play() as scene:
            for version in (4, 5, 6):
                differ = ParametersDiffer.of(version, ["lm_head.weight"])
                await scene.fail_to_load(version, differ)
                if version < 6:
                    await scene.load(version)
            await scene.end()
            assert scene.controller.reports[-1].parity_failures == 3, "the last one is told, too"


@pytest.mark.parametrize("version", [3, 2])
async def test_what_was_begun_with_weights_that_were_never_committed_is_handed_back(
    play: Play, version: int
) -> None:
    """Their publisher died; others come under the same number, or an older version again."""
    async with play() as scene:
        controller, engine = scene.controller, scene.engine
        (begun,) = await scene.begin("t0")
        engine.load_gate.clear()
        loading = asyncio.create_task(scene.load(version))
        await until(lambda: set(controller.returns) == {begun})
        item = controller.returns[begun]
        assert (item.kind, item.reason) == (
            rollout_pb2.RETURN_KIND_HAND_BACK,
            "weights_withdrawn",
        )
        # What is leased while they are replaced would begin with the old ones.
        asked = controller.lease("t1")
        await until(lambda: asked in controller.returns)
        assert not engine.running and not scene.worker.may_lease()
        engine.load_gate.set()
        await loading
        after = await scene.hand_in("t2")
        assert controller.groups[after].completions[0].versions[0].version == version


async def test_an_engine_that_cannot_load_weights_ends_the_worker(play: Play) -> None:
    with pytest.raises(EngineFailed, match="weights 4 not loaded: device lost"):
        async with play() as scene:
            await scene.fail_to_load(4, EngineError("device lost"))
            await scene.end()


@pytest.mark.parametrize(
    ("error", "status"), [(EngineError("no such model"), 2), (EngineDied("it was killed"), 1)]
)
def test_an_engine_killed_while_it_starts_is_not_bad_input(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: EngineError, status: int
) -> None:
    """Bad input ends the run; a process that was killed is started again."""

    class Stillborn(FakeEngine):
        async def start(self) -> None:
            raise error

    monkeypatch.setattr(worker_main, "make_engine", lambda config, tokenizer: Stillborn())
    monkeypatch.setattr(worker_main.logs, "setup", lambda worker_id: None)
    config = Config.model_validate({"model": {"path": str(model)}, "data": {"path": "unused"}})
    here = {"controllers": ["127.0.0.1:1"], "tensor_host": "127.0.0.1", "run_dir": None}
    run = partial(worker_main.run, config, Namespace(id="rollout-0", **here))
    assert exit_status(run, "rollout_worker") == status
    left = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in left if "rewards.child" in " ".join(p.cmdline())], "nor does it stay"


async def test_a_rejoining_worker_drops_what_it_held_and_keeps_its_weights(play: Play) -> None:
    async with play(reward=GATED) as scene:
        controller, engine = scene.controller, scene.engine
        await scene.begin("t0", "t1", "t2")
        engine.finish("t1")
        await until(lambda: len(engine.running) == 2)
        old = controller.incarnations[0]
        controller.dead.add(old)
        await until(lambda: len(controller.incarnations) == 2)
        await until(lambda: controller.reports[-1].caller.incarnation != old)
        assert await scene.held() == set()
        assert set(engine.aborted) == {"t0", "t2"}
        assert controller.reports[-1].loaded_version == 3 and engine.loads == [3]
        worker_rewards.gate.set()
        after = await scene.hand_in("t5")
        assert set(controller.groups) == {after}, "nothing of the old incarnation is handed in"


async def test_a_worker_whose_registration_was_lost_registers_anew(play: Play) -> None:
    """Behind a Sentinel the new master may not know of it; its session says so a little later."""
    async with play() as scene:
        controller = scene.controller
        lost = controller.incarnations[0]
        controller.unknown.add(lost)
        asked = len(controller.lease_requests)
        await scene.load(4)  # the request that waits is made anew
        await until(lambda: len(controller.lease_requests) > asked + 1 or scene.ended.done())
        assert not scene.ended.done()
        controller.dead.add(lost)
        await until(lambda: len(controller.incarnations) == 2)
        await scene.hand_in("t0")


async def test_groups_of_an_incarnation_that_is_over_are_not_handed_in_by_the_next(
    play: Play,
) -> None:
    async with play() as scene:
        controller = scene.controller
        controller.refusing_submits = True
        await scene.begin("t0")
        scene.engine.finish("t0")
        await until(lambda: controller.submits)
        controller.dead.add(controller.incarnations[0])
        await until(lambda: len(controller.incarnations) == 2)
        controller.refusing_submits = False
        after = await scene.hand_in("t1")
        assert set(controller.groups) == {after}


async def test_a_group_that_the_controller_finds_invalid_is_returned_as_failed(
    play: Play,
) -> None:
    async with play(at_once=True) as scene:
        scene.controller.verdict = rollout_pb2.VERDICT_INVALID
        task = scene.controller.lease("t0")
        await until(lambda: task in scene.controller.returns)
        assert scene.controller.returns[task].kind == rollout_pb2.RETURN_KIND_FAILED
        assert scene.controller.returns[task].reason == "invalid_group"
        assert await scene.held() == set()


async def test_an_evaluation_task_is_one_greedy_completion(play: Play) -> None:
    async with play(at_once=True, temperature=0.7) as scene:
        task = scene.controller.lease("e5.0", kind=rollout_pb2.TASK_KIND_EVAL)
        train = scene.controller.lease("t0")
        await until(lambda: set(scene.controller.groups) == {task, train})
        by_id = {request.request_id: request for request in scene.engine.requests}
        assert by_id["e5.0/1"].params.greedy and by_id["e5.0/1"].count == 1
        assert not by_id["t0/1"].params.greedy and by_id["t0/1"].count == 2
        meta = scene.controller.meta[task]
        assert meta.kind == rollout_pb2.TASK_KIND_EVAL and list(meta.lengths) == [3]
        assert (list(meta.rewards), meta.digest) == ([1.0], "")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "s" + "1" * 70 + "="}, "prompt_too_long"),
        ({"question": "s21="}, "malformed_row"),
        ({"prompt": ""}, "malformed_row"),
    ],
)
async def test_a_row_that_is_no_prompt_is_dropped_with_a_reason(
    play: Play, row: dict[str, Any], reason: str
) -> None:
    async with play(at_once=True) as scene:
        task = scene.controller.lease("t0", **row)
        await until(lambda: task in scene.controller.returns)
        item = scene.controller.returns[task]
        assert item.kind == rollout_pb2.RETURN_KIND_DROP
        assert item.reason == reason and item.detail
        assert not scene.engine.requests


async def test_lost_replies_and_a_lost_leader_lose_and_double_nothing(
    model: Path, tmp_path: Path
) -> None:
    """The real engine and a real controller, whose replies get lost and which is then killed."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "s21=", "answer": "12"}) + "\n")
    with running_controllers(
        tmp_path,
        model={"path": str(model), "device": "cpu"},
        data={"eval_path": str(held_out), "answer_field": "answer"},
        reward={"processes": 0},
        rollout={"max_sequences": 16},
        train={"steps": 1000, "max_staleness": 1000, "eval_every": 1},
    ) as controllers:
        config, (address,) = config_of(controllers), addresses(controllers)
        worker = RolloutWorker(config, [address], "rollout-0", "127.0.0.1")
        lost = lose_first_replies(worker, 3)
        running = asyncio.create_task(worker.run())
        policy = FakePolicy(config, [address], "policy-0")
        await policy.start()
        training = asyncio.create_task(policy.work(lambda: False))
        try:
            await until(lambda: worker.lifecycle.state == worker_pb2.LIFECYCLE_RUNNING)
            weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
            await worker.loading.load(StagedWeights(0, weights))
            await until(lambda: policy.timings.steps >= 3 and len(lost) == 3)
            controllers.started[0].kill()
            await until(lambda: len(worker.tasks.outbox))
            kept = {item.request_id for item in worker.held}
            assert kept, "held through the outage"
            before = policy.timings.steps
            controllers.start("controller-0")
            await until(lambda: policy.timings.steps >= before + 3)
            worker.lifecycle.leaving.set()
            await asyncio.wait_for(running, 60)
        finally:
            training.cancel()
            worker.lifecycle.stop()
            await asyncio.gather(running, training, return_exceptions=True)
            await policy.stop(goodbye=False)
        report = verify(controllers.redis_url, config.run.name)
        assert report.ok, report.problems
        assert report.counts["duplicates"] == 0 and report.counts["lost"] == 0


def lose_first_replies(worker: RolloutWorker, count: int) -> list[str]:
    """The worker's first ``count`` submissions take effect, and their replies never arrive."""
    lost: list[str] = []
    attempt = worker.control._attempt

    async def losing(address: str, method: str, *request: Any) -> Any:
        reply = await attempt(address, method, *request)
        if method != "RolloutService.SubmitGroups" or len(lost) >= count:
            return reply
        lost.append(reply.results[0].task.task_id)
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "lost")

    worker.control._attempt = losing  # type: ignore[method-assign]
    return lost
