"""Sessions over failovers, silence, and directives that come late, twice or out of order."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from controller.fleet.sessions import Sessions
from controller.ledger import Ledger
from paceline.config.load import load_config
from paceline.rpc import session as session_module
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from paceline.rpc.session import WorkerSession
from paceline.v1 import admin_pb2, common_pb2, worker_pb2
from testbed.fleets.controller_processes import write_config
from testbed.fleets.controllers import (
    addresses,
    config_of,
    control_of,
    running_controllers,
    status,
    until,
)
from testbed.workers.fake_workers import FakeRollout
from tests.fakes.peer import answering


async def directive_of(
    session: WorkerSession, wanted: Callable[[worker_pb2.Directive], bool], timeout_s: float
) -> worker_pb2.Directive:
    """The session's directive, once ``wanted`` holds for it."""
    await until(lambda: session.directive is not None and wanted(session.directive), timeout_s)
    assert session.directive is not None
    return session.directive


def test_a_stream_ends_an_earlier_one_of_its_own_process_only() -> None:
    def report(incarnation: int) -> worker_pb2.Report:
        caller = common_pb2.Caller(worker_id="rollout-0", incarnation=incarnation)
        return worker_pb2.Report(caller=caller)

    sessions = Sessions(1, Ledger())
    of_the_newer = sessions.open(report(2))
    sessions.open(report(1))
    assert not of_the_newer.closed
    assert sessions.of("rollout-0", 2) is of_the_newer
    again = sessions.open(report(2))
    assert of_the_newer.closed and not again.closed


async def _state(control: ControlPlane, worker_id: str, state: str) -> bool:
    return any(
        w.worker_id == worker_id and w.state == state for w in (await status(control)).workers
    )


async def test_the_last_report_says_the_final_lifecycle_even_if_another_is_under_way(
    tmp_path: Path,
) -> None:
    with running_controllers(tmp_path, 1) as controllers:
        worker = FakeRollout(config_of(controllers), addresses(controllers), "rollout-0")
        await worker.start()
        await until(lambda: worker.session.connected)
        closing: list[asyncio.Task[None]] = []

        def report() -> worker_pb2.Report:
            made = worker.report()
            if not closing:
                # Begins while the report just made is being written.
                worker.lifecycle = worker_pb2.LIFECYCLE_STOPPED
                closing.append(asyncio.create_task(worker.session.close(flush_s=10)))
            return made

        worker.session.report = report
        worker.session.poke()
        await until(lambda: closing)
        await closing[0]
        control = control_of(controllers)
        assert await _state(control, "rollout-0", "stopped"), "taken before close returned"
        await worker.stop(goodbye=False)
        await control.close()


# ---- the client side against a controller made for the purpose ------------------------------


async def test_late_repeated_and_reordered_directives_do_no_harm(tmp_path: Path) -> None:
    order = [(5, 1), (5, 3), (5, 2), (5, 3), (4, 99), (5, 4), (7, 1), (5, 9), (7, 2)]

    terms: list[int] = []

    async def session(reports: Any, context: Any) -> AsyncIterator[worker_pb2.Directive]:
        terms.append((await anext(reports)).seen_term)
        for term, seq in order:
            yield worker_pb2.Directive(term=term, seq=seq, version=10 * term + seq)
        async for report in reports:
            terms.append(report.seen_term)

    seen: list[tuple[int, int]] = []
    async with answering({"WorkerService.Session": session}) as address:
        control = ControlPlane([address])
        worker = session_of(control, tmp_path)
        worker.on_directive(lambda d: seen.append((d.term, d.seq)))
        running = asyncio.create_task(worker.run())
        last = await directive_of(worker, lambda d: (d.term, d.seq) == (7, 2), 10.0)
        assert seen == [(5, 1), (5, 3), (5, 4), (7, 1), (7, 2)]
        assert worker.directive is last
        with pytest.raises(TimeoutError):
            await directive_of(worker, lambda d: d.term == 8, 0.05)
        # Reports say which term it follows: a leader of a lower one is not followed.
        worker.poke()
        await until(lambda: terms[-1] == 7)
        assert terms[0] == 0
        running.cancel()
        await control.close()


