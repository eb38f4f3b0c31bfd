"""Malformed, oversized, non-finite, duplicate and unknown submissions: refused, nothing changed."""

import json
from collections.abc import Callable, MutableSequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.services.rollout import check_meta
from controller.services.validation import check
from controller.store.journal import Journal
from controller.store.ledger_follower import LedgerFollower
from controller.store.redis_keys import Keys
from paceline.config.changes import with_settings
from paceline.payloads.group_limits import GroupLimits, Invalid
from paceline.payloads.redis_payloads import RedisPayloads
from paceline.process import origins
from paceline.redis.client import connect
from paceline.rpc.client import RequestRefused
from paceline.v1 import admin_pb2, common_pb2, policy_pb2, rollout_pb2, worker_pb2
from testbed.fleets.controllers import (
    addresses,
    config_of,
    running_controllers,
    until,
    working_fleet,
)
from testbed.workers.fake_workers import FakeRollout, make_group
from tests.fixtures.group_meta import accepted, submitted

LIMITS = GroupLimits(group_size=4, max_sequence_tokens=80, vocabulary=100)
TASK = common_pb2.TaskRef(task_id="t0", attempt=1)


def group(version: int = 0) -> rollout_pb2.Group:
    return make_group(TASK, completions=4, tokens=16, version=version)


def test_equal_rewards_have_no_spread_at_all() -> None:
    """train.filter_uninformative drops groups whose standard deviation is 0 exactly."""
    equal = group()
    for completion in equal.completions:
        completion.reward = 0.1
    del equal.completions[3]
    limits = GroupLimits(group_size=3, max_sequence_tokens=80, vocabulary=100)
    assert sum([0.1] * 3) / 3 != 0.1
    assert accepted(equal, limits, newest_version=0).reward_std == 0.0
    equal.completions[0].reward = 0.4
    assert accepted(equal, limits, newest_version=0).reward_std == pytest.approx(0.1732, abs=1e-4)


@pytest.mark.parametrize("claim", [-2, (1 << 53), (1 << 63) - 1])
@pytest.mark.parametrize("field", ["state_version", "loaded_version"])
def test_a_version_after_which_no_other_could_come_is_no_version(field: str, claim: int) -> None:
    """A rollback takes the number after the highest one claimed: beyond 2^63 no controller could
    say it, one after the other."""
    report = worker_pb2.Report(
        caller=common_pb2.Caller(worker_id="rollout-0", incarnation=1),
        lifecycle=worker_pb2.LIFECYCLE_RUNNING,
        state_version=-1,
        loaded_version=(1 << 53) - 1,
    )
    check(report)
    setattr(report, field, claim)
    with pytest.raises(Invalid, match=field):
        check(report)


