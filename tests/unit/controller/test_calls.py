"""Calls to controllers that die, hang, or do not lead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from controller.runtime import NotLeading
from controller.services.grpc_server import Services
from paceline.rpc.client import ControlPlane, RequestRefused
from paceline.v1 import common_pb2, rollout_pb2
from tests.fixtures.sockets import fresh_address

TOKEN = "of-the-run"
LEASE, SUBMIT, RETURN = (
    f"RolloutService.{name}" for name in ("LeaseTasks", "SubmitGroups", "ReturnTasks")
)
Handler = Callable[[Any, Any], Awaitable[Any]]


@asynccontextmanager
async def serving(
    address: str = "", largest: int = 4 << 20, **handlers: Handler
) -> AsyncIterator[Any]:
    """A server with these methods of RolloutService, and its address."""
    server = grpc.aio.server(
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", largest)]
    )
    named = {f"RolloutService.{name}": handler for name, handler in handlers.items()}
    controller: Any = SimpleNamespace(leader=None, hint="")
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
