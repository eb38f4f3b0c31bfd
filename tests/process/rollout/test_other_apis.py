"""Anthropic's Messages and OpenAI's Responses, by their own clients: recorded like a chat."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.v1 import rollout_pb2
from rollout_worker.environments.base import Endpoint, EnvironmentTask, Sample
from testbed.fleets.controllers import until
from tests.fixtures.chat_model import TOOLS, make_chat_model
from tests.fixtures.environment_fixture import lease_of, staged, texts_of
from tests.fixtures.openai_agents import agent, ask
from tests.process.rollout.test_openai_endpoint import seen
from tests.process.rollout.test_openai_tools import CALL, SETTINGS, calls_once, prompt_of

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

BEGIN = [{"role": "user", "content": "begin"}]
SYSTEM = "Add."
PARAMETERS = {"type": "object"}
MESSAGES, RESPONSES = "messages", "responses"
Play = Callable[[Any, EnvironmentTask], Awaitable[Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("apis"), TOOLS)


def client_of(api: str, at: Endpoint | None) -> Any:
    assert at is not None
    if api == MESSAGES:
        urls = {"base_url": at.anthropic_url, "api_key": at.api_key}
        return anthropic.AsyncAnthropic(**urls, max_retries=0)
    return openai.AsyncOpenAI(base_url=at.base_url, api_key=at.api_key, max_retries=0)


def playing(api: str, play: Play) -> Any:
    """An environment with the client of ``api``."""

    async def environment(task: EnvironmentTask, sample: Sample) -> Any:
        async with client_of(api, task.openai) as client:
            return await play(client, task)

    return environment


def create(api: str, client: Any) -> Any:
    return client.messages.create if api == MESSAGES else client.responses.create


def request(api: str, task: EnvironmentTask, **changes: Any) -> dict[str, Any]:
    assert task.openai is not None
    bodies = {MESSAGES: {"messages": BEGIN, "max_tokens": 100}, RESPONSES: {"input": "begin"}}
    return {"model": task.openai.model, **bodies[api], **changes}


async def whole(client: Any, options: dict[str, Any], stream: bool) -> Any:
    """The final message or response."""
    api = MESSAGES if "messages" in options else RESPONSES
    if not stream:
        return await create(api, client)(**options)
    async with AsyncExitStack() as stack:
        if api == MESSAGES:
            told = await stack.enter_async_context(client.messages.stream(**options))
            return await told.get_final_message()
        told = await stack.enter_async_context(client.responses.stream(**options))
        # get_final_response() knows only completed ones.
        return [event async for event in told][-1].response


async def adds_by_messages(client: Any, task: EnvironmentTask, stream: bool) -> list[Any]:
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    messages: list[Any] = list(BEGIN)
    told = []
    while not told or told[-1].stop_reason == "tool_use":
        options = request(MESSAGES, task, messages=messages, system=SYSTEM, tools=tools)
        told.append(await whole(client, options, stream))
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": str(b.input["a"] + 1)}
            for b in told[-1].content
            if b.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": told[-1].content}]
        messages += [{"role": "user", "content": results}]
    assert [reply.stop_reason for reply in told] == ["tool_use", "end_turn"]
    (said, call), (end,) = (reply.content for reply in told)
    assert (said.text, call.name, call.input) == ("Let me see.", "add", {"a": 1})
    assert end.text == "It is 2."
    return told


async def adds_by_responses(client: Any, task: EnvironmentTask, stream: bool) -> list[Any]:
    tools = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
    items: list[Any] = list(BEGIN)
    told: list[Any] = []
    while not told or told[-1].output[-1].type == "function_call":
        options = request(RESPONSES, task, input=items, instructions=SYSTEM, tools=tools)
        told.append(await whole(client, options, stream))
        for item in told[-1].output:
            items.append(item.model_dump(exclude={"parsed", "parsed_arguments"}))
            if item.type == "function_call":
                result = {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
                items.append(result)
    assert {reply.status for reply in told} == {"completed"}
    (said, call), (_,) = (reply.output for reply in told)
    assert (said.content[0].text, call.name, call.arguments) == ("Let me see.", "add", '{"a": 1}')
    assert told[1].output_text == "It is 2."
    return told


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("api", [MESSAGES, RESPONSES])
async def test_an_agent_that_uses_tools_is_recorded_as_its_model_spoke(
    model: Path, api: str, stream: bool
) -> None:
    told: list[Any] = []

    async def adds(client: Any, task: EnvironmentTask) -> float:
        by = adds_by_messages if api == MESSAGES else adds_by_responses
        told.extend(await by(client, task, stream))
        return 1.0

    async with staged(model, playing(api, adds), calls_once, **SETTINGS) as stage:
        group = await stage.group()
        prompt = prompt_of(stage, group.prompt_tokens)
    assert prompt.startswith(
        '[tools][{"type": "function", "function": {"name": "add", "parameters":'
    )
    assert prompt.endswith("[system]Add.<eos>\n[user]begin<eos>\n[assistant]")
    assert group.completions[0].text == (
        f"Let me see. {CALL}<eos>\n[tool add]2<eos>\n[assistant]It is 2.<eos>"
    )
    first, second = (reply.usage for reply in told)
    assert first.input_tokens == len(group.prompt_tokens) // 4
    assert second.output_tokens == len("It is 2.") + 1


ENDS: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    (MESSAGES, {"max_tokens": 4}, ("max_tokens", None, "turn")),
    (MESSAGES, {"stop_sequences": ["n"]}, ("stop_sequence", "n", "tur")),
    (MESSAGES, {}, ("end_turn", None, "turn 1")),
    (RESPONSES, {"max_output_tokens": 4}, ("incomplete", "max_output_tokens", "turn")),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, ("completed", None, "turn 1")),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("api", "changes", "end"), ENDS)
async def test_why_a_turn_ended_is_told(
    model: Path, api: str, changes: dict[str, Any], end: tuple[Any, ...], stream: bool
) -> None:
    told: list[Any] = []

    async def once(client: Any, task: EnvironmentTask) -> float:
        told.append(await whole(client, request(api, task, **changes), stream))
        return 1.0

    async with staged(model, playing(api, once), lambda p: "turn 1", **SETTINGS) as stage:
        await stage.group()
    (reply,) = told
    if api == MESSAGES:
        assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == end
    else:
        why = reply.incomplete_details and reply.incomplete_details.reason
        assert (reply.status, why, reply.output_text) == end
        entries = reply.output[0].content[0].logprobs
        served = "".join(entry.token for entry in entries or ())
        assert served == ("turn 1<eos>" if "include" in changes else "")


IMAGE = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}
THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}]}
UNSUPPORTED = "unsupported_parameter"
REFUSALS: list[tuple[str, dict[str, Any], str, str | None]] = [
    (MESSAGES, {"model": "claude"}, "model_not_found", "model"),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, UNSUPPORTED, "thinking"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, UNSUPPORTED, "tool_choice"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305"}]}, UNSUPPORTED, "tools"),
    (MESSAGES, {"extra_body": {"best": 1}}, UNSUPPORTED, "best"),
    (MESSAGES, {"messages": [IMAGE]}, UNSUPPORTED, "messages[0]"),
    (MESSAGES, {"messages": [*BEGIN, THOUGHT]}, UNSUPPORTED, "messages[1]"),
    (MESSAGES, {"messages": ["begin"]}, "invalid_value", "messages[0]"),
    (MESSAGES, {"messages": [{"role": "assistant", "content": ""}]}, "invalid_value", "messages"),
    (MESSAGES, {"stop_sequences": [""]}, "invalid_value", "stop_sequences"),
    (MESSAGES, {"max_tokens": 0}, "invalid_value", "max_tokens"),
    (MESSAGES, {"extra_headers": {"X-Paceline-Sample": "no"}}, "unknown_sample", None),
    (RESPONSES, {"previous_response_id": "resp_1"}, UNSUPPORTED, "previous_response_id"),
    (RESPONSES, {"background": True}, UNSUPPORTED, "background"),
    (RESPONSES, {"reasoning": {"effort": "high"}}, UNSUPPORTED, "reasoning"),
    (RESPONSES, {"include": ["file_search_call.results"]}, UNSUPPORTED, "include"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, UNSUPPORTED, "tools"),
    (RESPONSES, {"tool_choice": "required"}, UNSUPPORTED, "tool_choice"),
    (RESPONSES, {"input": [*BEGIN, {"type": "reasoning"}]}, UNSUPPORTED, "input[1]"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, UNSUPPORTED, "input[0]"),
    (RESPONSES, {"input": 3}, "invalid_value", "input"),
    (RESPONSES, {"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    (RESPONSES, {"temperature": 3}, "invalid_value", "temperature"),
    (RESPONSES, {"input": "x" * 400}, "context_length_exceeded", "input"),
]
STATUS = {"model_not_found": "NotFoundError", "unknown_sample": "AuthenticationError"}
TYPES = {"model_not_found": "not_found_error", "unknown_sample": "authentication_error"}


@pytest.mark.parametrize("api", [MESSAGES, RESPONSES])
async def test_what_is_not_supported_is_refused_by_name_as_the_client_knows(
    model: Path, api: str
) -> None:
    package: Any = anthropic if api == MESSAGES else openai
    expected = [refusal for refusal in REFUSALS if refusal[0] == api]
    errors: list[Any] = []

    async def refused(client: Any, task: EnvironmentTask) -> float:
        for _, changes, *_ in expected:
            with pytest.raises(package.APIStatusError) as caught:
                await create(api, client)(**request(api, task, **changes))
            errors.append(caught.value)
        return 1.0

    async with staged(model, playing(api, refused), calls_once, **SETTINGS) as stage:
        await stage.produce(lease_of(count=1))
        assert not stage.engine.requests
    for error, (_, changes, code, param) in zip(errors, expected, strict=True):
        body = error.body["error"] if api == MESSAGES else error.body
        assert (body["code"], body["param"]) == (code, param), changes
        assert type(error).__name__ == STATUS.get(code, "BadRequestError"), changes
        assert body["message"]
        if api == MESSAGES:
            assert error.body["type"] == "error"
            assert body["type"] == TYPES.get(code, "invalid_request_error"), changes


TOO_LARGE = {
    "chat/completions": (
        '"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "tool_calls": [{'
        '"id": "1", "function": {"name": "add", "arguments": "{\\"a\\": 1e999}"}}]}, '
        '{"role": "tool", "content": "2"}]'
    ),
    MESSAGES: '"messages": [{"role": "user", "content": "1"}], "max_tokens": 9, '
    '"tools": [{"name": "add", "input_schema": {"x": Infinity}}]',
    RESPONSES: '"input": "1", "tools": [{"type": "function", "name": "add", "x": 1e999}]',
}


async def test_a_number_beyond_a_float_is_refused_and_takes_no_turn(model: Path) -> None:
    replies: list[httpx.Response] = []

    async def posts(task: EnvironmentTask, sample: Sample) -> float:
        assert task.openai is not None
        async with httpx.AsyncClient(headers=dict(task.openai.headers)) as client:
            for path, fields in TOO_LARGE.items():
                body = f'{{"model": "{task.openai.model}", {fields}}}'
                url = f"{task.openai.base_url}/{path}"
                replies.append(await client.post(url, content=body))
        return 1.0

    async with staged(model, posts, calls_once, **SETTINGS) as stage:
        await stage.produce(lease_of(count=1))
        assert not stage.engine.requests
    refused = [(reply.status_code, reply.json()["error"]["code"]) for reply in replies]
    assert refused == [(400, "invalid_value")] * 3


@pytest.mark.parametrize("api", [MESSAGES, RESPONSES])
async def test_an_agent_that_runs_out_of_room_ends_its_transcript_whatever_wraps_the_error(
    model: Path, api: str
) -> None:
    async def asks_on(client: Any, task: EnvironmentTask) -> None:
        try:
            while True:
                await create(api, client)(**request(api, task))
        except (anthropic.APIError, openai.APIError) as error:
            raise ValueError("no answer") from error

    async def endless(client: Any, task: EnvironmentTask) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asks_on(client, task))

    limits = {**SETTINGS, "max_turns": 2}
    async with staged(model, playing(api, endless), calls_once, **limits) as stage:
        for completion in (await stage.group()).completions:
            assert completion.finish_reason == rollout_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("api", [MESSAGES, RESPONSES])
async def test_a_stream_that_ends_without_a_turn_raises(model: Path, api: str) -> None:
    errors: list[Any] = []
    background: list[Any] = []

    async def forgotten(task: EnvironmentTask) -> None:
        async with client_of(api, task.openai) as client:
            try:
                await whole(client, request(api, task), stream=True)
            except (anthropic.APIError, openai.APIError) as error:
                errors.append(error)

    async def forgets(task: EnvironmentTask, sample: Sample) -> float:
        background.append(asyncio.ensure_future(forgotten(task)))
        await seen(worker, lambda: stage.engine.running)
        return 1.0

    worker = asyncio.get_running_loop()
    async with staged(model, forgets, calls_once, **SETTINGS) as stage:
        stage.engine.hold()
        refused = await stage.refusal(lease_of(count=1))
        assert "before the model had a turn" in refused.detail
        await until(lambda: errors)
    assert "sample is over" in str(errors[0])


async def test_one_sample_may_be_spoken_to_in_several_apis(model: Path) -> None:
    """A conversation is the same whoever continues it, and branches wherever it is rewritten."""

    async def chats(client: Any, task: EnvironmentTask) -> float:
        more = {"role": "user", "content": "more"}
        text = (await ask(client, task, BEGIN)).choices[0].message.content
        async with client_of(MESSAGES, task.openai) as other:
            for said in (text, "summary"):
                history = [*BEGIN, {"role": "assistant", "content": said}, more]
                options = request(MESSAGES, task, messages=history)
                text = (await other.messages.create(**options)).content[0].text
        history += [{"role": "assistant", "content": text}, more]
        options = request(RESPONSES, task, input=history)
        return float((await client.responses.create(**options)).output_text == "turn 3")

    def count_up(prompt: str) -> str:
        return f"turn {prompt.count('[assistant]')}"

    async with staged(model, agent(chats), count_up, **SETTINGS) as stage:
        group = await stage.group()
        more = "<eos>\n[user]more<eos>\n[assistant]"
        assert [text for _, text in texts_of(stage, group)] == [
            f"turn 1{more}turn 2<eos>",
            f"summary{more}turn 2{more}turn 3<eos>",
        ]
        assert group.completions[0].reward == 1.0
