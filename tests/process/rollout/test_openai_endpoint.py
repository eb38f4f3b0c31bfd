"""An agent that knows only the openai client is trained on what it was served."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.responses import JSONResponse

from paceline.v1 import rollout_pb2
from rollout_worker.environments.base import Endpoint, EnvironmentTask, Sample
from testbed.fleets.controllers import until
from tests.fixtures.chat_model import END, FORGETFUL, make_chat_model
from tests.fixtures.environment_fixture import (
    check_trained_as_sampled,
    lease_of,
    logprobs_of,
    mask_of,
    spans_of,
    staged,
    texts_of,
    tokens_of,
)
from tests.fixtures.openai_agents import ADD, ANSWERED, BEGIN, agent, ask, calling, client_of

openai = pytest.importorskip("openai")

SETTINGS: dict[str, Any] = {"openai": True, "data": {"chat": True}, "group_size": 1}


def count_up(prompt: str) -> str:
    return f"turn {prompt.count('[assistant]')}"


async def test_what_the_client_was_told_is_what_is_recorded(model: Path) -> None:
    told: list[Any] = []

    async def two_turns(client: Any, task: EnvironmentTask) -> float:
        messages = list(BEGIN)
        for said in ("more", None):
            reply = await ask(client, task, messages, logprobs=True, max_completion_tokens=30)
            told.append(reply)
            messages.append(reply.choices[0].message)
            messages.append({"role": "user", "content": said})
        return 0.75

    async with staged(model, agent(two_turns), count_up, **SETTINGS) as stage:
        group = await stage.group()
        tokenizer = stage.tokenizer
        completion = group.completions[0]
        assert completion.text == "turn 1<eos>\n[user]more<eos>\n[assistant]turn 2<eos>"
        assert [reply.choices[0].message.content for reply in told] == ["turn 1", "turn 2"]
        assert completion.reward == 0.75
        mask = np.array(mask_of(completion), bool)
        served = [entry for reply in told for entry in reply.choices[0].logprobs.content]
        tokens = np.array(tokens_of(completion))[mask]
        assert [entry.token for entry in served] == [tokenizer.decode_all([t]) for t in tokens]
        np.testing.assert_allclose(
            [entry.logprob for entry in served], np.array(logprobs_of(completion))[mask]
        )
        assert spans_of(completion) == [(3, len(mask))]
        assert {reply.system_fingerprint for reply in told} == {"version-3"}
        first, second = (reply.usage for reply in told)
        assert (first.prompt_tokens, first.completion_tokens) == (len(group.prompt_tokens) // 4, 7)
        assert second.prompt_tokens == first.prompt_tokens + int(mask.nonzero()[0][7])
        assert second.total_tokens == len(group.prompt_tokens) // 4 + len(mask)
        assert [reply.choices[0].finish_reason for reply in told] == ["stop", "stop"]


async def test_a_client_that_only_has_a_base_url_and_a_key_will_do(model: Path) -> None:
    """As agents read them from OPENAI_BASE_URL and OPENAI_API_KEY; and one that does not await."""

    def old_agent(endpoint: Endpoint) -> str:
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            (only,) = client.models.list().data
            assert client.models.retrieve(only.id).id == only.id == endpoint.model
            reply = client.chat.completions.create(model=only.id, messages=BEGIN)
            return str(reply.choices[0].message.content)

    async def environment(task: EnvironmentTask, sample: Sample) -> float:
        assert task.openai is not None
        return float((await asyncio.to_thread(old_agent, task.openai)) == "turn 1")

    async with staged(model, environment, count_up, **{**SETTINGS, "group_size": 3}) as stage:
        group = await stage.group()
        assert [c.reward for c in group.completions] == [1.0] * 3


async def test_a_stream_carries_the_turn_its_end_and_its_usage(model: Path) -> None:
    chunks: list[Any] = []

    async def streams(client: Any, task: EnvironmentTask) -> float:
        stream = await ask(
            client,
            task,
            BEGIN,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            max_tokens=4,
        )
        async for chunk in stream:
            chunks.append(chunk)
        return 1.0

    async with staged(model, agent(streams), count_up, **SETTINGS) as stage:
        group = await stage.group()
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "turn" == group.completions[0].text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 4 and not chunks[-1].choices
    assert (
        sum(len(c.choices[0].logprobs.content) for c in chunks[:-1] if c.choices[0].logprobs) == 4
    )
    assert len({c.id for c in chunks}) == 1


async def test_a_template_that_rewrites_the_past_changes_no_token(
    tmp_path: Path,
) -> None:
    async def two_turns(client: Any, task: EnvironmentTask) -> float:
        reply = await ask(client, task, BEGIN)
        # As many agents do, it tidies up what it was told.
        said = {"role": "assistant", "content": reply.choices[0].message.content.strip()}
        await ask(client, task, [*BEGIN, said, {"role": "user", "content": "more"}])
        return 1.0

    async with staged(
        make_chat_model(tmp_path, FORGETFUL), agent(two_turns), lambda p: " hm| x ", **SETTINGS
    ) as stage:
        assert (await stage.group()).completions[0].text == (
            " hm| x <eos>\n[user]more<eos>\n[assistant] hm| x <eos>"
        )


# ---- refusals

HALF_A_PAIR = [*BEGIN, calling("add", '{"a": "\\ud800"}'), ANSWERED]

STATUS = {"model_not_found": openai.NotFoundError, "unknown_sample": openai.AuthenticationError}
REFUSALS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": "gpt-9"}, "model_not_found", "model"),
    ({"n": 2}, "unsupported_parameter", "n"),
    ({"tools": [ADD]}, "unsupported_parameter", "tools"),
    ({"tools": [{"type": "function"}]}, "invalid_value", "tools"),
    ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    ({"top_logprobs": 3}, "unsupported_parameter", "top_logprobs"),
    ({"extra_body": {"best": 1}}, "unsupported_parameter", "best"),
    ({"temperature": 3}, "invalid_value", "temperature"),
    ({"temperature": 10**400}, "invalid_value", "temperature"),
    ({"messages": HALF_A_PAIR}, "invalid_value", "messages[1]"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"stop": [""]}, "invalid_value", "stop"),
    ({"seed": "x"}, "invalid_value", "seed"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": [{"role": "assistant", "content": "I"}]}, "invalid_value", "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "unsupported_parameter",
        "messages[0]",
    ),
    ({"extra_headers": {"X-Paceline-Sample": "nobody"}}, "unknown_sample", None),
]
"""Changes to a request that would be served, and the code and parameter of the refusal."""


async def refusal_of(client: Any, task: EnvironmentTask, changes: dict[str, Any]) -> Any:
    options = {"model": task.openai.model, "messages": BEGIN, **changes}
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**options)
    return caught.value


async def test_refusals_are_those_that_clients_know(model: Path) -> None:
    errors: list[Any] = []

    async def refused(client: Any, task: EnvironmentTask) -> float:
        for changes, *_ in REFUSALS:
            errors.append(await refusal_of(client, task, changes))
        await ask(client, task, BEGIN)
        return 1.0

    async with staged(model, agent(refused), count_up, **SETTINGS) as stage:
        outcome = await stage.produce(lease_of(count=1))
    for error, (changes, code, param) in zip(errors, REFUSALS, strict=True):
        assert (error.code, error.param) == (code, param), changes
        assert type(error) is STATUS.get(code, openai.BadRequestError), changes
        assert error.body["message"] and error.body["type"].endswith("_error")
    assert outcome.completions[0].text == "turn 1<eos>", "a refusal leaves no trace"


async def test_a_prompt_without_room_for_a_turn_drops_its_row(model: Path) -> None:
    """No other attempt at the row can do better."""
    errors: list[Any] = []

    async def too_long(client: Any, task: EnvironmentTask) -> float:
        messages = [{"role": "user", "content": "x" * 200}]
        errors.append(await refusal_of(client, task, {"messages": messages}))
        return 1.0

    async with staged(model, agent(too_long), count_up, **SETTINGS) as stage:
        outcome = await stage.produce(lease_of(count=1))
    assert (errors[0].code, errors[0].param) == ("context_length_exceeded", "messages")
    assert (outcome.kind, outcome.reason) == (rollout_pb2.RETURN_KIND_DROP, "prompt_too_long")


async def test_who_has_no_key_of_an_unfinished_sample_gets_one_answer_to_everything(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Endpoint] = []

    async def keeps(client: Any, task: EnvironmentTask) -> float:
        kept.append(task.openai)
        await ask(client, task, BEGIN)
        with pytest.raises(openai.NotFoundError) as nowhere:
            await client.embeddings.create(model=task.openai.model, input="x")
        assert nowhere.value.code == "unknown_route"
        return 1.0

    async with staged(model, agent(keeps), count_up, **SETTINGS) as stage:
        await stage.group()
        url, ends = kept[0].base_url, {**kept[0].headers}
        async with httpx.AsyncClient() as client:
            answers = [
                await client.request(method, f"{url}/{path}", content=b"{", headers=headers)
                for method, path in (
                    ("POST", "chat/completions"),
                    ("POST", "messages"),
                    ("POST", "responses"),
                    ("GET", "models"),
                    ("GET", "embeddings"),
                    ("PUT", "models"),
                )
                for headers in (ends, {}, {"X-Api-Key": "guess"}, {"Authorization": "Bearer x"})
            ]
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        writer.write(b"garbage\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        assert not [line for line in caplog.records if line.name == "uvicorn.error"]
        assert {answer.status_code for answer in answers} == {401}
        assert len({answer.content for answer in answers}) == 1
        assert answers[0].json()["error"]["code"] == "unknown_sample"
        assert Path(kept[0].model).name not in answers[0].text


MORE, LESS = ({"role": "user", "content": said} for said in ("more", "less"))
TURN: dict[str, Any] = {"role": "assistant", "content": "turn 1"}
BRANCHES: list[tuple[list[dict[str, Any]], str, str]] = [
    (
        [*BEGIN, {"role": "assistant", "content": "summary"}, MORE],  # compacted
        "[user]begin<eos>\n[assistant]",
        "summary<eos>\n[user]more<eos>\n[assistant]turn 2<eos>",
    ),
    (
        [{"role": "system", "content": "You check."}, *BEGIN],  # a sub-agent
        "[",
        "system]You check.<eos>\n[user]begin<eos>\n[assistant]turn 1<eos>",
    ),
    (
        [*BEGIN, TURN, LESS],  # another way to go on
        "[user]begin<eos>\n[assistant]turn 1<eos>\n[user]",
        "less<eos>\n[assistant]turn 2<eos>",
    ),
    (BEGIN, "[user]begin<eos>\n[assistant]", "turn 1<eos>"),  # asked again
    (
        [*BEGIN, TURN, LESS, {"role": "assistant", "content": " turn 2\n"}, MORE],
        "",  # the branch goes on
        "less<eos>\n[assistant]turn 2<eos>\n[user]more<eos>\n[assistant]turn 3<eos>",
    ),
]
"""Requests after a first turn and another one, and what their branches share and have."""


async def test_what_does_not_extend_a_conversation_branches_off_where_it_differs(
    model: Path,
) -> None:
    async def branches(client: Any, task: EnvironmentTask) -> float:
        for messages in (BEGIN, [*BEGIN, TURN, MORE], *(sent for sent, *_ in BRANCHES)):
            await ask(client, task, messages)
        return 1.0

    async with staged(model, agent(branches), count_up, **SETTINGS) as stage:
        group = await stage.group()
        first, *others = texts_of(stage, group)
        assert first[1] == "turn 1<eos>\n[user]more<eos>\n[assistant]turn 2<eos>"
        (*opened, went_on) = (expected for _, *expected in BRANCHES)
        opened[2] = [opened[2][0], went_on[1]]
        assert [list(texts) for texts in others] == opened
        check_trained_as_sampled(stage, group)
        assert [c.reward for c in group.completions] == [1.0, 0.0, 0.0, 0.0, 0.0]


async def test_calls_side_by_side_each_have_a_sequence(model: Path) -> None:
    """Of one history or of several, also before the first one has a turn; all are trained."""

    async def at_once(client: Any, task: EnvironmentTask) -> float:
        asked = [ask(client, task, BEGIN, max_tokens=n + 1) for n in range(3)]
        asked += [ask(client, task, messages) for messages, *_ in BRANCHES[1:3]]
        replies = asyncio.gather(*asked)
        await seen(worker, lambda: len(stage.engine.running) == len(asked))
        stage.engine.release()
        assert len(await replies) == len(asked)
        await asyncio.gather(*(ask(client, task, [*BEGIN, TURN, LESS]) for _ in range(2)))
        return 1.0

    worker = asyncio.get_running_loop()
    async with staged(model, agent(at_once), count_up, **SETTINGS) as stage:
        stage.engine.hold()
        group = await stage.group()
        assert len(group.completions) == 7
        check_trained_as_sampled(stage, group)


async def test_samples_begin_alike_whichever_of_their_first_calls_arrives_first(
    model: Path,
) -> None:
    """The group's prompt is what the samples' first sequences have in common."""

    async def at_once(client: Any, task: EnvironmentTask) -> float:
        calls = []
        for said in ("one thing", "other")[:: 1 - 2 * task.index]:
            messages = [{"role": "user", "content": said}]
            calls.append(asyncio.create_task(ask(client, task, messages)))
            arrived = len(calls) + 2 * task.index
            await seen(worker, lambda arrived=arrived: len(stage.engine.running) >= arrived)
        if task.index:
            stage.engine.release()
        await asyncio.gather(*calls)
        return 1.0

    worker = asyncio.get_running_loop()
    async with staged(model, agent(at_once), count_up, **SETTINGS | {"group_size": 2}) as stage:
        stage.engine.hold()
        group = await stage.group()
        check_trained_as_sampled(stage, group)
        prompt = np.frombuffer(group.prompt_tokens, "<i4").tolist()
        assert stage.tokenizer.decode_all(prompt) == "[user]one thing<eos>\n[assistant]"


@pytest.mark.parametrize("threshold", [0, 10])
async def test_a_small_change_of_a_turn_opens_no_branch(model: Path, threshold: int) -> None:
    async def forgets_its_thoughts(client: Any, task: EnvironmentTask) -> float:
        reply = await ask(client, task, BEGIN)
        said = {"role": "assistant", "content": reply.choices[0].message.content.split("|")[1]}
        await ask(client, task, [*BEGIN, said, MORE])
        await ask(client, task, [{"role": "user", "content": "begun"}])
        # What the client makes the model say is the client's.
        said["content"] = "a thought|x"
        for example, then in (("x", []), ("y", [said, MORE])):
            shown = {"role": "assistant", "content": example}
            await ask(client, task, [LESS, shown, MORE, *then])
        return 1.0

    settings = {**SETTINGS, "branch_threshold": threshold}
    play = agent(forgets_its_thoughts)
    async with staged(model, play, lambda p: "a thought|x", **settings) as stage:
        group = await stage.group()
        check_trained_as_sampled(stage, group)
        sequences = [own for _, own in texts_of(stage, group)]
    if threshold:
        goes_on = "a thought|x<eos>\n[user]more<eos>\n[assistant]a thought|x<eos>"
        assert sequences[:2] == [goes_on, "un<eos>\n[assistant]a thought|x<eos>"]
        assert len(sequences) == 4
    else:
        assert len(sequences) == 5 and sequences[0] == "a thought|x<eos>"


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_branches": 2}, "max_branches_exceeded"),
        ({"max_turns": 3}, "max_turns_exceeded"),
        ({"max_context": 110}, "context_length_exceeded"),
    ],
)
async def test_limits_hold_over_all_sequences_of_a_sample(
    model: Path, limits: dict[str, int], code: str
) -> None:
    async def branches_on(client: Any, task: EnvironmentTask) -> None:
        for messages in (BEGIN, BEGIN, [*BEGIN, TURN, MORE]):
            await ask(client, task, messages)
        # Longer than a first prompt may be: that of a branch drops no row.
        long = {"role": "user", "content": "x" * 130}
        refusal = await refusal_of(client, task, {"messages": [long]})
        codes.append((refusal.code, refusal.param))
        raise refusal

    codes: list[Any] = []
    async with staged(model, agent(branches_on), count_up, **SETTINGS | limits) as stage:
        group = await stage.group()
        assert codes == [(code, "messages")]
        check_trained_as_sampled(stage, group)
        length = rollout_pb2.FINISH_REASON_LENGTH
        assert [c.finish_reason for c in group.completions] == [length] * 2


@pytest.mark.parametrize("limits", [{"max_branches": 2}, {"max_turns": 3}])
async def test_an_agent_that_does_without_what_was_refused_has_a_whole_sample(
    model: Path, limits: dict[str, int]
) -> None:
    async def goes_without(client: Any, task: EnvironmentTask) -> float:
        for messages in (BEGIN, [*BEGIN, TURN, MORE], [LESS]):
            await ask(client, task, messages)
        await refusal_of(client, task, {"messages": [MORE]})
        return 1.0

    async with staged(model, agent(goes_without), count_up, **SETTINGS | limits) as stage:
        stop = rollout_pb2.FINISH_REASON_STOP
        assert [c.finish_reason for c in (await stage.group()).completions] == [stop] * 2


async def test_an_agent_that_runs_out_of_room_ends_its_transcript(model: Path) -> None:
    """It lets the client's own exception pass, of a plain request or of a stream."""

    async def endless(client: Any, task: EnvironmentTask) -> None:
        messages = list(BEGIN)
        while True:
            if task.index:
                stream = await ask(client, task, messages, stream=True)
                said = "".join([c.choices[0].delta.content or "" async for c in stream])
            else:
                said = (await ask(client, task, messages)).choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]

    for limits in ({"max_context": 90}, {"max_turns": 2}):
        settings = {**SETTINGS, "group_size": 2, **limits}
        async with staged(model, agent(endless), count_up, **settings) as stage:
            for completion in (await stage.group()).completions:
                assert completion.text.count("turn") >= 2
                assert completion.finish_reason == rollout_pb2.FINISH_REASON_LENGTH


