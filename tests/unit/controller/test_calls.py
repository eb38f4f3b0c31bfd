"""Calls to controllers that die, hang, fail or do not lead, and what becomes of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest
from redis.exceptions import ConnectionError as RedisAway

from controller.ledger.decisions.commands import CommandRefused
from controller.runtime import NotLeading
from controller.services.grpc_server import Services
from paceline.errors import RefusalCode
from paceline.payloads.group_limits import Invalid
from paceline.rpc import client
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.rpc.grpc_channel import METHODS
from paceline.rpc.session import WorkerSession
from paceline.v1 import admin_pb2, common_pb2, rollout_pb2, worker_pb2
from tests.fixtures.configs import config_of
from tests.fixtures.sockets import fresh_address

TOKEN = "of-the-run"
LEASE, SUBMIT, RETURN = (
    f"RolloutService.{name}" for name in ("LeaseTasks", "SubmitGroups", "ReturnTasks")
)
Handler = Callable[[Any, Any], Awaitable[Any]]


@asynccontextmanager
async def serving(
    address: str = "", largest: int = 4 << 20, leader: Any = None, **handlers: Any
) -> AsyncIterator[Any]:
    """A server with these methods, and its address. ``leader``: what the controller that serves
    takes for its own."""
    server = grpc.aio.server(
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", largest)]
    )
    named = {full: handlers[name] for full in METHODS if (name := full.split(".")[1]) in handlers}
    controller: Any = SimpleNamespace(leader=leader, hint="")
    server.add_generic_rpc_handlers((Services(controller, named, TOKEN),))
    address = address or fresh_address()
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@asynccontextmanager
async def calling(*addresses: str, **options: Any) -> AsyncIterator[ControlPlane]:
    control = ControlPlane(addresses, token=TOKEN, **options)
    try:
        yield control
    finally:
        await control.close()


def lease_request(seq: int = 1) -> rollout_pb2.LeaseRequest:
    caller = common_pb2.Caller(worker_id="rollout-0", incarnation=7)
    return rollout_pb2.LeaseRequest(caller=caller, lease_seq=seq, max_tasks=1)


def submission(text: str = "t1") -> rollout_pb2.SubmitRequest:
    task = common_pb2.TaskRef(task_id=text, attempt=1)
    return rollout_pb2.SubmitRequest(groups=[rollout_pb2.GroupMeta(task=task)])


async def accept(_: Any, request: rollout_pb2.SubmitRequest) -> rollout_pb2.SubmitReply:
    results = [
        rollout_pb2.SubmitResult(task=group.task, verdict=rollout_pb2.VERDICT_ACCEPTED)
        for group in request.groups
    ]
    return rollout_pb2.SubmitReply(results=results)


@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
async def test_a_call_that_breaks_around_the_commit_is_repeated(
    committed: bool,
) -> None:
    """The controller dies with the request; the next one, at the same address, gets it again,
    unchanged."""
    address = fresh_address()
    ledger: dict[int, int] = {}
    came: list[bytes] = []
    reached = asyncio.Event()

    async def die(_: Any, request: rollout_pb2.LeaseRequest) -> rollout_pb2.LeaseReply:
        came.append(request.SerializeToString())
        if committed:
            ledger[request.lease_seq] = 11
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def once(_: Any, request: rollout_pb2.LeaseRequest) -> rollout_pb2.LeaseReply:
        came.append(request.SerializeToString())
        seed = ledger.setdefault(request.lease_seq, 22)
        return rollout_pb2.LeaseReply(leases=[rollout_pb2.Lease(seed=seed)])

    async with calling(address) as control:
        async with serving(address, LeaseTasks=die):
            call = asyncio.create_task(control.call(LEASE, lease_request(3), None))
            await reached.wait()
        async with serving(address, LeaseTasks=once):
            reply = await call
    assert reply.leases[0].seed == (11 if committed else 22)
    assert len(came) == 2 and came[0] == came[1] and len(ledger) == 1


async def test_a_standby_names_the_leader_and_the_request_goes_there() -> None:
    async with serving(SubmitGroups=accept) as leader:

        async def standby(_: Any, request: Any) -> Any:
            raise NotLeading("a standby", leader)

        async with serving(SubmitGroups=standby) as address, calling(address) as control:
            reply = await control.call(SUBMIT, submission("t4"))
            assert reply.results[0].verdict == rollout_pb2.VERDICT_ACCEPTED
            assert control.address == leader and leader in control.addresses


async def test_an_address_that_was_written_since_is_tried_and_no_socket_that_is_gone(
    tmp_path: Path,
) -> None:
    (tmp_path / "controllers").mkdir()
    gone = "unix:/tmp/paceline-cleaned/controller-1.sock"
    async with serving(SubmitGroups=accept) as moved:
        for name, address in (("0", moved), ("1", gone)):
            (tmp_path / "controllers" / f"{name}.json").write_text(json.dumps({"address": address}))
        async with calling(fresh_address(), run_dir=tmp_path) as control:
            await control.call(SUBMIT, submission())
            assert control.address == moved


class Hanging:
    """A handler that never answers."""

    def __init__(self) -> None:
        self.reached, self.withdrawn = asyncio.Event(), asyncio.Event()

    async def __call__(self, _: Any, request: Any) -> Any:
        self.reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.withdrawn.set()


async def test_a_request_to_a_controller_that_hangs_moves_to_the_leader() -> None:
    hang = Hanging()
    async with (
        serving(SubmitGroups=hang) as old,
        serving(SubmitGroups=accept) as leader,
        calling(old) as control,
    ):
        call = asyncio.create_task(control.call(SUBMIT, submission("t5")))
        await hang.reached.wait()
        control.prefer(leader)
        assert (await call).results[0].task.task_id == "t5"
        await hang.withdrawn.wait()


async def test_a_cancelled_caller_withdraws_its_request_alone() -> None:
    lease = Hanging()
    async with (
        serving(LeaseTasks=lease, SubmitGroups=accept) as address,
        calling(address) as control,
    ):
        call = asyncio.create_task(control.call(LEASE, lease_request()))
        await lease.reached.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await lease.withdrawn.wait()
        await control.call(SUBMIT, submission())


async def test_a_message_over_the_limit_is_refused_alone() -> None:
    """Neither a large request nor a large reply breaks the connection for other calls."""
    tasks_there = asyncio.Event()

    async def lease(_: Any, request: rollout_pb2.LeaseRequest) -> rollout_pb2.LeaseReply:
        await tasks_there.wait()
        return rollout_pb2.LeaseReply(leases=[rollout_pb2.Lease(seed=9)])

    async def large(_: Any, request: Any) -> rollout_pb2.ReturnReply:
        result = rollout_pb2.SubmitResult(message="x" * (2 << 20))
        return rollout_pb2.ReturnReply(results=[result])

    handlers = {"LeaseTasks": lease, "SubmitGroups": accept, "ReturnTasks": large}
    async with (
        serving(largest=1 << 19, **handlers) as address,
        calling(address, max_message_mb=1) as control,
    ):
        waiting = asyncio.create_task(control.call(LEASE, lease_request()))
        for method, request in (
            (SUBMIT, submission("t" * (2 << 20))),
            (RETURN, rollout_pb2.ReturnRequest()),
        ):
            with pytest.raises(RequestRefused) as refused:
                await control.call(method, request)
            assert refused.value.code == "RESOURCE_EXHAUSTED"
        tasks_there.set()
        assert (await waiting).leases[0].seed == 9


STORES = [RedisAway("Connection refused"), OSError(5, "Input/output error"), TimeoutError()]


@asynccontextmanager
async def served(leader: Any = None, **handlers: Any) -> AsyncIterator[ControlPlane]:
    async with serving(leader=leader, **handlers) as address, calling(address) as control:
        yield control


@pytest.mark.parametrize("error", STORES, ids=lambda e: type(e).__name__)
async def test_a_store_that_fails_once_costs_a_retry(error: Exception) -> None:
    failures = [error]

    async def get_status(_: Any, request: admin_pb2.StatusRequest) -> admin_pb2.StatusReply:
        if failures:
            raise failures.pop()
        return admin_pb2.StatusReply(run_name="here")

    async with served(GetStatus=get_status) as control:
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

    async with served(GetStatus=get_status) as control:
        with pytest.raises(ControlPlaneUnavailable, match="Connection refused"):
            await control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), 5.0)


@pytest.mark.parametrize(
    "error", [Invalid("newest is 219"), CommandRefused(RefusalCode.UNKNOWN, "never heard of")]
)
async def test_a_refusal_is_final_only_while_the_lease_is_held(error: Exception) -> None:
    """A leader that was stopped and wakes refuses from what it remembers."""

    async def lease_tasks(_: Any, request: rollout_pb2.LeaseRequest) -> rollout_pb2.LeaseReply:
        raise error

    for active, said in ((True, RequestRefused), (False, ControlPlaneUnavailable)):
        async with served(SimpleNamespace(active=active), LeaseTasks=lease_tasks) as control:
            with pytest.raises(said):
                await control.call("RolloutService.LeaseTasks", rollout_pb2.LeaseRequest(), 0.5)


async def test_a_fault_of_the_controller_is_a_refusal_that_says_so() -> None:
    async def get_status(_: Any, request: admin_pb2.StatusRequest) -> admin_pb2.StatusReply:
        raise KeyError("bug")

    async with served(GetStatus=get_status) as control:
        with pytest.raises(RequestRefused, match="KeyError") as refused:
            await control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), 5.0)
        assert refused.value.code == "UNKNOWN"


@pytest.mark.parametrize(
    ("code", "again", "status"),
    [
        ("INVALID_ARGUMENT", False, 2),
        ("FAILED_PRECONDITION", False, 2),
        ("UNAUTHENTICATED", False, 2),
        ("UNKNOWN", False, 1),
        ("UNKNOWN", True, 1),
        ("INVALID_ARGUMENT", True, 1),
    ],
)
async def test_only_the_first_registration_can_be_refused_for_bad_input(
    code: str, again: bool, status: int
) -> None:
    """Status 2 ends the whole run: the supervisor starts nothing again for it."""
    call = AsyncMock(return_value=worker_pb2.RegisterReply())
    control: Any = SimpleNamespace(call=call)
    session = WorkerSession(
        control,
        worker_id="w",
        role=common_pb2.ROLE_ROLLOUT,
        config=config_of(),
        report=worker_pb2.Report,
    )
    if again:
        await session.register()
    call.side_effect = RequestRefused(code, "why")
    with pytest.raises(RequestRefused, match=f"the controller refused w: {code}: why") as refused:
        await session.register()
    assert refused.value.exit_status == status
