"""Judges: their replies are parsed and checked, and a server that is away is nobody's fault."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from controller.services.admin import change_settings
from paceline.payloads.group_limits import Invalid
from paceline.v1 import admin_pb2, scorer_pb2
from scorer_worker.scorer import BadCompletion, Item, NoScore, Unavailable, make_scorer
from scorer_worker.server import items_of
from scorer_worker.url_judge import KEY_VARIABLE, _content
from tests.fakes.http_server import Answer, HttpServer
from tests.fixtures.configs import config_of

ONE = np.zeros(1, np.int32)


class JudgeServer(HttpServer):
    """OpenAI-compatible; ``replies`` are given in turn: a text, or a status."""

    def __init__(self) -> None:
        super().__init__()
        self.url += "/v1"
        self.replies: list[str | int] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.headers: dict[str, str] = {}

    def answer(self, asked: Any, body: bytes) -> Answer:
        assert asked.path == "/v1/chat/completions"
        self.bodies.append(json.loads(body))
        self.keys.append(asked.headers["Authorization"])
        reply = self.replies.pop(0)
        message = {"choices": [{"message": {"content": reply}}]}
        return reply if isinstance(reply, int) else 200, message, self.headers


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as made:
        yield made


async def asked(**scorer: Any) -> list[Any]:
    judge = make_scorer(config_of(scorers={"judge": {"kind": "judge", **scorer}}), "judge")
    try:
        await judge.start()
        return await judge.score([Item(ONE, ONE, "2 + 2?", "four {x}", "4")])
    finally:
        await judge.close()


async def test_the_last_score_in_the_reply_counts(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_JUDGE_KEY", raising=False)
    (tmp_path / "key").write_text("secret\n")
    server.replies = ["Score: 3 would be low.\nScore: 7.5"]
    key = str(tmp_path / "key")
    prompt = "Q {prompt} A {completion} R {answer} {{}}"
    found = await asked(url=server.url, model="big", api_key_file=key, prompt=prompt)
    assert found == [7.5]
    body = server.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Q 2 + 2? A four {x} R 4 {}"}]
    assert (body["model"], body["temperature"], server.keys) == ("big", 0.0, ["Bearer secret"])


async def test_a_reply_without_a_score_is_asked_again_and_then_named(server: JudgeServer) -> None:
    server.replies = ["I cannot say.", "Score: 11", "Score: 8"]
    assert await asked(url=server.url, model="m", attempts=3) == [8.0]
    server.replies = ["I cannot say.", "Score: 11"]
    with pytest.raises(NoScore, match=r"score 11 is not from 0 to 10.*2 replies"):
        await asked(url=server.url, model="m", attempts=2)
    server.replies = ["I cannot say."]
    with pytest.raises(NoScore, match=r"has no score .*I cannot say"):
        await asked(url=server.url, model="m", attempts=1)


async def test_a_server_that_is_overloaded_or_away_is_asked_again_and_a_refusal_is_final(
    server: JudgeServer,
) -> None:
    for status, error in ((503, Unavailable), (429, Unavailable), (400, NoScore)):
        server.replies = [status]
        with pytest.raises(error, match=str(status)):
            await asked(url=server.url, model="m")
    server.close()
    with pytest.raises(Unavailable, match="does not answer"):
        await asked(url=server.url, model="m")


async def test_json_that_is_nested_too_deeply_is_refused_as_other_malformed_text() -> None:
    deep = "[" * 4000
    with pytest.raises(NoScore, match="no chat completion"):
        _content(deep.encode())
    request = scorer_pb2.ScoreRequest(answer_json=deep, prompt_tokens=bytes(4), completions=[{}])
    with pytest.raises(BadCompletion, match="answer_json"):
        items_of(request)
    settings: Any = admin_pb2.SettingsRequest(request_id="x", settings={"train.steps": deep})
    leader: Any = SimpleNamespace(leading=lambda: None)
    with pytest.raises(Invalid, match=r"train\.steps"):
        await change_settings(leader, settings)


async def test_a_redirect_does_not_get_the_key(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    with JudgeServer() as thief:
        server.headers, server.replies = {"Location": f"{thief.url}/chat/completions"}, [302]
        with pytest.raises(NoScore, match=r"302.*redirects are not followed; set the URL"):
            await asked(url=server.url, model="m")
        assert thief.keys == []
