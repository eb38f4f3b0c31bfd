"""An agent that has tools is served calls of them, and trained on the text that they were written
as."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.environments.base import EnvironmentTask
from rollout_worker.openai_server.replies import calls_in
from tests.fixtures.chat_model import TOOLS, make_chat_model
from tests.fixtures.environment_fixture import (
    Stage,
    check_trained_as_sampled,
    logprobs_of,
    mask_of,
    staged,
    tokens_of,
)
from tests.fixtures.openai_agents import ADD, ANSWERED, BEGIN, agent, ask, calling

openai = pytest.importorskip("openai")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
OTHER = '<tool_call>\n{"arguments": {"t": "</tool_call> {"}, "name": "say"}\n</tool_call>'
SETTINGS: dict[str, Any] = {
    "openai": True,
    "data": {"chat": True, "max_prompt_tokens": 300},
    "group_size": 1,
    "max_tokens": 150,
    "max_context": 900,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("tools"), TOOLS)


def calls_once(prompt: str) -> str:
    return "It is 2." if "[tool add]" in prompt else f"Let me see. {CALL}"


def prompt_of(stage: Stage, prompt_tokens: bytes) -> str:
    tokenizer: PromptTokenizer = stage.tokenizer
    return tokenizer.decode_all(np.frombuffer(prompt_tokens, "<i4").tolist())


async def test_calls_are_told_as_calls_and_recorded_as_sampled(model: Path) -> None:
    told: list[Any] = []

    async def uses_a_tool(client: Any, task: EnvironmentTask) -> float:
        messages: list[Any] = list(BEGIN)
        while True:
            reply = await ask(
                client, task, messages, tools=[ADD], tool_choice="auto", logprobs=True
            )
            told.append(reply.choices[0])
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(message.content == "It is 2.")
            for call in message.tool_calls:
                answer = str(json.loads(call.function.arguments)["a"] + 1)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})

    async with staged(model, agent(uses_a_tool), calls_once, **SETTINGS) as stage:
        group = await stage.group()
        assert prompt_of(stage, group.prompt_tokens) == (
            f"[tools]{json.dumps([ADD])}<eos>\n[user]begin<eos>\n[assistant]"
        )
    first, second = told
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    assert first.message.content == "Let me see."
    (call,) = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert second.message.tool_calls is None
    completion = group.completions[0]
    assert completion.reward == 1.0
    assert completion.text == (
        f"Let me see. {CALL}<eos>\n[tool add]2<eos>\n[assistant]It is 2.<eos>"
    )
    mask = np.array(mask_of(completion), bool)
    assert mask.sum() == len(f"Let me see. {CALL}") + 1 + len("It is 2.") + 1
    served = [entry.logprob for choice in told for entry in choice.logprobs.content]
    np.testing.assert_allclose(served, np.array(logprobs_of(completion))[mask])
    assert len(tokens_of(completion)) == len(mask)


async def test_a_stream_carries_calls(model: Path) -> None:
    chunks: list[Any] = []

    async def streams(client: Any, task: EnvironmentTask) -> float:
        stream = await ask(client, task, BEGIN, tools=[ADD, ADD], stream=True)
        async for chunk in stream:
            chunks.append(chunk.choices[0])
        return 1.0

    async with staged(model, agent(streams), lambda p: CALL + OTHER, **SETTINGS) as stage:
        assert (await stage.group()).completions[0].text == f"{CALL}{OTHER}<eos>"
    assert not any(c.delta.content for c in chunks)
    calls = [call for c in chunks for call in c.delta.tool_calls or []]
    assert [(c.index, c.function.name) for c in calls] == [(0, "add"), (1, "say")]
    assert json.loads(calls[1].function.arguments) == {"t": "</tool_call> {"}
    assert len({c.id for c in calls}) == 2
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"name": "add"}',
        '<tool_call>{"name": "add"} and more</tool_call>',
        "<tool_call>" + "[" * 100_000,
        " <tool_call> ",
        "</tool_call>",
        " no call ",
    ],
    ids=lambda text: text[:50],
)
def test_what_is_no_call_to_the_letter_stays_content(text: str) -> None:
    assert calls_in(text) == (text, [])
    assert calls_in(f"{text}{CALL}") == (text.strip(), [("add", {"a": 1})])
    assert calls_in(f"{CALL}{text}{OTHER}")[0] == text.strip()


async def test_without_tools_or_with_none_to_choose_a_call_is_text(model: Path) -> None:
    async def plain(client: Any, task: EnvironmentTask) -> float:
        options = {"tools": [ADD], "tool_choice": "none"} if task.index else {}
        (choice,) = (await ask(client, task, BEGIN, **options)).choices
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"
        assert choice.message.content == f"Let me see. {CALL}"
        # The next turn may be another matter; this one is recognised by its text.
        said = [*BEGIN, choice.message, {"role": "user", "content": "?"}]
        if task.index:
            (choice,) = (await ask(client, task, said, tools=[ADD])).choices
            assert choice.message.tool_calls[0].function.name == "add"
        return 1.0

    settings = {**SETTINGS, "group_size": 2}
    async with staged(model, agent(plain), calls_once, **settings) as stage:
        await stage.group()


async def test_calls_that_are_rewritten_and_other_tools_open_branches(model: Path) -> None:
    async def rewrites(client: Any, task: EnvironmentTask) -> float:
        reply = await ask(client, task, BEGIN, tools=[ADD])
        said = reply.choices[0].message.model_dump(exclude_none=True)
        answer = {**ANSWERED, "name": "add"}
        other_arguments, no_call = deepcopy(said), deepcopy(said)
        other_arguments["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
        del no_call["tool_calls"]
        one_more_call = {**said, "tool_calls": said["tool_calls"] * 2}
        for changed, tools in (
            *((changed, [ADD]) for changed in (other_arguments, no_call, one_more_call)),
            (said, []),
        ):
            await ask(client, task, [*BEGIN, changed, answer], tools=tools)
        # JSON may be written differently, and ids are the client's own affair.
        said["tool_calls"][0] |= {"id": "mine"}
        said["tool_calls"][0]["function"]["arguments"] = '{ "a":1 }'
        reply = await ask(client, task, [*BEGIN, said, answer], tools=[ADD])
        return float(reply.choices[0].message.content == "It is 2.")

    settings = {**SETTINGS, "branch_threshold": 1000}
    async with staged(model, agent(rewrites), calls_once, **settings) as stage:
        group = await stage.group()
        assert [c.reward for c in group.completions] == [1.0, 0.0, 0.0, 0.0, 0.0]
        assert group.completions[0].text.endswith("[tool add]2<eos>\n[assistant]It is 2.<eos>")
        check_trained_as_sampled(stage, group)


async def test_calls_that_the_agent_begins_with_go_through_the_template(model: Path) -> None:
    example = [{"role": "user", "content": "1+1"}, calling("add", '{"a":1}'), ANSWERED]

    async def shows(client: Any, task: EnvironmentTask) -> float:
        await ask(client, task, example, tools=[ADD])
        return 1.0

    async with staged(model, agent(shows), calls_once, **SETTINGS) as stage:
        group = await stage.group()
        assert prompt_of(stage, group.prompt_tokens).endswith(
            f"<eos>\n[user]1+1<eos>\n[assistant]{CALL}<eos>\n[tool add]2<eos>\n[assistant]"
        )
