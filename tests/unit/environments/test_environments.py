"""Transcripts of several turns: exact tokens, honest masks, and no reward where something
failed."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from paceline.payloads.routes import UNKNOWN
from paceline.prompt_tokenizer import PromptTokenizer
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Aborted, Completion, Finish
from rollout_worker.environments import child as environments_child
from rollout_worker.environments.base import (
    BadEnvironment,
    EnvironmentTask,
    Sample,
    TranscriptFull,
    Turn,
    load,
)
from rollout_worker.environments.conversation import Conversation
from rollout_worker.environments.sequences import sequences_of
from rollout_worker.environments.transcript import Transcript, TranscriptPiece
from testbed.fleets.controllers import until
from tests.fixtures.chat_model import END, FORGETFUL, make_chat_model
from tests.fixtures.environment_fixture import (
    Stage,
    check_trained_as_sampled,
    lease_of,
    logprobs_of,
    mask_of,
    spans_of,
    stage_config,
    staged,
    texts_of,
    tokens_of,
)

FAILED = rollout_pb2.RETURN_KIND_FAILED
CHAT = {"data": {"chat": True}}
BY_PROMPT = "tests.fakes.process_environments:by_prompt"
IN_PROCESSES: dict[str, Any] = {"environment": BY_PROMPT, "environment_timeout_s": 2.0}


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("forgetful"), FORGETFUL)


def text_of(tokenizer: PromptTokenizer, group: rollout_pb2.Group, index: int = 0) -> str:
    prompt = np.frombuffer(group.prompt_tokens, "<i4").tolist()
    return tokenizer.decode_all(prompt + tokens_of(group.completions[index]))


async def echo_twice(task: EnvironmentTask, sample: Sample) -> float:
    turn = await sample(task.prompt)
    await sample(f"<{turn.text}>")
    return 1.0


# ---- tokens and masks


async def test_what_the_environment_says_is_masked_and_turns_extend_the_same_tokens(
    model: Path,
) -> None:
    async with staged(model, echo_twice, lambda prompt: f"n{len(prompt)}") as stage:
        group = await stage.group()
        first, second, *_ = (r for r in stage.engine.requests if r.request_id[:6] == "t0/1#0")
        completion = group.completions[0]
        tokens, mask = tokens_of(completion), mask_of(completion)
        said = stage.tokenizer.encode("<n5>")
        made = stage.tokenizer.encode("n5")
        assert group.prompt_tokens == first.prompt_tokens.astype("<i4").tobytes()
        assert tokens[:7] == [*made, END, *said]
        assert second.prompt_tokens.tolist() == [*first.prompt_tokens.tolist(), *tokens[:7]]
        assert mask == [1] * 3 + [0] * 4 + [1] * (len(tokens) - 7)
        assert tokens[-1] == END
        scores = logprobs_of(completion)
        assert scores[:3] == pytest.approx([-0.01, -0.02, -0.03]) and scores[3:7] == [0.0] * 4
        assert scores[7] == pytest.approx(-0.01)
        assert stage.meta_of(group).tokens == sum(map(sum, map(mask_of, group.completions)))


async def test_masked_tokens_carry_the_version_of_the_turn_before_and_stale_nothing(
    model: Path,
) -> None:
    async with staged(model, echo_twice, lambda prompt: "abc") as stage:

        def swap(request: Any) -> None:
            stage.engine._version = 3 if request.request_id.endswith(".1") else 5

        stage.engine.on_answer = swap
        group = await stage.group()
        assert spans_of(group.completions[0]) == [(3, 4 + 5), (5, 4)]
        meta = stage.meta_of(group)
        assert (meta.min_version, meta.max_version) == (3, 5)
        assert meta.token_versions == ((3, 8), (5, 8)), "trained tokens only"


async def test_messages_in_between_are_rendered_alone_and_the_past_stands_as_sampled(
    forgetful: Path,
) -> None:
    """The template would drop what was thought; the tokens that were sampled win."""

    async def chat(task: EnvironmentTask, sample: Sample) -> None:
        await sample(task.prompt)
        await sample([{"role": "user", "content": "go on"}])

    async with staged(forgetful, chat, lambda prompt: "hmm | x ", **CHAT) as stage:
        group = await stage.group()
        tokenizer = stage.tokenizer
        assert text_of(tokenizer, group) == (
            "[user]begin<eos>\n[assistant]hmm | x <eos>\n[user]go on<eos>\n[assistant]hmm | x <eos>"
        )
        made = tokenizer.encode("hmm | x ")
        assert mask_of(group.completions[0]) == (
            [1] * (len(made) + 1)
            + [0] * len(tokenizer.encode("\n[user]go on<eos>\n[assistant]"))
            + [1] * (len(made) + 1)
        )


@pytest.mark.parametrize("cut", ["length", "stop"])
async def test_a_turn_that_was_cut_is_closed_before_the_next_message(model: Path, cut: str) -> None:
    async def chat(task: EnvironmentTask, sample: Sample) -> None:
        turn = await sample(
            task.prompt,
            max_tokens=3 if cut == "length" else None,
            stop=["c"] if cut == "stop" else [],
        )
        assert turn.finish == cut and turn.stop == ("c" if cut == "stop" else None)
        assert turn.text == ("abc" if cut == "length" else "ab")
        await sample([{"role": "user", "content": "?"}])

    async with staged(model, chat, lambda prompt: "abcdef", **CHAT) as stage:
        group = await stage.group()
        assert text_of(stage.tokenizer, group) == (
            "[user]begin<eos>\n[assistant]abc<eos>\n[user]?<eos>\n[assistant]abcdef<eos>"
        )
        closing = len("\n[user]?\n[assistant]") + 2
        assert mask_of(group.completions[0]) == [1] * 3 + [0] * closing + [1] * 7


async def test_openings_that_differ_share_a_prompt_as_far_as_they_agree(model: Path) -> None:
    async def differs(task: EnvironmentTask, sample: Sample) -> None:
        await sample(f"same {'abc'[task.index] * 3}:")

    async with staged(model, differs, lambda prompt: "x", group_size=3) as stage:
        group = await stage.group()
        tokenizer = stage.tokenizer
        assert group.prompt_text == "same "
        for index, letter in enumerate("abc"):
            completion = group.completions[index]
            assert text_of(tokenizer, group, index) == f"same {letter * 3}:x<eos>"
            assert mask_of(completion) == [0] * 4 + [1] * 2
            assert spans_of(completion) == [(3, 6)]


async def test_every_turn_of_every_sample_draws_other_random_numbers(model: Path) -> None:
    async with staged(model, echo_twice, lambda prompt: "a") as stage:
        await stage.group()
        seeds = [request.params.seed for request in stage.engine.requests]
        assert len(seeds) == 4 == len(set(seeds))
        await stage.group()
        assert [r.params.seed for r in stage.engine.requests[4:]] == seeds, "of any attempt"


async def test_an_environment_branches_and_its_turns_are_rewarded_in_all_sequences(
    model: Path,
) -> None:
    where = IN_PROCESSES | {"environment": "tests.fakes.process_environments:branches"}
    async with staged(model, None, lambda prompt: f"n{len(prompt)}", **where) as stage:
        group = await stage.group()
        check_trained_as_sampled(stage, group)
        assert texts_of(stage, group)[3:] == [
            ("begin", "n5<eos>?n13<eos>..n23<eos>"),
            ("beginn5<eos>", "!n13<eos>"),
            ("", "summary: bn10<eos>.n19<eos>"),
        ]
        placed = [
            [(len(c.tokens) // 4 - 1 - r.token, r.reward) for r in c.token_rewards]
            for c in group.completions[3:]
        ]
        assert placed == [
            [(11, 0.0), (6, 0.125), (0, 0.625)],
            [(0, 0.25)],
            [(5, 0.375), (0, 0.5)],
        ]
        assert [c.reward for c in group.completions] == [1.875, 0.0, 0.0] * 2


def test_a_branch_notes_the_route_of_the_last_token_that_it_goes_on_from() -> None:
    """Its first turn has it as an input, as a second turn of the same transcript would."""

    def piece(before: int, said: list[int], number: int) -> TranscriptPiece:
        inputs = np.arange(before + len(said), dtype=np.uint16)[:, None] + 100 * number
        made = np.array([[50 + 100 * number], [UNKNOWN]], np.uint16)
        completion = Completion(
            np.array([7, 8], np.int32),
            np.zeros(2, np.float32),
            ((0, 2),),
            Finish.STOP,
            routes=made,
            prompt_routes=inputs,
        )
        turn = Turn("", (7, 8), (0.0, 0.0), ((0, 2),), Finish.STOP, None, before, 9, number)
        return TranscriptPiece(np.array(said, np.int32), completion, "", turn, None)

    first = Transcript([piece(0, [1, 2], 0)])
    branch = first.branch(1)
    branch.pieces.append(piece(4, [5], 1))
    conversation = cast(Conversation, SimpleNamespace(sequences=[first, branch], full=False))
    routes = [s.completion.routes for s in sequences_of(conversation, 2)]
    assert [found[:, 0].tolist() for found in routes if found is not None] == [
        [50, 103],
        [104, 150, UNKNOWN],
    ]
    assert first.pieces[0].completion.routes[-1] == UNKNOWN, "what the engine said stays"


# ---- limits


async def test_a_sub_agent_without_room_that_the_agent_survives_cuts_no_other_sequence(
    model: Path,
) -> None:
    async def asks(task: EnvironmentTask, sample: Sample) -> float:
        helper = sample.branch()
        await sample(task.prompt)
        await helper("help")
        with pytest.raises(TranscriptFull):
            await helper("x" * 100)
        await sample("on")
        return 1.0

    async with staged(model, asks, lambda prompt: "a", max_context=60) as stage:
        group = await stage.group()
        check_trained_as_sampled(stage, group)
        stop, cut = rollout_pb2.FINISH_REASON_STOP, rollout_pb2.FINISH_REASON_LENGTH
        assert [c.finish_reason for c in group.completions] == [stop, cut] * 2


async def test_a_transcript_never_outgrows_its_limit(model: Path) -> None:
    async def endless(task: EnvironmentTask, sample: Sample) -> None:
        rooms = []
        turn = await sample(task.prompt)
        while True:
            rooms.append(turn.room)
            assert rooms == sorted(rooms, reverse=True)
            turn = await sample("and?")

    async with staged(
        model, endless, lambda prompt: "word" * 5, max_context=60, max_turns=100
    ) as stage:
        group = await stage.group()
        for completion in group.completions:
            assert 50 < len(group.prompt_tokens + completion.tokens) // 4 <= 60
            assert completion.finish_reason == rollout_pb2.FINISH_REASON_LENGTH
            assert mask_of(completion)[-1] == 1, "nothing is said that is not answered"


async def test_the_model_has_as_many_turns_as_the_config_says(model: Path) -> None:
    refused: list[str] = []

    async def endless(task: EnvironmentTask, sample: Sample) -> float:
        await sample(task.prompt)
        try:
            while True:
                await sample("?")
        except TranscriptFull as full:
            refused.append(full.code)
        return 0.25

    async with staged(model, endless, lambda prompt: "a", max_turns=3) as stage:
        group = await stage.group()
        assert refused == ["max_turns_exceeded"] * 2
        assert [sum(mask_of(c)) for c in group.completions] == [6, 6]
        assert [c.reward for c in group.completions] == [0.25, 0.25]
        length = rollout_pb2.FINISH_REASON_LENGTH
        assert [c.finish_reason for c in group.completions] == [length] * 2


async def test_a_prompt_that_is_too_long_drops_the_task(model: Path) -> None:
    async with staged(model, echo_twice, lambda prompt: "a") as stage:
        returned = await stage.refusal(lease_of({"prompt": "x" * 121, "answer": ""}))
        assert (returned.kind, returned.reason) == (
            rollout_pb2.RETURN_KIND_DROP,
            "prompt_too_long",
        )
        assert "121" in returned.detail and "120" in returned.detail
        assert not stage.engine.requests


# ---- rewards


async def test_where_it_does_not_score_the_weighted_reward_functions_do(model: Path) -> None:
    async def unscored(task: EnvironmentTask, sample: Sample) -> None:
        await sample(task.prompt)
        await sample("really?")

    functions = {"tests.fakes.worker_rewards:by_transcript": 0.5, "exact_match": 2.0}
    async with staged(
        model,
        unscored,
        lambda prompt: "7" if "really" in prompt else "8",
        reward={"functions": functions},
    ) as stage:
        group = await stage.group()
        completion = group.completions[0]
        assert sorted(completion.reward_components.values()) == [1.0, 4.0], "4 entries; newest turn"
        assert completion.reward == 0.5 * 4 + 2.0 * 1


# ---- failures


FAILURES = {
    "no turn": "before the model had a turn",
    "nan": "it returned the reward nan",
    "infinity": "it returned the reward inf",
    "text": "it returned '7', not a number, numbers by name, TurnRewards, or None",
    "nothing by name": "it returned 0 rewards, 1 to 64 allowed",
    "list": "it returned [1.0], not a number",
    "one sample": "1 of 2 samples were scored",
    "error": "no such door",
    "exit": "SystemExit",
    "library": "FunctionTimedOut: 1.5 s (process_environments.py:",
    "generator": "GeneratorExit",
    "fork": "in one process",
    "cancelled": "cancelled itself",
    "own limit": "the shop is closed",
    "no role": "BadTurn",
    "large token": "999999 is not in the model's vocabulary",
    "negative token": "-1 is not in the model's vocabulary",
    "huge token": "is not in the model's vocabulary",
    "letters": "say text",
    "empty stop": "stop takes texts",
    "an empty stop": "stop takes texts",
    "number to stop": "stop takes texts",
    "nothing to stop": "stop takes texts",
    "half a letter": "stop takes texts",
    "half a token": "whole number",
    "exit of a task": "a task of the environment raised SystemExit",
    "stop of the loop": "share its event loop",
}


async def test_a_failing_environment_returns_the_group_with_the_reason(model: Path) -> None:
    """And the process of all environments is still there."""
    fails = {"environment": "tests.fakes.process_environments:fails"}
    async with staged(model, None, lambda prompt: "a", **fails) as stage:
        (process,) = stage.environments.processes._pool.processes
        for prompt, words in FAILURES.items():
            refused = await stage.refusal(row_of(prompt, 2))
            assert (refused.kind, refused.reason) == (FAILED, "environment_error"), prompt
            assert words in refused.detail, prompt
        assert stage.environments.processes._pool.processes == [process]


async def test_a_reward_by_a_name_that_has_no_encoding_is_escaped(model: Path) -> None:
    async with staged(model, None, lambda prompt: "a", **IN_PROCESSES) as stage:
        group = await stage.group(row_of("no encoding", 2))
        assert dict(group.completions[0].reward_components) == {"\\ud83d": 2.0}


@asynccontextmanager
async def hazardous(model: Path, timeout_s: float) -> AsyncIterator[Stage]:
    """At its end a harmless task has its group, whatever the others did."""
    limits = IN_PROCESSES | {"environment_timeout_s": timeout_s, "group_size": 40}
    async with staged(model, None, lambda prompt: "a", **limits) as stage:
        yield stage
        group = await stage.produce(row_of("in a thread", 2))
        assert isinstance(group, rollout_pb2.Group), group


def row_of(prompt: str, count: int = 1, **more: str) -> rollout_pb2.Lease:
    return lease_of({"prompt": prompt, "answer": "", **more}, count=count)


async def test_threads_that_never_return_leave_threads_for_others(model: Path) -> None:
    async with hazardous(model, 1.0) as stage:
        refused = await stage.refusal(row_of("hang in a thread", 40))
        assert refused.reason == "environment_timeout"


async def test_what_is_left_of_an_environment_that_is_over_does_not_block_the_others_for_ever(
    model: Path, tmp_path: Path
) -> None:
    """It swallows its cancellation and computes on: nobody who lives was to blame, and every
    later group was handed back."""
    mark = tmp_path / "computes"
    async with hazardous(model, 1.0) as stage:
        over = await stage.refusal(row_of("go on although cancelled", mark=str(mark)))
        assert over.reason == "environment_timeout"
        await until(mark.exists)
        lost = await stage.refusal(row_of("quick"))
        assert lost.kind == rollout_pb2.RETURN_KIND_HAND_BACK, "no fault of its own"


async def test_two_turns_of_a_sample_at_once_are_refused(model: Path) -> None:
    async def twice_at_once(task: EnvironmentTask, sample: Sample) -> float:
        await asyncio.gather(sample(task.prompt), sample(task.prompt))
        return 0.0

    async with staged(model, twice_at_once, lambda prompt: "a") as stage:
        stage.engine.hold()
        refused = await stage.refusal()
    assert (refused.kind, refused.reason) == (FAILED, "environment_error")
    assert "one turn at a time" in refused.detail


async def test_one_failing_sample_ends_the_others_of_its_group(model: Path, tmp_path: Path) -> None:
    async with staged(model, None, lambda prompt: "a", **IN_PROCESSES) as stage:
        for failing in ("fails as 0", "fails as 1"):
            mark = tmp_path / failing
            refused = await stage.refusal(row_of(failing, 2, mark=str(mark)))
            assert "one of two" in refused.detail
            await until(mark.exists)


async def test_time_limits_that_change_while_the_worker_runs_are_those_of_the_lease(
    model: Path,
) -> None:
    """Its configuration has others, of the time of its start."""
    lease = row_of("wait", 2)
    lease.settings.CopyFrom(
        rollout_pb2.TaskSettings(
            max_tokens=40,
            top_p=1.0,
            max_turns=8,
            environment_timeout_s=0.125,
            reward_timeout_s=0.25,
        )
    )
    reward = {"functions": ["tests.fakes.worker_rewards:never"], "timeout_s": 3600.0}
    hours = IN_PROCESSES | {"environment_timeout_s": 3600.0, "reward": reward}
    async with staged(model, None, lambda prompt: "a", **hours) as stage:
        refused = await stage.refusal(lease)
        assert (refused.kind, refused.reason) == (FAILED, "environment_timeout")
        assert "0.125 s" in refused.detail
        lease.settings.environment_timeout_s = 3600.0
        lease.row_json = row_of("unscored").row_json
        refused = await stage.refusal(lease)
        assert refused.reason == "reward_timeout" and "0.25 s" in refused.detail


async def test_the_time_of_the_model_is_not_the_environments(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    clock = loop.time
    limit = IN_PROCESSES | {"environment_timeout_s": 20}
    async with staged(model, None, lambda prompt: "a", **limit) as stage:
        stage.engine.hold()
        making = asyncio.ensure_future(stage.produce(row_of("quick", 2)))
        await until(lambda: len(stage.engine.running) == 2)
        # More than the environment may take for itself, as the loop's clock has it.
        monkeypatch.setattr(loop, "time", lambda: clock() + 100)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not making.done()
        stage.engine.release()
        assert isinstance(await making, rollout_pb2.Group)


async def test_an_abort_that_the_environment_swallows_still_ends_the_attempt(model: Path) -> None:
    async def stubborn(task: EnvironmentTask, sample: Sample) -> float:
        for said in (task.prompt, "again"):
            try:
                await sample(said)
            except Exception:
                continue
        return 1.0

    async with staged(model, stubborn, lambda prompt: "a") as stage:
        stage.engine.hold()
        making = asyncio.ensure_future(stage.produce(lease_of()))
        await until(lambda: len(stage.engine.running) == 2)
        stage.engine.abort_all()
        with pytest.raises(Aborted):
            await making


async def test_a_dropped_task_ends_its_environments_and_their_requests(model: Path) -> None:
    async with staged(model, echo_twice, lambda prompt: "a") as stage:
        stage.engine.hold()
        making = asyncio.ensure_future(stage.produce(lease_of()))
        await until(lambda: len(stage.engine.running) == 2)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        await until(lambda: not stage.engine.running)
        assert len(stage.engine.aborted) == 2


# ---- configuration


def test_names_that_lead_nowhere_say_so(model: Path) -> None:
    for name, words in {
        "calculator": "package.module:function",
        "no.such.module:play": "cannot import no.such.module",
        "tests.fixtures.environment_fixture:nothing": "has no 'nothing'",
        "tests.fixtures.environment_fixture:lease_of": "must be an async function",
        "asyncio:sleep_forever": "has no",
        "tests.fakes.worker_rewards:gated": "must take two arguments",
    }.items():
        with pytest.raises(BadEnvironment, match="rollout") as caught:
            load(name)
        assert words in str(caught.value) and "\n" not in str(caught.value)


async def test_where_the_endpoint_cannot_listen_is_said(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadEnvironment, match=f"openai_port = {port}: .*in use"):
            async with staged(model, echo_twice, lambda prompt: "a", openai=True, openai_port=port):
                pass
    for host in ("192.0.2.1", "no-such-host.invalid"):
        settings: dict[str, Any] = {"openai": True, "openai_host": host}
        with pytest.raises(BadEnvironment, match=f"openai_host = '{host}'.* of this machine"):
            async with staged(model, echo_twice, lambda prompt: "a", **settings):
                pass


def test_the_endpoint_needs_a_chat_template(tmp_path: Path) -> None:
    from rollout_worker.tasks.environment_runner import EnvironmentRunner

    bare = make_chat_model(tmp_path, None)
    config = stage_config(bare, openai=True)
    with pytest.raises(BadEnvironment, match="chat template"):
        EnvironmentRunner(config, PromptTokenizer(config))


# ---- in processes of their own


async def test_an_environment_plays_in_a_process(model: Path) -> None:
    """Also in a worker with more files than select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        await plays_in_a_process(model)


