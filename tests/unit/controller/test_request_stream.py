"""Requests over one open stream: what each side does if the other one dies, is late, repeats itself
or floods it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from controller.errors import NotLeading
from controller.services.grpc_server import Services
from controller.services.open_requests import MOST_OPEN, OpenRequests
from paceline.groups.invalid import Invalid
from paceline.rpc import client
from paceline.rpc.client import ControlPlane, RequestRefused
from paceline.rpc.ports import free_ports
from paceline.rpc.request_stream import RequestStream
from paceline.v1 import common_pb2, rollout_pb2, worker_pb2

TOKEN = "of-the-run"
LEASE, SUBMIT, RETURN = (
    f"RolloutService.{name}" for name in ("LeaseTasks", "SubmitGroups", "ReturnTasks")
)
Handler = Callable[[Any, Any], Awaitable[Any]]


@asynccontextmanager
async def serving(
    port: int = 0, largest: int = 64 << 20, **handlers: Handler
) -> AsyncIterator[Any]:
    """A server with these methods of RolloutService, and its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    named = {f"RolloutService.{name}": handler for name, handler in handlers.items()}
    controller: Any = SimpleNamespace(leader=None, hint="")
    server.add_generic_rpc_handlers((Services(controller, named, TOKEN, largest),))
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
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
    return rollout_pb2.SubmitRequest(groups=[rollout_pb2.GroupFacts(task=task)])


async def accept(_: Any, request: rollout_pb2.SubmitRequest) -> rollout_pb2.SubmitReply:
    results = [
        rollout_pb2.SubmitResult(task=group.task, verdict=rollout_pb2.VERDICT_ACCEPTED)
        for group in request.groups
    ]
    return rollout_pb2.SubmitReply(results=results)


async def test_a_request_that_waits_holds_up_no_other() -> None:
    tasks_there = asyncio.Event()

    async def lease(_: Any, request: rollout_pb2.LeaseRequest) -> rollout_pb2.LeaseReply:
        await tasks_there.wait()
        return rollout_pb2.LeaseReply(leases=[rollout_pb2.Lease(seed=request.lease_seq)])

    async with (
        serving(LeaseTasks=lease, SubmitGroups=accept) as address,
        calling(address) as control,
    ):
        waiting = asyncio.create_task(control.call(LEASE, lease_request(5)))
        names = [f"t{n}" for n in range(20)]
        replies = await asyncio.gather(*(control.call(SUBMIT, submission(n)) for n in names))
        assert [r.results[0].task.task_id for r in replies] == names, "each got its own reply"
        assert not waiting.done()
        tasks_there.set()
        assert (await waiting).leases[0].seed == 5


@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
async def test_a_stream_that_breaks_around_the_commit_has_its_request_repeated(
    committed: bool,
) -> None:
    """The controller dies with the request; the next one, at the same address, gets it again,
    unchanged."""
    (port,) = free_ports("127.0.0.1", 1)
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

    async with calling(f"127.0.0.1:{port}") as control:
        async with serving(port, LeaseTasks=die):
            call = asyncio.create_task(control.call(LEASE, lease_request(3), None))
            await reached.wait()
        async with serving(port, LeaseTasks=once):
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


async def test_a_request_to_a_controller_that_hangs_moves_to_the_leader() -> None:
    reached, withdrawn = asyncio.Event(), asyncio.Event()

    async def hang(_: Any, request: Any) -> Any:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            withdrawn.set()

    async with (
        serving(SubmitGroups=hang) as old,
        serving(SubmitGroups=accept) as leader,
        calling(old) as control,
    ):
        call = asyncio.create_task(control.call(SUBMIT, submission("t5")))
        await reached.wait()
        control.prefer(leader)
        assert (await call).results[0].task.task_id == "t5"
        await withdrawn.wait()


async def test_a_late_reply_is_dropped_and_its_stream_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "ATTEMPT_S", 0.2)
    came, reached, withdrawn = [], asyncio.Event(), asyncio.Event()

    async def slow_once(_: Any, request: rollout_pb2.SubmitRequest) -> rollout_pb2.SubmitReply:
        came.append(request)
        reached.set()
        if len(came) == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                withdrawn.set()
                # Overtaken by its own reply.
                return rollout_pb2.SubmitReply()
        return await accept(None, request)

    async with serving(SubmitGroups=slow_once) as address, calling(address) as control:
        call = asyncio.create_task(control.call(SUBMIT, submission("t6")))
        await reached.wait()
        first = control._streams[address]
        assert (await call).results[0].task.task_id == "t6"
        await withdrawn.wait()
        assert control._streams[address] is not first and not first.usable
        assert (await control.call(SUBMIT, submission("t7"))).results[0].task.task_id == "t7"


async def test_a_cancelled_caller_withdraws_its_request_alone() -> None:
    reached, withdrawn = asyncio.Event(), asyncio.Event()

    async def lease(_: Any, request: Any) -> Any:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            withdrawn.set()

    async with (
        serving(LeaseTasks=lease, SubmitGroups=accept) as address,
        calling(address) as control,
    ):
        call = asyncio.create_task(control.call(LEASE, lease_request()))
        await reached.wait()
        stream = control._streams[address]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await withdrawn.wait()
        await control.call(SUBMIT, submission())
        assert control._streams[address] is stream


async def test_a_message_over_the_limit_is_refused_alone() -> None:
    """Of a request by its sender, of a reply by the controller: neither breaks the stream for the
    others."""
    tasks_there = asyncio.Event()

    async def lease(_: Any, request: rollout_pb2.LeaseRequest) -> rollout_pb2.LeaseReply:
        await tasks_there.wait()
        return rollout_pb2.LeaseReply(leases=[rollout_pb2.Lease(seed=9)])

    async def large(_: Any, request: Any) -> rollout_pb2.ReturnReply:
        result = rollout_pb2.SubmitResult(message="x" * (1 << 20))
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


