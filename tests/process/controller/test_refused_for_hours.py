"""Hours of refused requests: what strangers leave behind in a controller's memory and open
files."""

import asyncio
import os
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import httpx
import psutil
import pytest

from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import running_controllers
from tests.fixtures.rest import rest_url

REFUSALS = os.environ.get("PACELINE_REFUSALS")
"""Set it to 50000 to measure as docs/security.md does."""
AT_ONCE = 20


def memory_kib(process: psutil.Process) -> float:
    return process.memory_info().rss / 1024


async def refuse_grpc(controllers: Controllers, number: int) -> None:
    """``number`` calls without the token, with a body of 1 KiB."""
    async with grpc.aio.insecure_channel(controllers.started[0].address) as channel:
        submit = channel.unary_unary("/paceline.v1.RolloutService/SubmitGroups")

        async def some() -> None:
            for _ in range(number // AT_ONCE):
                assert await submit(bytes(1024)).code() == grpc.StatusCode.UNAUTHENTICATED

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def refuse_rest(controllers: Controllers, number: int) -> None:
    """``number`` commands with a wrong token, each another one."""
    async with httpx.AsyncClient(base_url=rest_url(controllers), timeout=60) as client:

        async def some(first: int) -> None:
            for index in range(number // AT_ONCE):
                headers = {"Authorization": f"Bearer wrong-{first}-{index}"}
                reply = await client.post("/api/v1/pause", headers=headers, json={})
                assert reply.status_code in (401, 503), reply.text

        await asyncio.gather(*(some(first) for first in range(AT_ONCE)))


@pytest.mark.parametrize(
    ("refuse", "warm", "number"), [(refuse_grpc, 3000, 5000), (refuse_rest, 1500, 2000)]
)
async def test_refused_requests_leave_nothing_behind(
    tmp_path: Path, refuse: Callable[[Controllers, int], Awaitable[None]], warm: int, number: int
) -> None:
    """``warm``: before the measurement, pools of gRPC and of the allocator fill up."""
    number = int(REFUSALS or number)
    with running_controllers(tmp_path, 1) as controllers:
        process = psutil.Process(controllers.started[0].pid)
        await refuse(controllers, warm)
        before, log = memory_kib(process), len(controllers.log())
        await refuse(controllers, number)
        grown = (memory_kib(process) - before) * 1024 / number
        logged = (len(controllers.log()) - log) / number
        print(f"{refuse.__name__}: {grown:.0f} bytes of memory and {logged:.1f} of log a refusal")
        assert grown < 512, "bytes a refusal"
        assert logged < 10, "bytes of log a refusal"


def test_a_role_raises_its_soft_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        with running_controllers(tmp_path, 1) as controllers:
            raised = resource.prlimit(controllers.started[0].pid, resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised == min(hard, 1 << 20)