async def plays_in_a_process(model: Path) -> None:
    async with staged(model, None, lambda prompt: "abc", **IN_PROCESSES) as stage:
        # It is loaded when it is first used.
        tokenizer = environments_child._Tokenizer(stage.config.model_dump(mode="json"))
        assert tokenizer.encode("<ab>") == stage.tokenizer.encode("<ab>")
        group = await stage.group(row_of("play", 2))
        assert group.completions[0].reward == 3.5 + 1
        assert mask_of(group.completions[0])[:4] == [1] * 4
        assert tokens_of(group.completions[0])[:3] == tokens_of(group.completions[0])[4:7]
        for prompt in ("two at once", "look at itself", "leave tasks", "end what is left"):
            group = await stage.group(row_of(prompt, 2))
            assert sum(completion.reward for completion in group.completions) == 2.0, prompt
        full = await stage.group(row_of("fill", 2))
        assert full.completions[0].finish_reason == rollout_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("process_ends", [True, False])
async def test_whatever_an_environment_does_to_its_process_its_attempt_fails_alone(
    model: Path, process_ends: bool
) -> None:
    fates = {
        True: {
            "crash": ("environment_crashed", "status -9"),
            "exit in a task": ("environment_crashed", "status 4"),
            "write": ("environment_crashed", "wrote into the stream"),
            "write as the second": ("environment_crashed", "no turn that can be made"),
            "block": ("environment_timeout", "does not await"),
        },
        False: {
            "wait": ("environment_timeout", "longer than"),
            "allocate": ("environment_error", "MemoryError"),
            "cancel everybody": ("environment_error", "it cancelled itself"),
            "no reward": ("environment_error", "returned 'set'"),
            "no sandbox": ("environment_setup_error", "no sandbox"),
        },
    }
    limits = {**IN_PROCESSES, "environment_memory_mb": 2000}
    async with staged(model, None, lambda prompt: "a", **limits) as stage:
        for prompt, fate in fates[process_ends].items():
            stage.engine.hold()
            beside = asyncio.ensure_future(stage.produce(row_of("quick")))
            await until(lambda: len(stage.engine.running) == 1, 30.0)
            failing = lease_of({"prompt": prompt, "answer": ""}, count=1, task_id="t1")
            fails = asyncio.ensure_future(stage.refusal(failing))
            await until(lambda: len(stage.engine.running) == 2)
            stage.engine._running["t1/1#0.1"].set_result(None)
            refused = await fails
            assert (refused.kind, refused.reason) == (FAILED, fate[0]), prompt
            assert fate[1] in refused.detail
            stage.engine.release()
            neighbour = await beside
            if process_ends:
                lost = rollout_pb2.RETURN_KIND_HAND_BACK, "environment_lost"
                assert (neighbour.kind, neighbour.reason) == lost, prompt
            else:
                assert neighbour.completions[0].reward == 1.0


async def test_a_process_that_cannot_import_its_environment_ends_the_worker(model: Path) -> None:
    nowhere = IN_PROCESSES | {"environment": "tests.fakes.process_environments:absent"}
    with pytest.raises(BadEnvironment, match="has no 'absent'"):
        async with staged(model, None, lambda prompt: "a", **nowhere):
            pass