async def test_a_stream_without_the_token_is_refused_before_a_message_is_read() -> None:
    async with serving(SubmitGroups=accept) as address:
        control = ControlPlane([address], token="guessed")
        with pytest.raises(RequestRefused) as refused:
            await control.call(SUBMIT, submission())
        assert refused.value.code == "UNAUTHENTICATED"
        await control.close()


async def test_only_requests_of_the_stream_are_answered_over_it() -> None:
    async with serving(SubmitGroups=accept) as address, calling(address) as control:
        call = control.bind(address, "WorkerService.Requests")(metadata=control.metadata)
        for number, (method, body) in enumerate(
            [("AdminService.Stop", b""), ("no such", b""), (SUBMIT, b"\xff\xff")], 1
        ):
            await call.write(worker_pb2.RequestFrame(number=number, method=method, body=body))
        await call.done_writing()
        codes = {}
        while (reply := await call.read()) is not grpc.aio.EOF:
            codes[reply.number] = reply.code
        unimplemented = grpc.StatusCode.UNIMPLEMENTED.value[0]
        invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert codes == {1: unimplemented, 2: unimplemented, 3: invalid}


async def test_a_client_that_floods_the_stream_is_not_read_any_further() -> None:
    begun, release = 0, asyncio.Event()

    async def answer(frame: worker_pb2.RequestFrame) -> worker_pb2.ReplyFrame:
        nonlocal begun
        begun += 1
        await release.wait()
        return worker_pb2.ReplyFrame(number=frame.number)

    read = 0

    async def frames() -> AsyncIterator[worker_pb2.RequestFrame]:
        nonlocal read
        for number in range(1, 4 * MOST_OPEN):
            read = number
            yield worker_pb2.RequestFrame(number=number, method=SUBMIT)

    replies = OpenRequests(answer).replies(frames())
    first = asyncio.ensure_future(anext(replies))
    for _ in range(20 * MOST_OPEN):
        await asyncio.sleep(0)
    assert begun == MOST_OPEN and read == MOST_OPEN + 1
    release.set()
    numbers = [(await first).number] + [reply.number async for reply in replies]
    assert sorted(numbers) == list(range(1, 4 * MOST_OPEN))


async def test_replies_that_are_not_read_stop_the_reading_of_requests() -> None:
    begun = 0

    async def answer(frame: worker_pb2.RequestFrame) -> worker_pb2.ReplyFrame:
        nonlocal begun
        begun += 1
        return worker_pb2.ReplyFrame(number=frame.number)

    async def frames() -> AsyncIterator[worker_pb2.RequestFrame]:
        for number in range(1, 10 * MOST_OPEN):
            yield worker_pb2.RequestFrame(number=number, method=SUBMIT)

    replies = OpenRequests(answer).replies(frames())
    await anext(replies)
    for _ in range(20 * MOST_OPEN):
        await asyncio.sleep(0)
    assert begun <= MOST_OPEN + 1
    await replies.aclose()


async def test_a_number_that_is_used_twice_ends_the_stream() -> None:
    async def answer(frame: worker_pb2.RequestFrame) -> worker_pb2.ReplyFrame:
        await asyncio.sleep(0)
        return worker_pb2.ReplyFrame(number=frame.number)

    async def frames() -> AsyncIterator[worker_pb2.RequestFrame]:
        for _ in range(2):
            yield worker_pb2.RequestFrame(number=1, method=SUBMIT)

    with pytest.raises(Invalid, match="request 1 of this stream is still open"):
        async for _ in OpenRequests(answer).replies(frames()):
            pass


async def test_what_a_stream_left_open_is_cancelled_with_it() -> None:
    reached, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(_: Any, request: Any) -> Any:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(SubmitGroups=hang) as address:
        async with calling(address) as control:
            call = asyncio.create_task(control.call(SUBMIT, submission()))
            await reached.wait()
        with pytest.raises(asyncio.CancelledError):
            await call
        await cancelled.wait()


class Call:
    """WorkerService.Requests of a controller; ``replies`` are what it sends."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[worker_pb2.ReplyFrame] = asyncio.Queue()
        self.written: list[worker_pb2.RequestFrame] = []

    async def write(self, frame: worker_pb2.RequestFrame) -> None:
        self.written.append(frame)

    async def read(self) -> Any:
        return await self.replies.get()

    def cancel(self) -> None:
        pass


async def test_a_reply_that_cannot_be_read_fails_its_own_request_and_no_other() -> None:
    call = Call()
    stream = RequestStream(call, largest=1 << 20)
    bad, good = (
        stream.send("RolloutService.LeaseTasks", rollout_pb2.LeaseReply, request, 60.0)
        for request in (rollout_pb2.LeaseRequest(), rollout_pb2.LeaseRequest(lease_seq=2))
    )
    call.replies.put_nowait(worker_pb2.ReplyFrame(number=1, body=b"\xff\xff"))
    reason = rollout_pb2.EMPTY_REASON_PAUSED
    body = rollout_pb2.LeaseReply(empty_reason=reason).SerializeToString()
    call.replies.put_nowait(worker_pb2.ReplyFrame(number=2, body=body))
    with pytest.raises(grpc.aio.AioRpcError, match="bad reply"):
        await asyncio.wait_for(bad, 60)
    assert (await asyncio.wait_for(good, 60)).empty_reason == reason
    assert stream.usable
    stream.close()
