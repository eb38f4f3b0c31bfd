"""Stacks of one worker, as the leader can get them.

this machine ──► signal; the process writes them itself, whatever it is stuck in
another ───────► directive to its session ──► SendStacks
no session ────► what its side channel sent: it says so itself if its event loop is stuck
"""

from __future__ import annotations

import asyncio
import socket

from controller.fleet.stack_requests import ANSWER_S
from controller.leader import Leader
from controller.ledger.commands import CommandRefused
from controller.replicated_controller import Controller
from paceline.process.kernel_state import kernel_state
from paceline.process.stacks import read_stacks
from paceline.refusal_code import RefusalCode
from paceline.v1 import admin_pb2

SHOWN = 8
"""Names in a refusal."""


async def stacks_of(leader: Leader, controller: Controller, worker_id: str) -> admin_pb2.StacksOf:
    """Raises CommandRefused for a worker that is not known. Takes seconds at most."""
    worker = leader.ledger.state.fleet.workers.get(worker_id)
    noted = controller.without_session.present(controller.clock.monotonic()).get(worker_id)
    if worker is None and noted is None:
        raise CommandRefused(RefusalCode.UNKNOWN, _unknown(leader, worker_id))
    host, pid = (worker.host, worker.pid) if worker is not None else (noted[1].host, noted[1].pid)  # type: ignore[index]
    reply = admin_pb2.StacksOf(worker_id=worker_id, host=host, pid=pid)
    if host == socket.gethostname() and kernel_state(pid, worker_id) is not None:
        found = await asyncio.to_thread(read_stacks, controller.run_dir, worker_id, pid)
        reply.stacks, reply.note = found.text, found.note
        if found.text:
            return reply
    if noted is not None and noted[1].stacks:
        reply.stacks = noted[1].stacks
        reply.note = f"its event loop does not run; sent by itself {noted[0]:.1f} s ago"
        return reply
    answer = await _ask_session(leader, worker_id, worker.incarnation) if worker else ""
    if answer:
        reply.stacks, reply.note = answer, ""
    elif not reply.note:
        reply.note = (
            f"it did not answer within {ANSWER_S:g} s: log in to {host} and look at pid {pid}"
        )
    return reply


def _unknown(leader: Leader, worker_id: str) -> str:
    known = sorted(leader.ledger.state.fleet.workers)
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    there = (
        f"; there are {', '.join(known[:SHOWN])}{more}" if known else "; none has registered yet"
    )
    return f"there is no worker {worker_id!r}{there}"


async def _ask_session(leader: Leader, worker_id: str, incarnation: int) -> str:
    """Empty if it does not answer."""
    session = leader.sessions.of(worker_id, incarnation)
    if session is None:
        return ""
    future = leader.stack_requests.ask(worker_id, leader.clock.time())
    leader.sessions.send(session, leader.sessions.refresh(session))
    try:
        async with asyncio.timeout(ANSWER_S):
            return await future
    except TimeoutError:
        return ""
    finally:
        leader.stack_requests.forget(worker_id, future)
