"""Environments of verifiers and OpenEnv, the real packages, in an interpreter of their own.

verifiers needs an older openai and mcp than vLLM does. So each has a virtual environment with what
Paceline's lacks, or has in another version; all else comes from Paceline's.
"""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.rpc.addresses import free_ports
from paceline.v1 import rollout_pb2
from testbed.fleets.controllers import until
from tests.fixtures.environment_fixture import lease_of, mask_of, staged, tokens_of

PACKAGES = {
    "verifiers": (
        "verifiers==0.4.0 openai==2.54.0 mcp==2.0.0 mcp-types==2.0.0 gepa==0.1.4 "
        "prime-pydantic-config==0.4.3 prime-runs==0.1.4 prime-sandboxes==0.5.1 "
        "prime-tunnel==0.1.15 prime-traces==0.0.10 renderers==0.1.12 openai-harmony==0.0.8 "
        "tenacity==9.2.1 aiofiles==25.1.0 connectrpc==0.11.1 protobuf-py==0.1.1 "
        "protobuf-py-ext==0.1.1 pyqwest==0.12.0 tomli==2.5.0 tomli-w==1.2.0"
    ),
    "openenv": (
        "openenv-core==0.3.0 fastmcp==4.2.3 fastmcp-slim==4.2.3 exceptiongroup==1.3.2 "
        "py-key-value-aio==0.5.0 uncalled-for==0.6.2 beartype==0.23.1"
    ),
}
LETTERS = """
    import openai
    import verifiers.v1 as vf

    class LettersData(vf.TaskData):
        letter: str

    class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):
        @vf.reward(weight=0.5)
        async def letters(self, trace) -> float:
            return float(trace.last_reply.count(self.data.letter))

        @vf.reward
        async def calls(self, trace) -> float:
            return float(len(trace.calls))

    class Letters(vf.Taskset[LettersTask, vf.TasksetConfig]):
        def load(self):
            for letter in "ab":
                data = LettersData(prompt=f"write {letter}", letter=letter)
                yield LettersTask(data, self.config.task)

    class TwiceConfig(vf.HarnessConfig):
        twice: bool = True

    class Twice(vf.Harness[TwiceConfig]):
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
            if data.prompt == "break":
                raise ValueError("broken harness")
            client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
            messages = [{"role": "user", "content": data.prompt}]
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                answer = reply.choices[0].message.content
                messages += [{"role": "assistant", "content": answer}]
                messages += [{"role": "user", "content": "again"}]
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    __all__ = ["Letters", "Twice"]
"""
SERVER = """
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        number: int

    class Told(Observation):
        text: str

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, most=9, **_):
            self.number, self.state_ = seed % most, State(step_count=0)
            return Told(text=f"0 to {most - 1}", done=False)

        def step(self, action, timeout_s=None, **_):
            right = action.number == self.number
            return Told(text="higher or lower", done=right, reward=1.0 if right else None)

        @property
        def state(self):
            return self.state_

    uvicorn.run(create_fastapi_app(Game, Guess, Told), port=PORT, log_level="error")
"""


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The interpreter of a virtual environment, by the package."""

    def python(package: str) -> str:
        home = tmp_path_factory.getbasetemp() / package
        if not home.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
            site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
            packages = PACKAGES[package].split()
            command = [*pip, "--target", site / "site-packages", *packages]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
        return str(home / "bin" / "python")

    yield python


@pytest.fixture(autouse=True)
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "letters.py").write_text(textwrap.dedent(LETTERS))
    monkeypatch.chdir(tmp_path)


def of_package(python: str, name: str, **options: Any) -> dict[str, Any]:
    return {
        "environment": name,
        "environment_options": options,
        "environment_python": python,
        "data": {"chat": True},
        "openai": name.startswith("verifiers"),
        "group_size": 1,
    }


async def test_a_verifiers_environment_is_played_and_scored_as_it_is(
    model: Path, pythons: Any
) -> None:
    local = {"agent": {"runtime": {"type": "subprocess"}}}
    settings = of_package(pythons("verifiers"), "verifiers:letters", **local)
    async with staged(model, None, lambda prompt: "b" * 4, **settings) as stage:
        row = {"prompt": "write b", "letter": "b", "answer": ""}
        (completion,) = (await stage.group(lease_of(row, count=1))).completions
        assert completion.reward == 0.5 * 4 + 2
        assert dict(completion.reward_components) == {"letters": 2, "calls": 2}
        made = [t for t, m in zip(tokens_of(completion), mask_of(completion), strict=True) if m]
        assert stage.tokenizer.decode(made[:4]) == "bbbb" and len(made) == 2 * 5

        broken = await stage.refusal(lease_of(row | {"prompt": "break"}, count=1))
        assert broken.reason == "environment_error" and "broken harness" in broken.detail
        malformed = await stage.refusal(lease_of(row | {"letter": {}}, count=1))
        assert malformed.reason == "environment_setup_error" and "letter" in malformed.detail
        short = lease_of(row, count=1)
        short.settings.CopyFrom(
            rollout_pb2.TaskSettings(
                max_tokens=40,
                top_p=1.0,
                max_turns=1,
                environment_timeout_s=60.0,
                reward_timeout_s=5.0,
            )
        )
        (full,) = (await stage.group(short)).completions
        assert full.finish_reason == rollout_pb2.FINISH_REASON_LENGTH


REFUSED = [
    ("verifiers:absent", {}, "'absent' not found"),
    ("verifiers:letters", {"id": "user-sim"}, "only one can be trained"),
    ("verifiers:letters", {"agents": 3}, "agents"),
]


async def test_what_is_not_supported_is_refused_at_the_door_and_tasks_become_rows(
    pythons: Any,
) -> None:
    """In one process: verifiers takes long to import."""
    code = f"""
        import sys
        sys.path += {sys.path!r}
        from rollout_worker.environments import base, verifiers_adapter
        for name, options, _ in {REFUSED!r}:
            try:
                base.load(name, options)
            except base.BadEnvironment as error:
                print(error)
        sys.argv[1:] = ["letters", "--limit", "1"]
        verifiers_adapter.main()
    """
    command = [pythons("verifiers"), "-c", textwrap.dedent(code)]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    *refusals, row = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr
    for said, (name, _, why) in zip(refusals, REFUSED, strict=True):
        assert said.startswith(f"rollout.environment = '{name}': ") and why in said
    assert json.loads(row) == {"idx": 0, "prompt": "write a", "letter": "a"}


async def test_an_openenv_server_gives_observations_and_rewards_of_turns(
    model: Path, pythons: Any
) -> None:
    python, (port,) = pythons("openenv"), free_ports("127.0.0.1", 1)
    paths = os.pathsep.join(sys.path)
    code = f"import sys; sys.path += {paths!r}.split(':')\n{textwrap.dedent(SERVER)}"
    name = f"openenv:http://127.0.0.1:{port}"
    settings = of_package(python, name, action="number", observation="text", reset={"most": 1})

    def guess(prompt: str) -> str:
        return "0" if "higher" in prompt else "1" if "No action" in prompt else "x"

    async with staged(model, None, guess, **settings) as stage:
        away = await stage.refusal(lease_of(count=1))
        assert away.reason == "environment_setup_error" and str(port) in away.detail
        server = await asyncio.create_subprocess_exec(python, "-c", code.replace("PORT", str(port)))
        try:
            await until(lambda: listens(port), 120.0)
            group = await stage.group(lease_of(count=1))
            whole = settings | {"environment_options": {"action": "*"}, "max_turns": 1}
            async with staged(model, None, lambda prompt: "[3]", **whole) as other:
                (cut,) = (await other.group(lease_of(count=1))).completions
        finally:
            server.kill()
            await server.wait()
    (completion,) = group.completions
    assert completion.reward == 1.0
    assert cut.reward == 0.0 and "turns" in cut.reward_components
    assert "0 to 0" in group.prompt_text and "No action: Server error" in completion.text


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
