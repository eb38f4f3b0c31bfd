"""What a handler raises becomes a status that clients repeat, or give up on, rightly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from redis.exceptions import ConnectionError as RedisAway

import policy_worker.main
import rollout_worker.main
from controller.ledger.decisions.commands import CommandRefused
from controller.services.grpc_server import Services
from paceline.errors import RefusalCode
from paceline.payloads.group_limits import Invalid
from paceline.rpc import client
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2, rollout_pb2
from tests.fixtures.configs import config_of
from tests.fixtures.sockets import fresh_address

TOKEN = "of-the-run"
STORES = [RedisAway("Connection refused"), OSError(5, "Input/output error"), TimeoutError()]


@asynccontextmanager
async def serving(handlers: dict[str, Any], leader: Any = None) -> AsyncIterator[ControlPlane]:
    """``leader``: what the controller that serves takes for its own."""
    server = grpc.aio.server()
    controller = SimpleNamespace(leader=leader, hint="")
    server.add_generic_rpc_handlers((Services(controller, handlers, TOKEN),))
    address = fresh_address()
    server.add_insecure_port(address)
    await server.start()
    control = ControlPlane([address], token=TOKEN)
    try:
        yield control
    finally:
        await control.close()
        await server.stop(0)


@pytest.mark.parametrize("error", STORES, ids=lambda e: type(e).__name__)
async def test_a_store_that_fails_once_costs_a_retry(error: Exception) -> None:
    failures = [error]

    async def get_status(_: Any, request: admin_pb2.StatusRequest) -> admin_pb2.StatusReply:
        if failures:
            raise failures.pop()
        return admin_pb2.StatusReply(run_name="here")

    async with serving({"AdminService.GetStatus": get_status}) as control:
        reply = await control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), 10.0)
        assert reply.run_name == "here"


@pytest.mark.heavy
async def test_a_store_that_stays_away_is_no_refusal_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the last attempt is cut short by the deadline of the call."""
    monkeypatch.setattr(client, "ATTEMPT_S", 60.0)
    asked = 0

    async def get_status(_: Any, request: admin_pb2.StatusRequest) -> admin_pb2.StatusReply:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise RedisAway("Connection refused")
        await asyncio.Event().wait()
        raise AssertionError

    async with serving({"AdminService.GetStatus": get_status}) as control:
        with pytest.raises(ControlPlaneUnavailable, match="Connection refused"):
            await control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), 5.0)


@pytest.mark.parametrize(
    "error", [Invalid("newest is 219"), CommandRefused(RefusalCode.UNKNOWN, "never heard of")]
)
async def test_a_refusal_is_final_only_while_the_lease_is_held(error: Exception) -> None:
    """A leader that was stopped and wakes refuses from what it remembers."""

    async def lease_tasks(_: Any, request: rollout_pb2.LeaseRequest) -> rollout_pb2.LeaseReply:
        raise error

    async def watch(_: Any, request: admin_pb2.WatchRequest) -> AsyncIterator[bytes]:
        raise error
        yield b""

    handlers = {"RolloutService.LeaseTasks": lease_tasks, "AdminService.WatchEvents": watch}
    for active, said in ((True, RequestRefused), (False, ControlPlaneUnavailable)):
        async with serving(handlers, SimpleNamespace(active=active)) as control:
            with pytest.raises(said):
                await control.call("RolloutService.LeaseTasks", rollout_pb2.LeaseRequest(), 0.5)
            with pytest.raises(said):
                async for _ in control.stream(
                    "AdminService.WatchEvents", admin_pb2.WatchRequest(), timeout_s=0.5
                ):
                    pass


async def test_a_fault_of_the_controller_is_a_refusal_that_says_so() -> None:
    async def get_status(_: Any, request: admin_pb2.StatusRequest) -> admin_pb2.StatusReply:
        raise KeyError("bug")

    async with serving({"AdminService.GetStatus": get_status}) as control:
        with pytest.raises(RequestRefused, match="KeyError") as refused:
            await control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), 5.0)
        assert refused.value.code == "UNKNOWN"


class Ending:
    """A worker that ends with a refusal."""

    def __init__(self, code: str, admitted: bool, waits: bool) -> None:
        self.code, self.admitted, self.waits = code, admitted, waits

    def run(self) -> Any:
        if self.waits:
            return self._run()
        raise RequestRefused(self.code, "why")

    async def _run(self) -> None:
        raise RequestRefused(self.code, "why")


@pytest.mark.parametrize("role", ["RolloutWorker", "PolicyWorker"])
@pytest.mark.parametrize(
    ("code", "admitted", "status"),
    [
        ("INVALID_ARGUMENT", False, 2),
        ("FAILED_PRECONDITION", False, 2),
        ("UNAUTHENTICATED", False, 2),
        ("UNKNOWN", False, 1),
        ("UNKNOWN", True, 1),
        ("INVALID_ARGUMENT", True, 1),
    ],
)
def test_only_a_registration_can_be_refused_for_bad_input(
    monkeypatch: pytest.MonkeyPatch, role: str, code: str, admitted: bool, status: int
) -> None:
    """Status 2 ends the whole run: the supervisor starts nothing again for it."""
    rollout = role == "RolloutWorker"
    module: Any = rollout_worker.main if rollout else policy_worker.main
    made: Callable[..., Any] = lambda *_: Ending(code, admitted, waits=rollout)  # noqa: E731
    monkeypatch.setattr(module, role, made)
    monkeypatch.setattr(module.logs, "setup", lambda _: None)
    config = config_of()
    given = {"controllers": ["127.0.0.1:1"], "run_dir": None, "tensor_host": None}
    assert module.run(config, SimpleNamespace(id="w", **given)) == status