def floats(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def _set(path: str, value: object) -> Callable[[rollout_pb2.Group], None]:
    def change(message: rollout_pb2.Group) -> None:
        setattr(message.completions[0], path, value)

    return change


MALFORMED: dict[str, Callable[[rollout_pb2.Group], None]] = {
    "no completions": lambda g: g.ClearField("completions"),
    "one completion too many": lambda g: g.completions.append(g.completions[0]),
    "empty tokens": _set("tokens", b""),
    "tokens cut in the middle": _set("tokens", b"\0" * 63),
    "negative token": _set("tokens", np.full(16, -1, dtype="<i4").tobytes()),
    "token beyond the vocabulary": _set("tokens", np.full(16, 100, dtype="<i4").tobytes()),
    "prompt token beyond the vocabulary": lambda g: setattr(
        g, "prompt_tokens", np.array([2_000_000_000], dtype="<i4").tobytes()
    ),
    "too many tokens": lambda g: g.completions[0].MergeFrom(
        rollout_pb2.Completion(tokens=b"\1\0\0\0" * 81, logprobs=b"\0" * 324)
    ),
    "fewer log-probs than tokens": _set("logprobs", floats(*[-1.0] * 15)),
    "log-prob not a number": _set("logprobs", floats(*[-1.0] * 15, float("nan"))),
    "log-prob infinite": _set("logprobs", floats(*[-1.0] * 15, float("-inf"))),
    "log-prob above zero": _set("logprobs", floats(*[-1.0] * 15, 0.5)),
    "component whose square overflows": lambda g: g.completions[0].reward_components.update(
        {"x": -1e200}
    ),
    "no finish reason": _set("finish_reason", rollout_pb2.FINISH_REASON_UNSPECIFIED),
    "mask of the wrong length": _set("loss_mask", b"\1" * 15),
    "mask with other values": _set("loss_mask", b"\2" * 16),
    "no versions": lambda g: g.completions[0].ClearField("versions"),
    "versions cover too little": lambda g: setattr(g.completions[0].versions[0], "length", 15),
    "more version spans than tokens": lambda g: g.completions[0].versions.extend(
        [common_pb2.VersionSpan(version=0, length=0)] * 100
    ),
    "version that does not exist": lambda g: setattr(g.completions[0].versions[0], "version", 7),
    "negative version": lambda g: setattr(g.completions[0].versions[0], "version", -1),
    "component not finite": lambda g: g.completions[0].reward_components.update(
        {"x": float("inf")}
    ),
    "no prompt": lambda g: g.ClearField("prompt_tokens"),
    "a branch of nothing": lambda g: g.completions.insert(0, branch_of(0, 4)),
    "a branch of itself": lambda g: g.completions.append(branch_of(4, 4)),
    "a branch of another sample": lambda g: g.completions.append(branch_of(0, 4)),
    "a branch that shares more than there is": lambda g: g.completions.append(branch_of(3, 33)),
    "a branch whose path is too long": lambda g: g.completions.append(branch_of(3, 32, 49)),
    "a branch with a reward": lambda g: g.completions.append(branch_of(3, 4, reward=1.0)),
    "a branch with a component": lambda g: g.completions.append(
        branch_of(3, 4, reward_components={"x": 1.0})
    ),
    "a branch with an answer": lambda g: g.completions.append(branch_of(3, 4, answer="7")),
    "a first token that nothing predicts": lambda g: g.completions.append(branch_of(3, 0)),
    "a path of one token": lambda g: g.completions.append(branch_of(3, 0, 1, loss_mask=b"\0")),
    "more branches than a sample has": lambda g: g.completions.extend([branch_of(3, 4)] * 1024),
}


def branch_of(of: int, prefix: int, tokens: int = 4, **other: Any) -> rollout_pb2.Completion:
    return rollout_pb2.Completion(
        tokens=b"\1\0\0\0" * tokens,
        logprobs=floats(*[-1.0] * tokens),
        versions=[_span(0, tokens)],
        finish_reason=rollout_pb2.FINISH_REASON_STOP,
        branch=rollout_pb2.Branch(of=of, prefix=prefix),
        **other,
    )


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_group_is_refused(name: str) -> None:
    message = group()
    MALFORMED[name](message)
    with pytest.raises(Invalid):
        accepted(message, LIMITS, newest_version=3)


@pytest.mark.parametrize(("of", "prefix"), [(3, 1), (3, 16), (3, 32), (4, 20), (4, 36), (3, 0)])
def test_a_branch_of_any_place_before_it_is_accepted(of: int, prefix: int) -> None:
    message = group()
    masked = {"loss_mask": b"" if prefix else b"\0\1\1\1"}
    message.completions.extend([branch_of(3, 32), branch_of(of, prefix, **masked)])
    meta = accepted(message, LIMITS, newest_version=0)
    assert (meta.samples, meta.sequences, meta.branches) == (4, 6, (1, 1, 1, 3))
    assert meta.prefixes == (16, 16, 16, 16, 32, prefix)
    assert meta.whole_lengths == (32, 32, 32, 32, 36, prefix + 4)
    assert meta.sequence_versions == (((0,), 4),)  # a sample counts once
    each = accepted(message, replace(LIMITS, each_branch=True), newest_version=0)
    assert each.sequence_versions == (((0,), 6),)
    assert (each.reward_mean, each.reward_std) == (meta.reward_mean, meta.reward_std)
    accepted(message, replace(LIMITS, branches=3), newest_version=0)
    with pytest.raises(Invalid, match="each sample has 1 to 2 of them"):
        accepted(message, replace(LIMITS, branches=2), newest_version=0)


def _span(version: int, length: int) -> common_pb2.VersionSpan:
    return common_pb2.VersionSpan(version=version, length=length)


def _of(*versions: int, sequences: int = 1) -> rollout_pb2.SequenceVersions:
    return rollout_pb2.SequenceVersions(versions=versions, sequences=sequences)


def _branched(branches: list[int], prefixes: list[int], f: rollout_pb2.GroupMeta) -> None:
    f.branches.extend(branches)
    f.prefixes.extend(prefixes)


ONE_MORE = rollout_pb2.GroupMeta(lengths=[16], rewards=[0.0])


def _without(meta: rollout_pb2.GroupMeta, *fields: str) -> None:
    for field in fields:
        meta.ClearField(field)


def _pop(*lists: MutableSequence[Any]) -> None:
    for each in lists:
        each.pop()


IMPOSSIBLE: dict[str, Callable[[rollout_pb2.GroupMeta], None]] = {
    "no digest": lambda f: f.ClearField("digest"),
    "digest that is none": lambda f: setattr(f, "digest", "../" + "0" * 29),
    "no sequences": lambda f: f.ClearField("lengths"),
    "one sequence too few": lambda f: _pop(f.lengths, f.rewards),
    "one sequence too many": lambda f: f.MergeFrom(ONE_MORE),
    "fewer rewards than sequences": lambda f: f.rewards.pop() and None,
    "answers of some sequences": lambda f: f.answers.append("7"),
    "empty sequence": lambda f: f.lengths.__setitem__(0, 0),
    "sequence that is too long": lambda f: f.lengths.__setitem__(0, 1 << 31),
    "reward not a number": lambda f: f.rewards.__setitem__(0, float("nan")),
    "reward whose square overflows": lambda f: f.rewards.__setitem__(0, 1e200),
    "no prompt": lambda f: f.ClearField("prompt_tokens"),
    "prompt that is too long": lambda f: setattr(f, "prompt_tokens", 1 << 31),
    "nothing to train on": lambda f: _without(f, "token_versions", "sequence_versions"),
    "more trainable tokens than tokens": lambda f: setattr(f.token_versions[0], "length", 999),
    "a version without tokens": lambda f: setattr(f.token_versions[0], "length", 0),
    "version that does not exist": lambda f: setattr(f, "max_version", 1 << 40),
    "negative version": lambda f: setattr(f, "min_version", -1),
    "versions outside the oldest and newest": lambda f: f.token_versions.append(_span(1 << 40, 1)),
    "versions that fall": lambda f: f.token_versions.append(_span(0, 1)),
    "more sequences by version than sequences": lambda f: setattr(
        f.sequence_versions[0], "sequences", 5
    ),
    "sequences of other versions than tokens": lambda f: f.sequence_versions.append(_of(1 << 40)),
    "sequences of no version": lambda f: f.sequence_versions.append(_of()),
    "kind of another task": lambda f: setattr(f, "kind", rollout_pb2.TASK_KIND_EVAL),
    "task id that is none": lambda f: setattr(f.task, "task_id", "../../etc"),
    "attempt zero": lambda f: setattr(f.task, "attempt", 0),
    "negative seconds": lambda f: setattr(f, "generate_s", -1.0),
    "more truncated than there are": lambda f: setattr(f, "truncated", 5),
    **{
        f"branches {branches} with prefixes {prefixes}": partial(_branched, branches, prefixes)
        for branches, prefixes in [
            ([1, 1, 1, 1], []),
            ([], [16] * 4),
            ([4], [16] * 4),  # one sample in place of four
            ([1, 1, 1, 2], [16] * 4),
            ([1, 1, 0, 2], [16] * 4),
            ([1, 1, 1, 1], [16, 16, 16, 4]),  # the first of a sample, without the prompt
        ]
    },
}


def test_a_prefix_is_no_longer_than_a_path_before_it() -> None:
    message = group()
    message.completions.append(branch_of(3, 32))
    meta = submitted(message, LIMITS)
    check_meta(meta, LIMITS, 3)
    meta.prefixes[4] = 33
    with pytest.raises(Invalid, match="no path before it in its sample is over 32"):
        check_meta(meta, LIMITS, 3)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_facts_are_refused(name: str) -> None:
    meta = submitted(group())
    check_meta(meta, LIMITS, 3)
    IMPOSSIBLE[name](meta)
    with pytest.raises(Invalid):
        check_meta(meta, LIMITS, 3)


def test_facts_of_a_group_count_what_will_be_trained() -> None:
    message = group()
    first = message.completions[0]
    del first.versions[:]
    first.versions.add(version=1, length=10)
    first.versions.add(version=3, length=6)
    first.loss_mask = b"\0" * 8 + b"\1" * 8
    meta = accepted(message, LIMITS, newest_version=3)
    assert (meta.sequences, meta.prompt_tokens, meta.tokens) == (4, 16, 3 * 16 + 8)
    assert (meta.min_version, meta.max_version) == (0, 3)
    assert meta.token_versions == ((0, 48), (1, 2), (3, 6))
    assert meta.sequence_versions == (((0,), 3), ((1, 3), 1))
    assert meta.reward_mean == 0.5 and meta.reward_max == 1.0
    assert meta.reward_std == pytest.approx(1 / 3**0.5)


async def test_refused_submissions_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    sections = {"controller": {"max_message_mb": 1}, "model": {"path": str(tmp_path)}}
    with running_controllers(tmp_path, 1, **sections) as controllers:
        redis, keys = connect(controllers.redis_url), Keys("load")
        journal = Journal(redis, keys)

        async def ledger() -> str:
            return (await LedgerFollower.load(journal)).ledger.fingerprint()

        async with working_fleet(controllers, rollouts=0):
            worker = FakeRollout(
                config_of(controllers), addresses(controllers), "rollout-0", tasks_a_lease=2
            )
            await worker.start()
            await until(lambda: worker.version >= 0)
            accepted, held = [(await worker.lease()).leases[0] for _ in range(2)]
            good, waiting = rollout_pb2.Group(), rollout_pb2.Group()
            good.CopyFrom(worker.group_for(accepted))
            waiting.CopyFrom(worker.group_for(held))
            assert (await worker.submit(good)).verdict == rollout_pb2.VERDICT_ACCEPTED
            other = FakeRollout(
                config_of(controllers), addresses(controllers), "rollout-1", tasks_a_lease=2
            )
            await other.start()
            await until(lambda: other.version >= 0)
            theirs = other.group_for((await other.lease()).leases[0])

            async def settled() -> bool:
                """Both have reported what their engines serve: nothing changes by itself any
                more."""
                workers = json.loads(await ledger())["fleet"]["workers"].values()
                loaded = [w["loaded_version"] for w in workers if w["role"] == "rollout"]
                return min(loaded) >= 0

            await until(settled)
            store = RedisPayloads([controllers.redis_url], "load")
            before, payloads = await ledger(), await store.list()

            assert (await worker.submit(theirs)).verdict == rollout_pb2.VERDICT_SUPERSEDED
            stolen = rollout_pb2.ReturnedTask(
                task=theirs.task, kind=rollout_pb2.RETURN_KIND_DROP, reason="mine now"
            )
            returned = await worker.control.call(
                "RolloutService.ReturnTasks",
                rollout_pb2.ReturnRequest(caller=worker.session.caller, tasks=[stolen]),
            )
            assert returned.results[0].verdict == rollout_pb2.VERDICT_SUPERSEDED
            for change in IMPOSSIBLE.values():
                # Of a task that is finished, and of one whose group is awaited.
                for message in (good, waiting):
                    bad = submitted(message)
                    change(bad)
                    reply = await worker.control.call(
                        "RolloutService.SubmitGroups",
                        rollout_pb2.SubmitRequest(caller=worker.session.caller, groups=[bad]),
                    )
                    (result,) = reply.results
                    assert result.verdict == rollout_pb2.VERDICT_INVALID and result.message
            assert (await worker.submit(good)).verdict == rollout_pb2.VERDICT_DUPLICATE
            unknown = make_group(
                common_pb2.TaskRef(task_id="t999", attempt=1), completions=4, tokens=16, version=0
            )
            assert (await worker.submit(unknown)).verdict == rollout_pb2.VERDICT_UNKNOWN_TASK
            huge = submitted(good)
            huge.digest = "x" * (2 << 20)
            with pytest.raises(RequestRefused, match="RESOURCE_EXHAUSTED"):
                await worker.submit_request(
                    rollout_pb2.SubmitRequest(caller=worker.session.caller, groups=[huge])
                )
            for method, request in _bad_requests(worker.session.caller):
                with pytest.raises(RequestRefused) as refusal:
                    await worker.control.call(method, request)
                assert refusal.value.code in (
                    "INVALID_ARGUMENT",
                    "FAILED_PRECONDITION",
                    "NOT_FOUND",
                ), refusal.value
                assert refusal.value.message

            assert await ledger() == before
            assert set(payloads) <= set(await store.list())
            await store.close()
            assert (await worker.submit(waiting)).verdict == rollout_pb2.VERDICT_ACCEPTED
            assert (await other.submit(theirs)).verdict == rollout_pb2.VERDICT_ACCEPTED
            await other.stop(goodbye=False)
            await worker.stop(goodbye=False)
        await redis.aclose()


def _bad_requests(caller: common_pb2.Caller) -> list[tuple[str, object]]:
    stranger = common_pb2.Caller(worker_id="rollout-0", incarnation=12345)
    nobody = common_pb2.Caller(worker_id="ghost", incarnation=1)
    nameless = common_pb2.Caller(worker_id="a b", incarnation=1)
    lease = {"caller": caller, "lease_seq": 9, "max_tasks": 1}
    vote = {"caller": caller, "step": 1}
    scale = {"request_id": "r", "desired": {"policy": 3}}
    paths = "/etc", "checkpoints/step-2", "checkpoints/../checkpoints/step-1", "checkpoints/step-1"
    register = {"caller": caller, "role": common_pb2.ROLE_ROLLOUT, "ranks": 1, "state_version": -1}
    nan = {"loss": common_pb2.Stat(sum=float("nan"), weight=1)}
    requests: dict[tuple[str, type], list[dict[str, Any]]] = {
        ("RolloutService.LeaseTasks", rollout_pb2.LeaseRequest): [
            *(lease | {"caller": who} for who in (nameless, stranger, nobody)),
            *(
                lease | wrong
                for wrong in ({"max_tasks": 0}, {"wait_s": -1}, {"loaded_version": -2})
            ),
        ],
        ("RolloutService.SubmitGroups", rollout_pb2.SubmitRequest): [
            {"caller": stranger, "groups": [submitted(group())]}
        ],
        ("RolloutService.ReturnTasks", rollout_pb2.ReturnRequest): [
            {"caller": caller, "tasks": [rollout_pb2.ReturnedTask(task=TASK)]}
        ],
        ("PolicyService.NextPlan", policy_pb2.PlanRequest): [{"caller": nobody}],
        ("PolicyService.Vote", policy_pb2.VoteRequest): [
            vote,
            vote | {"weights_digest": "d", "stats": nan},
        ],
        ("PolicyService.RecordCheckpoint", policy_pb2.CheckpointRequest): [
            {"caller": caller},
            *({"caller": caller, "step": 1, "path": path} for path in paths),
        ],
        ("WorkerService.Register", worker_pb2.RegisterRequest): [
            {"caller": caller},
            register | {"config_digest": "other", "config_json": '{"train":{"lr":1}}'},
        ],
        ("WorkerService.ReportPeerError", worker_pb2.PeerError): [{"caller": caller}],
        ("AdminService.Scale", admin_pb2.ScaleRequest): [
            scale | {"desired": {"cook": 3}},
            scale | {"expected": {"cook": 3}},
        ],
        ("AdminService.Pause", admin_pb2.PauseRequest): [{"paused": True}],
    }
    return [(name, kind(**one)) for (name, kind), some in requests.items() for one in some]


async def test_other_settings_another_release_and_a_position_that_is_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_controllers(tmp_path, 1) as controllers:
        config, where = config_of(controllers), addresses(controllers)
        other = with_settings(config, {"rollout.temperature": 0.5, "train.optimizer.lr": 0.5})
        worker = FakeRollout(other, where, "rollout-0")
        said = r"differs from the run's: rollout\.temperature is 1\.0 in the run, 0\.5 here\. Start"
        with pytest.raises(RequestRefused, match=said):
            await worker.start()
        with pytest.raises(RequestRefused, match="INVALID_ARGUMENT"):
            request = admin_pb2.EventsRequest(after="yesterday")
            await worker.control.call("AdminService.ReadEvents", request)
        await worker.control.close()
        worker = FakeRollout(config, where, "rollout-0")
        monkeypatch.setattr(origins, "release", lambda: "9.9.9")
        with pytest.raises(RequestRefused, match=r"release '9\.9\.9' .* the controllers '"):
            await worker.start()
        await worker.control.close()
