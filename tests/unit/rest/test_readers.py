"""Strangers who read as fast as they can: the leader gives them a small part of its time."""

import asyncio
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from controller.rest.auth import BURST_S, LONGEST_WAIT_S, MOST_WAITING, RATE, Lane, RestAuth

TOOK_S = 0.02


class Slow:
    """An application that takes its time, one question at a time or not."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.fails = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked[scope["path"]] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(TOOK_S)
        self.at_once -= 1
        status = 500 if self.fails else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        body = f"answer {self.asked[scope['path']]}".encode()
        await send({"type": "http.response.body", "body": body})
        if self.fails:
            raise RuntimeError("a bug")


def client_of(app: Slow) -> httpx.AsyncClient:
    auth = RestAuth(app, "secret", True, origins=list, policy=str)
    transport = httpx.ASGITransport(app=auth)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)


async def test_strangers_get_a_fifth_of_the_time_and_a_bug_is_no_way_round_it() -> None:
    app = Slow()
    app.fails = True
    began = time.monotonic()
    async with client_of(app) as client:
        asked = (client.get(f"/api/v1/steps?limit={n}") for n in (1, 2, 3))
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [500] * 3
    # Each computation of 20 ms is followed by a rest of 80 ms.
    assert app.most_at_once == 1 and time.monotonic() - began > 2 * 5 * TOOK_S


async def test_different_questions_are_computed_one_after_the_other_and_then_refused() -> None:
    app = Slow()
    async with client_of(app) as client:
        paths = [f"/api/v1/groups?search={n}" for n in range(MOST_WAITING + 8)]
        answers = await asyncio.gather(*(client.get(path) for path in paths))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(refused) == 8 and all(answer.headers["retry-after"] for answer in refused)
    assert app.most_at_once == 1 and sum(app.asked.values()) == MOST_WAITING


@pytest.mark.parametrize("token", ["", "secret"])
async def test_equal_questions_share_an_answer_until_a_command_comes(token: str) -> None:
    """32 connections of a stranger, or of whoever has the token, cost one computation."""
    app, owner = Slow(), {"Authorization": "Bearer secret"}
    async with client_of(app) as client:
        for number in (1, 2):
            asked = (client.get("/metrics", headers=owner if token else {}) for _ in range(32))
            assert {a.text for a in await asyncio.gather(*asked)} == {f"answer {number}"}
            await client.post("/api/v1/pause", headers=owner)
    assert app.asked["/metrics"] == 2 and app.most_at_once == 1


async def test_a_store_that_hangs_keeps_no_other_answer_from_the_owner() -> None:
    class Hanging(Slow):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/api/v1/groups/t1":
                await asyncio.Event().wait()
            await super().__call__(scope, receive, send)

    async with client_of(Hanging()) as client:
        client.headers["Authorization"] = "Bearer secret"
        asked = (client.get(f"/api/v1/{path}") for path in ("groups/t1", "why"))
        hung, told = map(asyncio.create_task, asked)
        assert (await asyncio.wait_for(told, 20)).status_code == 200
        hung.cancel()


def test_a_lane_gives_turns_at_its_rate_and_refuses_who_would_wait_too_long() -> None:
    now = 100.0
    lane = Lane(lambda: now)
    waits = [lane.wait_s() for _ in range(round(RATE * (BURST_S + LONGEST_WAIT_S)) + 2)]
    assert waits[: round(RATE * BURST_S)] == [0.0] * round(RATE * BURST_S)
    late = [wait_s for wait_s in waits if wait_s]
    assert late == sorted(late) and LONGEST_WAIT_S - 0.1 < late[-1] <= LONGEST_WAIT_S
    assert waits[-1] is None
    now += 1.0
    assert lane.wait_s() is not None