def session_of(control: ControlPlane, tmp_path: Path) -> WorkerSession:
    return WorkerSession(
        control,
        worker_id="w",
        role=common_pb2.ROLE_ROLLOUT,
        config=load_config(write_config(tmp_path), []),
        report=worker_pb2.Report,
    )


@asynccontextmanager
async def leader_of(term: int, *, hangs: bool = False) -> AsyncIterator[tuple[str, list[str]]]:
    """Gives a directive of ``term`` and says that it leads it. Its address, and what it was asked.

    ``hangs``: answers the first report of a session and then no request at all.
    """
    asked: list[str] = []

    async def session(reports: Any, context: Any) -> AsyncIterator[worker_pb2.Directive]:
        asked.append("session")
        await anext(reports)
        yield worker_pb2.Directive(term=term, seq=1)
        await asyncio.sleep(600)

    async def leads(request: Any, context: Any) -> admin_pb2.StatusReply:
        asked.append("status")
        if hangs:
            await asyncio.sleep(600)
        status = admin_pb2.StatusReply(run_name="found", term=term)
        status.controllers.add(address=address, state="leader")
        return status

    handlers = {"WorkerService.Session": session, "AdminService.GetStatus": leads}
    async with answering(handlers) as address:
        yield address, asked


async def test_a_hung_leader_is_left_as_soon_as_another_one_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "SILENCE_S", 600.0)
    async with leader_of(5, hangs=True) as (hung, _), leader_of(6) as (alive, _):
        control = ControlPlane([hung, alive])
        worker = session_of(control, tmp_path)
        running = asyncio.create_task(worker.run())
        await directive_of(worker, lambda d: d.term == 5, 10.0)
        waiting = asyncio.create_task(status(control))
        await directive_of(worker, lambda d: d.term == 6, 20.0)
        assert (await waiting).run_name == "found", "requests that hung have moved, too"
        running.cancel()
        await control.close()


async def test_a_leader_that_is_only_slow_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "SILENCE_S", 600.0)
    async with leader_of(5, hangs=True) as (slow, _), leader_of(5) as (alive, asked):
        control = ControlPlane([slow, alive])
        worker = session_of(control, tmp_path)
        running = asyncio.create_task(worker.run())
        await directive_of(worker, lambda d: d.term == 5, 10.0)
        await until(lambda: len(asked) >= 5)
        assert set(asked) == {"status"}
        assert (control.address, worker.connected) == (slow, True)
        running.cancel()
        await control.close()


async def test_outages_time_out() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    control = ControlPlane([nobody, nobody])
    with pytest.raises(ControlPlaneUnavailable, match=r"within 0\.3 s"):
        await control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), 0.3)
    await control.close()


async def test_a_call_that_is_cancelled_while_it_moves_ends() -> None:
    """Else a worker that leaves while the leader changes would wait for an answer for ever."""
    with socket.socket() as listener, socket.socket() as other:
        for each in (listener, other):
            each.bind(("127.0.0.1", 0))
            each.listen(8)  # and never answers
        hung, next_ = (f"127.0.0.1:{each.getsockname()[1]}" for each in (listener, other))
        control = ControlPlane([hung, next_])
        request = admin_pb2.StatusRequest()
        waiting = asyncio.create_task(control.call("AdminService.GetStatus", request, None))
        await asyncio.to_thread(listener.accept)
        control.prefer(next_)
        waiting.cancel()
        done, _ = await asyncio.wait({waiting}, timeout=5.0)
        waiting.cancel()
        assert done and waiting.cancelled()
        await control.close()


@pytest.mark.parametrize("ends", ["reply", "error"])
async def test_a_cancellation_that_the_call_swallows_ends_the_caller(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """gRPC does so if the call ends in the same instant; Ctrl-C was lost."""

    class Swallowing:
        def __await__(self) -> Any:
            try:
                yield from asyncio.get_running_loop().create_future().__await__()
            except asyncio.CancelledError:
                if ends == "reply":
                    return admin_pb2.StatusReply()
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata()) from None

    control = ControlPlane(["127.0.0.1:1"])
    calls = []
    monkeypatch.setattr(
        control, "bind", lambda *_: lambda *_, **__: calls.append(Swallowing()) or calls[-1]
    )
    waiting = asyncio.create_task(
        control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), None)
    )
    await until(lambda: calls)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=60)
    assert waiting.cancelled() and len(calls) == 1