# ---- sampling


async def test_the_temperature_is_the_runs_and_samples_differ_whatever_is_asked(
    model: Path,
) -> None:
    async def insists(client: Any, task: EnvironmentTask) -> float:
        await ask(client, task, BEGIN, temperature=0.25, top_p=0.5, seed=11)
        return 1.0

    settings = {**SETTINGS, "group_size": 2, "temperature": 0.9}
    async with staged(model, agent(insists), count_up, **settings) as stage:
        await stage.group()
        params = [request.params for request in stage.engine.requests]
        assert [(p.temperature, p.top_p, p.greedy) for p in params] == [(0.9, 1.0, False)] * 2
        assert len({p.seed for p in params}) == 2, "equal samples would teach nothing"


# ---- connections


@pytest.mark.parametrize("lost", [True, False])
async def test_a_turn_whose_reply_was_lost_is_told_once_more(
    model: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Another one is sampled if it was told: the retry may be that of an equal call beside it."""

    async def retries(task: EnvironmentTask, sample: Sample) -> float:
        endpoint = task.openai
        assert endpoint is not None
        body = {"model": endpoint.model, "messages": BEGIN}
        url = f"{endpoint.base_url}/chat/completions"
        for count in range(3):
            headers = {**endpoint.headers, "x-stainless-retry-count": str(count)}
            async with httpx.AsyncClient() as client:
                told.append(await client.post(url, json=body, headers=headers))
        return 1.0

    async def loses(response: Any, scope: Any, receive: Any, send: Any) -> None:
        monkeypatch.setattr(JSONResponse, "__call__", sends)
        raise ConnectionResetError

    told: list[httpx.Response] = []
    sends = JSONResponse.__call__
    if lost:
        monkeypatch.setattr(JSONResponse, "__call__", loses)
    async with staged(model, retries, count_up, **SETTINGS) as stage:
        await stage.group()
        assert [reply.status_code for reply in told] == [500 if lost else 200, 200, 200]
        assert len(stage.engine.requests) == (2 if lost else 3)


async def seen(worker: asyncio.AbstractEventLoop, condition: Callable[[], Any]) -> None:
    """For the loop of the environments: returns once ``condition`` holds in the worker's."""
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(until(condition), worker))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_client_that_leaves_takes_its_turn_back(model: Path, stream: bool) -> None:
    worker = asyncio.get_running_loop()

    async def impatient(task: EnvironmentTask, sample: Sample) -> float:
        assert task.openai is not None
        async with client_of(task.openai) as client:
            asking = asyncio.ensure_future(_whole(client, task, stream))
            await seen(worker, lambda: engine.running)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await seen(worker, lambda: not engine.running)
        engine.release()
        async with client_of(task.openai) as client:
            await ask(client, task, BEGIN)
        return 1.0

    async with staged(model, impatient, count_up, **SETTINGS) as stage:
        engine = stage.engine
        engine.hold()
        group = await stage.group()
        assert len(engine.aborted) == 1
        assert group.completions[0].text == "turn 1<eos>"
        assert tokens_of(group.completions[0])[-1] == END


async def _whole(client: Any, task: EnvironmentTask, stream: bool) -> None:
    reply = await ask(client, task, BEGIN, stream=stream)
    if stream:
        async for _ in reply:
            pass


async def test_a_held_up_client_is_let_go_when_its_sample_is_over(model: Path) -> None:
    codes: list[str] = []

    async def forgets(task: EnvironmentTask, sample: Sample) -> float:
        assert task.openai is not None
        endpoint = task.openai

        async def forgotten() -> None:
            async with client_of(endpoint) as client:
                try:
                    await ask(client, task, BEGIN)
                except openai.APIStatusError as error:
                    codes.append(error.code)

        background.append(asyncio.ensure_future(forgotten()))
        await seen(worker, lambda: stage.engine.running)
        return 1.0

    background: list[Any] = []
    worker = asyncio.get_running_loop()
    async with staged(model, forgets, count_up, **SETTINGS) as stage:
        stage.engine.hold()
        refused = await stage.refusal(lease_of(count=1))
        assert "before the model had a turn" in refused.detail
        await until(lambda: codes)
        assert codes == ["unknown_sample"]
