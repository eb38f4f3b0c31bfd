"""Who may read and write: tokens, other sites' pages, rebinding, guessing."""

import asyncio
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from controller.rest import request_proof
from controller.rest.auth import BURST_S, PROVEN, RATE, RestAuth
from controller.rest.commands import idempotency_key
from controller.rest.request_proof import ANSWER_HEADER, SCHEME, WINDOW_S, Proofs, answer_proof
from paceline.rpc.auth import own_token
from testbed.fleets.controller_processes import write_config
from testbed.fleets.controllers import until
from testbed.patience import patient
from tests.fixtures.rest_proofs import nonce_of, proof

TOKEN = "0123456789abcdef0123456789abcdef"
GOOD, BAD = f"Bearer {TOKEN}", f"Bearer {TOKEN[:-1]}x"
PEER = "http://127.0.0.1:9001"


async def _reached(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(f"reached {Request(scope).url.path}")(scope, receive, send)


def client(
    *, loopback: bool = True, peers: Collection[str] = (PEER,), base: str = "http://127.0.0.1:9000"
) -> httpx.AsyncClient:
    door = RestAuth(
        _reached, token=TOKEN, loopback=loopback, origins=lambda: peers, policy=lambda: "none"
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url=base)


@pytest.mark.parametrize(
    ("loopback", "method", "path", "token", "expected"),
    [
        (True, "GET", "/api/v1/run", None, 200),
        (True, "GET", "/api/v1/run", GOOD, 200),
        (True, "GET", "/api/v1/run", BAD, 401),
        (True, "POST", "/api/v1/stop", None, 401),
        (True, "POST", "/api/v1/stop", BAD, 401),
        (True, "POST", "/api/v1/stop", TOKEN, 401),
        (True, "POST", "/api/v1/stop", GOOD, 200),
        (True, "POST", f"/api/v1/stop?token={TOKEN}", None, 401),
        (True, "PUT", "/api/v1/run", None, 401),
        (False, "GET", "/", None, 200),
        (False, "GET", "/static/app.js", None, 200),
        (False, "GET", "/healthz", None, 200),
        (False, "GET", "/metrics", None, 401),
        (False, "GET", "/api/v1/run", None, 401),
        (False, "GET", "/api/v1/openapi.json", None, 401),
        (False, "GET", "/api/v1/run", GOOD, 200),
        (False, "GET", "/api/v1/run", BAD, 401),
        (False, "POST", "/api/v1/stop", GOOD, 200),
        (False, "POST", "/", None, 401),
    ],
)
async def test_who_may_what(
    loopback: bool, method: str, path: str, token: str | None, expected: int
) -> None:
    headers = {"Authorization": token} if token else {}
    async with client(loopback=loopback) as door:
        answer = await door.request(method, path, headers=headers)
    assert answer.status_code == expected, answer.text
    if expected == 401:
        assert answer.headers["content-type"] == "application/problem+json"
        assert TOKEN not in answer.text
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1234"},
        {"Origin": "http://127.0.0.2:9000"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_writes_from_another_sites_page_are_refused_even_with_the_token(
    headers: dict[str, str],
) -> None:
    async with client() as door:
        answer = await door.post("/api/v1/stop", headers={"Authorization": GOOD, **headers})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        asked = await door.options("/api/v1/stop", headers=headers)
        assert asked.status_code == 403
        # Its page may send a read, as any link does, but cannot see the answer.
        read = await door.get("/api/v1/run", headers=headers)
        assert "access-control-allow-origin" not in read.headers


@pytest.mark.parametrize("origin", [PEER, "http://localhost:9001", "http://127.0.0.1:9000"])
async def test_the_pages_of_the_runs_own_controllers_may_read_and_write(origin: str) -> None:
    async with client() as door:
        asked = await door.options("/api/v1/stop", headers={"Origin": origin})
        assert asked.status_code == 204
        assert "authorization" in asked.headers["access-control-allow-headers"]
        done = await door.post(
            "/api/v1/stop",
            headers={"Authorization": GOOD, "Origin": origin, "Sec-Fetch-Site": "same-site"},
        )
        assert done.status_code == 200
        assert done.headers["access-control-allow-origin"] == origin
        assert "access-control-allow-credentials" not in done.headers


@pytest.mark.parametrize("host", ["rebound.example", "127.0.0.1.evil.example:9000", "[", ""])
async def test_a_foreign_name_that_resolves_to_loopback_is_refused(host: str) -> None:
    async with client() as door:
        answer = await door.get("/api/v1/run", headers={"Host": host})
        assert answer.status_code == 403
    async with client(loopback=False, base="http://host.example") as door:
        assert (await door.get("/", headers={"Host": "any.example"})).status_code == 200


@pytest.mark.parametrize("host", ["host.example/?x=", "host.example/static/", "h.example/healthz#"])
async def test_a_crafted_host_opens_no_path(host: str) -> None:
    # A path that is made from the Host header is another than the application's.
    async with client(loopback=False, base="http://host.example") as door:
        for path in ("/api/v1/run", "/metrics"):
            answer = await door.get(path, headers={"Host": host})
            assert answer.status_code == 401, answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]


async def test_who_guesses_tokens_waits_for_turns_and_the_right_token_does_not() -> None:
    """Behind a proxy, and on a shared machine, a guesser has the owner's address."""
    async with client() as door:
        answers: Counter[int] = Counter()

        async def guess() -> None:
            while True:
                bad = await door.post("/api/v1/stop", headers={"Authorization": BAD})
                answers[bad.status_code] += 1

        guessers = [asyncio.create_task(guess()) for _ in range(400)]
        await until(lambda: answers.total() > RATE * BURST_S)  # each waits for its turn by then
        async with asyncio.timeout(patient(2.0)):
            good = await door.post("/api/v1/stop", headers={"Authorization": GOOD})
        assert good.status_code == 200 and answers.keys() <= {401, 503}
        for task in guessers:
            task.cancel()
        await asyncio.gather(*guessers, return_exceptions=True)


async def test_a_proof_steers_once_and_for_its_own_request_alone() -> None:
    """Whoever took the port of a dead controller gets no more than that."""
    body, path = b'{"steps": 3}', "/api/v1/run?x=%20a"
    async with client(loopback=False) as door:

        async def post(header: str, path: str = path, body: bytes = body) -> int:
            headers = {"Authorization": header}
            return (await door.post(path, content=body, headers=headers)).status_code

        stolen = proof(TOKEN, "POST", path, body)
        assert TOKEN not in stolen
        assert await post(stolen, path="/api/v1/stop") == 401
        assert await post(proof(TOKEN, "POST", path, body), body=b'{"steps": 4}') == 401
        assert await post(proof(TOKEN, "GET", path, body)) == 401
        assert await post(proof(f"{TOKEN}x", "POST", path, body)) == 401
        assert await post(stolen) == 200
        assert await post(stolen) == 401, "twice"
        stamp, rest = proof(TOKEN, "POST", path, body).split(".", 1)
        assert await post(f"{SCHEME}{int(stamp.removeprefix(SCHEME)) + 1}.{rest}") == 401
        asked = proof(TOKEN, "GET", path)
        read = await door.get(path, headers={"Authorization": asked})
        assert read.status_code == 200
        mine = answer_proof(TOKEN, nonce_of(asked), 200, read.content)
        assert read.headers[ANSWER_HEADER] == mine, "the answer is proven too"
        assert ANSWER_HEADER not in (await door.get("/healthz")).headers


def test_a_write_that_is_repeated_at_the_next_leader_has_one_key() -> None:
    """Its own controller has forgotten the proof, or has died."""
    header = proof(TOKEN, "POST", "/api/v1/pause")

    def key(header: str) -> str:
        proven = Proofs(TOKEN).accept(header, "POST", "/api/v1/pause")
        return idempotency_key(Request({"type": "http", "state": {PROVEN: proven}}))

    assert key(header) == key(header) != key(proof(TOKEN, "POST", "/api/v1/pause"))


async def test_an_old_proof_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    old = proof(TOKEN, "GET", "/api/v1/run")
    now = time.time()
    monkeypatch.setattr(request_proof.time, "time", lambda: now + WINDOW_S + 1)
    async with client(loopback=False) as door:
        assert (await door.get("/api/v1/run", headers={"Authorization": old})).status_code == 401


async def test_bodies_are_bounded() -> None:
    async def endless() -> object:
        yield b"x"

    headers = {"Authorization": GOOD}
    async with client() as door:
        big = await door.post("/api/v1/stop", content=b"x" * 100_000, headers=headers)
        assert big.status_code == 413
        unknown = await door.post("/api/v1/stop", content=endless(), headers=headers)  # type: ignore[arg-type]
        assert unknown.status_code == 411


def test_the_runs_own_token_is_one_and_its_owners_alone(tmp_path: Path) -> None:
    first = own_token(tmp_path)
    assert own_token(tmp_path) == first and len(first) == 48
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["token"]


def test_an_open_door_without_a_token_is_refused_in_one_clear_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, rest={"host": "0.0.0.0"})
    command = [sys.executable, "-m", "controller", str(config), "--run-dir", str(tmp_path / "r")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = [x for x in ended.stderr.splitlines() if x.startswith("controller: ")]
    assert ended.returncode == 2 and len(lines) == 1 and "Traceback" not in ended.stderr
    assert "rest.host" in lines[0] and "auth.token_file" in lines[0]
    assert not (tmp_path / "r" / "redis").exists()
