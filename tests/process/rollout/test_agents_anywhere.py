"""An agent on another machine (a network namespace) speaks to its sample; a stranger there gets
nothing."""

import asyncio
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_worker.environments.base import EnvironmentTask, Sample
from testbed.faults.network_namespaces import HUB, Hosts, why_not
from tests.fixtures.environment_fixture import staged

pytest.importorskip("anthropic")
WHY_NOT = why_not()
SETTINGS: dict[str, Any] = {"openai": True, "data": {"chat": True}, "group_size": 1}

AGENT = """
import os, anthropic, openai
say = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "begin"}]}
first = openai.OpenAI(max_retries=0).chat.completions.create(**say)
say["messages"] += [{"role": "assistant", "content": first.choices[0].message.content}]
say["messages"] += [{"role": "user", "content": "more"}]
print(anthropic.Anthropic(max_retries=0).messages.create(max_tokens=20, **say).content[0].text)
"""
STRANGER = """
import http.client, os, ssl, urllib.parse
at = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
trust = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
trust.verify_flags |= ssl.VERIFY_X509_STRICT
for path in ("models", "messages", "chat/completions", "x"):
    line = http.client.HTTPSConnection(at.netloc, context=trust)
    line.request("POST", f"/v1/{path}", b"{}", {"Authorization": "Bearer guess"})
    reply = line.getresponse()
    print(reply.status, reply.read().decode())
del os.environ["SSL_CERT_FILE"]
try:
    http.client.HTTPSConnection(at.netloc).request("GET", "/v1/models")
except ssl.SSLCertVerificationError:
    print("untrusted")
plain = http.client.HTTPConnection(at.netloc)
try:
    plain.request("GET", "/v1/models")
    plain.getresponse()
except (OSError, http.client.HTTPException):
    print("no http")
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts("agent")
    try:
        yield made
    finally:
        made.close()


def count_up(prompt: str) -> str:
    return f"turn {prompt.count('[assistant]')}"


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
async def test_an_agent_on_another_machine_plays_and_a_stranger_there_learns_nothing(
    hosts: Hosts, model: Path
) -> None:
    said: list[list[str]] = []

    async def run(task: EnvironmentTask, code: str, more: dict[str, str]) -> list[str]:
        assert task.openai is not None
        environ = {**os.environ, **task.openai.environ, "MODEL": task.openai.model}
        process = await asyncio.create_subprocess_exec(
            *hosts.on("agent", [sys.executable, "-c", code]),
            env={**environ, **more},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        return out.decode().splitlines()

    async def elsewhere(task: EnvironmentTask, sample: Sample) -> float:
        said.append(await run(task, STRANGER, {"OPENAI_API_KEY": "", "ANTHROPIC_API_KEY": ""}))
        said.append(await run(task, AGENT, {}))
        return 1.0

    at = {"openai_host": hosts.address[HUB], "environment_timeout_s": 300.0}
    async with staged(model, elsewhere, count_up, **SETTINGS, **at) as stage:
        text = (await stage.group()).completions[0].text
    assert text == "turn 1<eos>\n[user]more<eos>\n[assistant]turn 2<eos>"
    (*answers, trust, plain), spoken = said
    assert spoken == ["turn 2"]
    assert len(answers) == 4 and len(set(answers)) == 1 and answers[0].startswith("401 ")
    assert (trust, plain) == ("untrusted", "no http")
    assert str(model) not in answers[0]


async def test_on_all_addresses_it_is_verified_by_the_one_that_others_reach(
    model: Path, tmp_path: Path
) -> None:
    seen: list[Any] = []
    home = tmp_path / "endpoints" / "rollout-0"
    home.mkdir(parents=True)
    (home / "ca.pem").write_text("of a worker that was killed")

    async def once(task: EnvironmentTask, sample: Sample) -> float:
        assert task.openai is not None and task.openai.ca_file is not None
        trust = ssl.create_default_context(cafile=task.openai.ca_file)
        trust.verify_flags |= ssl.VERIFY_X509_STRICT
        async with httpx.AsyncClient(verify=trust, headers=dict(task.openai.headers)) as client:
            seen.append((await client.get(f"{task.openai.base_url}/models")).json())
        # The agent reaches others as before. A container that mounts the files gets no key, and a
        # worker that is killed leaves none.
        environ = task.openai.environ
        assert len(ssl.create_default_context(cafile=environ["SSL_CERT_FILE"]).get_ca_certs()) > 50
        assert Path(task.openai.ca_file).parent == home
        assert {file.name for file in home.iterdir()} == {"ca.pem", "trust.pem"}
        assert not any("PRIVATE KEY" in file.read_text() for file in home.iterdir())
        seen.append(task.openai)
        await sample(task.prompt)
        return 1.0

    settings = {**SETTINGS, "openai_host": "0.0.0.0"}
    async with staged(model, once, count_up, host="127.0.0.2", home=home, **settings) as stage:
        await stage.group()
    models, at = seen
    assert [card["id"] for card in models["data"]] == [at.model]
    assert at.base_url.startswith("https://127.0.0.2:")
    assert not is_there(at.ca_file), "it goes with the endpoint"


async def test_the_certificate_of_a_successor_stays(model: Path, tmp_path: Path) -> None:
    """A worker that was given up may end after the one that took its place has begun."""
    home = tmp_path / "endpoint"
    settings = {**SETTINGS, "openai_host": "0.0.0.0"}
    async with staged(model, echo, count_up, host="127.0.0.2", home=home, **settings):
        (home / "ca.pem").write_text("its successor's")
    assert (home / "ca.pem").read_text() == "its successor's"


async def echo(task: EnvironmentTask, sample: Sample) -> float:
    await sample(task.prompt)
    return 1.0


def is_there(path: str) -> bool:
    return Path(path).exists()
